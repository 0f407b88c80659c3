"""Regular files alone are read, and what has a file's name but is none is refused."""

import os
from pathlib import Path

import pytest

from config import UserError
from plain_files import check_regular, is_given, is_regular


def test_only_files_are_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    names = ["file", "link", "pipe", "broken", "", "y" * 3000, "a\0b", "\ud800"]
    assert [is_regular(tmp_path / name) for name in names] == [True, True, *[False] * 6]
    check_regular([tmp_path / "file", tmp_path / "link", tmp_path / "missing", tmp_path / "a\0b"])
    with pytest.raises(UserError, match="broken: is a link to a file that is not there"):
        check_regular([tmp_path / "broken"])
    with pytest.raises(UserError, match="pipe: is no regular file"):
        check_regular([tmp_path / "pipe"])


def test_a_file_is_given_or_missing_and_anything_else_of_its_name_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert is_given(tmp_path / "file")
    assert not is_given(tmp_path / "missing")
    with pytest.raises(UserError, match="folder: is no regular file"):
        is_given(tmp_path / "folder")
