"""A new folder is there whole or not at all."""

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from config import UserError
from durable import check_new_folder, new_folder


def fill(folder):
    (folder / "a").mkdir()
    (folder / "a" / "b").write_bytes(b"1")


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_appears_with_all_its_files(is_there, tmp_path):
    if is_there:
        (tmp_path / "new").mkdir()
    check_new_folder(tmp_path / "new")
    with new_folder(tmp_path / "new") as folder:
        fill(folder)
        assert not (tmp_path / "new" / "a").exists()
    assert (tmp_path / "new" / "a" / "b").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_the_folder_has_the_permissions_of_any_other(tmp_path):
    with new_folder(tmp_path / "new"):
        pass
    (tmp_path / "other").mkdir()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "other")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_after_an_error_or_a_signal(error, tmp_path):
    with pytest.raises(error), new_folder(tmp_path / "new") as folder:
        fill(folder)
        raise error
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_filled_meanwhile_is_left_alone(tmp_path):
    with pytest.raises(OSError), new_folder(tmp_path / "new") as folder:
        fill(folder)
        fill_other = tmp_path / "new"
        fill_other.mkdir()
        (fill_other / "mine").write_bytes(b"2")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "mine"]


def test_a_name_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    fill(tmp_path / "full")
    for name, cause in {"file": "is a file", "full": "is not empty", "no/new": "exists"}.items():
        with pytest.raises(UserError, match=cause) as caught:
            check_new_folder(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_parent_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        check_new_folder(tmp_path / "new")


def test_what_no_folder_can_take_the_place_of_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "empty")
    for path in (Path(), tmp_path / "empty" / "..", tmp_path / "link", tmp_path / "dangling"):
        with pytest.raises(UserError, match="no name of its own; name a folder that does not"):
            check_new_folder(path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "empty")
    with pytest.raises(UserError, match="a mount point"):
        check_new_folder(tmp_path / "empty")


def test_a_name_that_would_be_too_long_while_it_is_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="too long"):
        check_new_folder(tmp_path / ("é" * 121))
    longest = tmp_path / ("é" * 120)
    check_new_folder(longest)
    with new_folder(longest):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_told_with_the_name_of_the_folder(number, tmp_path):
    full = OSError(number, os.strerror(number))
    with pytest.raises(OSError, match=str(tmp_path / "new")), new_folder(tmp_path / "new"):
        raise full
    assert not list(tmp_path.iterdir())
