"""Run one case in a process group of its own, and tell how it ended. Imports no torch."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import says_out_of_memory
from config import printable
from durable import signals_held

GRACE_S = 10.0
"""Between asking a case to end and ending it."""

PR_SET_PDEATHSIG = 1  # of prctl(2)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a case ended.

    Attributes:
        status: as in a row.
        error: why; None where it went well.
        document: what it said with --json; {} where it said none.
    """

    status: str
    error: str | None = None
    document: dict[str, Any] = field(default_factory=dict)


def run_case(command: Sequence[str], log: Path, timeout_s: float, lock: int) -> Ended:
    """Run a command to its end; nothing else happens here meanwhile.

    Args:
        log: stderr goes there, stdout beside it.
        timeout_s: after which it is ended.
        lock: file descriptor that it holds open, so that its device counts as taken while it lives.

    Raises:
        KeyboardInterrupt: a signal came; the case was asked to end, and has.
    """
    killed_before, process = oom_kills(), None
    try:
        with signals_held():  # until there is something to end
            process = start(command, log, lock)
        code, is_late = wait(process, timeout_s)
    except KeyboardInterrupt:
        if process:
            end(process, signal.SIGINT)
        raise
    finally:
        if process:
            signal_group(process, signal.SIGKILL)  # what it may have left behind
    document = read_document(log.with_suffix(".json"))
    if is_late:
        error = f"run: TimeoutExpired: ended after {timeout_s:.0f} s"
        return Ended(status="timeout", error=error, document=document)
    if code == 0 and document.get("status") == "ok":
        return Ended(status="ok", document=document)
    killed = code == -signal.SIGKILL and oom_kills() > killed_before
    return failed(code, document, log, killed=killed)


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, bool]:
    """The exit code, and whether the process was ended for being late."""
    try:
        return process.wait(timeout_s), False
    except subprocess.TimeoutExpired:
        return end(process, signal.SIGTERM), True


def failed(code: int, document: dict[str, Any], log: Path, *, killed: bool) -> Ended:
    """A case that ended by itself and not well."""
    error = document.get("error") or f"{how_it_ended(code)}: {last_lines(log, 1) or 'no word'}"
    if killed:
        error = "run: MemoryError: killed by the system, which ran out of memory"
    status = document.get("status", "error")
    if status == "ok":  # a row of which it says itself that something is wrong with it
        return Ended(status="ok", error=how_it_ended(code), document=document)
    if says_out_of_memory(error):
        status = "oom"
    return Ended(status=status, error=printable(error), document=document)


def how_it_ended(code: int) -> str:
    """An exit code as of subprocess in words."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def start(command: Sequence[str], log: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start a command that reads nothing, in a session of its own; it dies with this process."""
    with log.open("wb") as stderr, log.with_suffix(".json").open("wb") as stdout:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=die_with_parent,  # noqa: PLW1509  (there are no other threads here)
        )


def die_with_parent() -> None:
    """Have this process killed when its parent is gone, where the system can."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], number: int) -> int:
    """Ask all processes of a case to end, kill what has not done so in time; the exit code."""
    signal_group(process, number)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        signal_group(process, signal.SIGKILL)
        return process.wait()


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all gone; macOS says it the second way
        os.killpg(process.pid, number)


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    with suppress(OSError, ValueError):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict):
            return document
    return {}


def last_lines(log: Path, count: int) -> str:
    """The last lines that say something, for people."""
    lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()]
    return "\n".join(printable(line) for line in lines[-count:])


def oom_kills() -> int:
    """How often the system killed a process of this control group for want of memory; 0 elsewhere.

    Source: memory.events in https://docs.kernel.org/admin-guide/cgroup-v2.html.
    """
    with suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
        events = Path("/sys/fs/cgroup", group, "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    return 0
