"""Append a line to a file, or make a folder, so that all is on the disk whatever dies meanwhile."""

import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from command import STOP_SIGNALS
from config import UserError, printable

if sys.platform != "win32":
    import fcntl

LOCK_TIMEOUT_S = 30
MAX_NAME_BYTES = 240  # of a folder; file systems have 255, and its name grows while it is written
FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
TORN = b" <torn>"  # ends a line whose writer died in it
ORIGIN = re.compile(rb"\d{14}, tok/s=")  # a row of torchao's benchmark: whole without a newline


def check_writable(path: Path) -> None:
    """Refuse what `append_line` could not write to; a missing file is made, empty."""
    try:
        cause = "not a regular file" if path.exists() and not path.is_file() else ""
        if not cause:
            path.open("a+b").close()
    except OSError as error:
        cause = str(error.strerror)
    if cause:
        raise UserError(
            f"{printable(str(path))}: cannot be written: {cause};"
            " name a file in a folder that exists and is yours"
        )


def append_line(path: Path, line: str) -> None:
    """Add a line that is on the disk when this returns, also beside other writers.

    A line that a killed writer left unfinished is marked as torn. Signals wait for the write.

    Args:
        path: of the file; made if there is none.
        line: without its newline.

    Raises:
        OSError: naming the file; after a short write it has its old content.
    """
    data = line.encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:
            _lock(file)
            with signals_held():
                _write(file, data)
            if file.tell() == len(data):
                _sync(path.parent)
    except OSError as error:
        raise OSError(f"{printable(str(path))}: {error.strerror or error}") from error


def check_new_folder(path: Path) -> None:
    """Refuse a name under which `new_folder` could not make one."""
    name = printable(str(path))
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise UserError(f"{name}: is too long; name a folder in {MAX_NAME_BYTES} bytes")
    if path.is_symlink() or path.name in ("", "..") or os.path.ismount(path):
        cause = "is a link, a mount point or no name of its own"  # what no folder can replace
        raise UserError(f"{name}: {cause}; name a folder that does not exist")
    if path.exists() and not path.is_dir():
        raise UserError(f"{name}: is a file; name a folder that does not exist")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{name}: is not empty; name another folder, or remove it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{name}: cannot be written; name a folder in one that exists and is yours")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to put files in; it becomes `path` when all of them are on the disk.

    Nothing stays of it after an error or a signal.

    Raises:
        OSError: naming `path` where the disk is full.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield folder
        for file in folder.rglob("*"):
            _sync(file)
        folder.chmod(0o777 & ~_umask())
        if path.is_dir():
            path.rmdir()
        folder.rename(path)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            raise OSError(f"{printable(str(path))}: {error.strerror}") from error
        raise
    _sync(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _lock(file: FileIO) -> None:
    """Wait for the file; the lock ends when it is closed. Without flock (Windows): no lock."""
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"locked by others for {LOCK_TIMEOUT_S} s") from None
            time.sleep(0.02)


def _write(file: FileIO, data: bytes) -> None:
    """Close the last line if it has no newline, and add `data`, in one write."""
    file.seek(0)
    content = file.read()
    last = content.rpartition(b"\n")[2]
    closing = (b"" if ORIGIN.match(last) else TORN) + b"\n" if last else b""
    if os.write(file.fileno(), closing + data) != len(closing + data):
        file.truncate(len(content))
        raise OSError(errno.ENOSPC, "disk full, nothing was written")
    os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP after the block; only the main thread gets any."""
    # Not by a signal mask: any other thread would take the signal, and Python its handler here.
    is_main = threading.current_thread() is threading.main_thread()
    held: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in STOP_SIGNALS
        if is_main
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)
