"""sweep.py with cases that are shell commands, as a process of its own, for tests.

    python tests/sweep_program.py run FOLDER BEHAVIOURS ARGUMENTS
    python tests/sweep_program.py kill FOLDER COUNT

`run` is one sweep; `kill` has COUNT of them killed at random moments of the time that a whole one
takes, and begun again. Results, logs and locks are in FOLDER. No torch is imported.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from sweep_case import install, planned  # noqa: E402

from results import Row, scan  # noqa: E402
from scripts import sweep  # noqa: E402

NUM_CASES = 5


def run(folder: Path, behaviours: str, argv: list[str]) -> int:
    names = behaviours.split(",")
    install(pytest.MonkeyPatch(), folder, [(name, planned(i)) for i, name in enumerate(names)])
    return sweep.main([*argv, "--results", str(folder / "rows.txt")])


def kill(folder: Path, count: int) -> None:
    """Kill `count` sweeps; a set of cases is swept until it is done, then the next file begins.

    Raises:
        AssertionError: a row was lost, is not whole, or was made twice.
    """
    chance, kills, number = random.Random(0), 0, 0
    began = time.monotonic()
    sweep_until(folder / "rows.txt", None)
    whole_s = time.monotonic() - began
    while kills < count:
        (folder / "rows.txt").rename(folder / f"rows{number}.txt")
        number += 1
        while sweep_until(folder / "rows.txt", chance.uniform(0, whole_s)):
            kills += 1
        assert len(check(folder / "rows.txt")) == NUM_CASES, "a case was left out"
    print(f"{kills} kills in {number} sweeps that went through in the end")


def sweep_until(results: Path, seconds: float | None) -> bool:
    """One sweep in a fork of this process; whether it was killed before its end."""
    seen = results.read_bytes() if results.exists() else b""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os._exit(run(results.parent, ",".join(["slow"] * NUM_CASES), ["run"]))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"exit code {code}"
    content = results.read_bytes() if results.exists() else b""
    assert content.startswith(seen.rpartition(b"\n")[0]), "a row was lost"
    check(results)
    return code != 0


def check(path: Path) -> list[Row]:
    """The rows of a file: whole but for a last line under way, and each case once."""
    entries = list(scan(path)) if path.exists() else []
    rows = [entry for entry in entries if isinstance(entry, Row)]
    torn = [entry for entry in entries if not isinstance(entry, Row)]
    assert not torn or (len(torn) == 1 and entries[-1] is torn[0]), torn
    assert len({row.depth for row in rows}) == len(rows), "a case ran twice"
    assert {row.status for row in rows} <= {"ok"}
    return rows


if __name__ == "__main__":
    command, folder, argument, *rest = sys.argv[1:]
    if command == "kill":
        sys.exit(kill(Path(folder), int(argument)))
    sys.exit(run(Path(folder), argument, rest))
