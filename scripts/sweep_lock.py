"""One sweep per device, and a folder for each run. Imports no torch."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config import UserError, printable
from scripts.sweep_cases import ROOT
from scripts.sweep_rows import now

RUNS = ROOT / "runs"
WAIT_S = 2.0
"""For a device: the case of a sweep that was just killed may still be ending."""


@contextmanager
def device_lock(device: str) -> Iterator[int]:
    """Take a device for this process and the cases that inherit the descriptor.

    Raises:
        UserError: another sweep has it.
    """
    path = Path(tempfile.gettempdir()) / f"kv-fast-sweep-{device}.lock"
    descriptor = open_lock(path)
    try:
        deadline = time.monotonic() + WAIT_S
        while not is_taken(descriptor):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: another sweep measures on {device}, or a case of one that was killed;"
                    f" wait for its end (`fuser {path}` names it)"
                )
            time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """A descriptor of the file, which may be somebody else's: /tmp is shared."""
    try:
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; remove it") from None


def is_taken(descriptor: int) -> bool:
    """Whether the lock of the file is now ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_folder(run: str | None) -> Path:
    """The folder of logs of a run, whose name is the run's; a new one is named after the time.

    Raises:
        UserError: it cannot be made.
    """
    try:
        if run is not None:
            (RUNS / run).mkdir(parents=True, exist_ok=True)
            return RUNS / run
        while True:
            folder = RUNS / now().strftime("%Y%m%dT%H%M%SZ")
            RUNS.mkdir(exist_ok=True)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # two in one second, on two devices
                time.sleep(0.1)
    except OSError as error:
        raise UserError(f"{printable(str(RUNS))}: {error.strerror}") from None
