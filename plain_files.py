"""What lies under a path: regular files alone are read. Imports no torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from config import UserError


class DamagedFile(ValueError):
    """What is wrong with a file, for the line that names it."""


def start_of(opened: BinaryIO) -> str:
    """What a file that is of another kind than its name says begins with."""
    opened.seek(0)
    data = opened.read(8)
    return f"starts with {data!r}" if data else "is empty"


def is_regular(file: Path) -> bool:
    """Whether there is such a file and it is no folder, pipe or device; any name may be asked."""
    return os.path.isfile(file)  # noqa: PTH113  (Path.is_file raises for a name that is too long)


def is_there(file: Path) -> bool:
    """Whether there is anything of this name; any name may be asked."""
    return os.path.exists(file)  # noqa: PTH110  (Path.exists raises for a name that is too long)


def check_regular(files: Iterable[Path]) -> None:
    """Refuse what is no regular file: opening a pipe waits for ever, a device may be endless."""
    for file in files:
        if is_there(file) and not is_regular(file):
            raise UserError(f"{file}: is no regular file; give the path of a copy in a folder")
        if os.path.lexists(file) and not is_there(file):
            raise UserError(f"{file}: is a link to a file that is not there; download it again")


def is_given(file: Path) -> bool:
    """Whether there is such a file; what has its name but is none is refused, not left out."""
    check_regular([file])
    return is_regular(file)
