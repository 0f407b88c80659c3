"""Whatever is damaged in a file of any format: the right weights, or one line that names it."""

import os
import subprocess
import sys
from pathlib import Path

import mutations
import pytest

ROOT = Path(__file__).parent.parent
NUM_CASES, NUM_SLOW_CASES, BATCH = 250, 10_000, 1000

every_kind = pytest.mark.parametrize("name", mutations.KINDS)


@every_kind
def test_a_damaged_file_gives_the_right_weights_or_one_line(name: str, tmp_path: Path) -> None:
    case = mutations.Case(name, tmp_path)
    faults = {number: fault for number in range(NUM_CASES) if (fault := case.run(number))}
    assert not faults
    assert NUM_CASES / 10 < case.num_refused < NUM_CASES


def run_batch(name: str, first: int, end: int) -> tuple[list[str], int]:
    """The faults of cases of a kind in a process of their own, and where to go on.

    A process that died took the case with it that it printed last.
    """
    done = subprocess.run(
        [sys.executable, mutations.__file__, name, str(first), str(end)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    faults = [line for line in lines if line.startswith("FAULT")]
    if not done.returncode:
        return faults, end
    last = int([word for word in done.stdout.split("\n")[-1].split() if word.isdigit()][-1])
    reason = done.stderr.strip()[-1000:]
    return [*faults, f"FAULT {name} {last}: ended with {done.returncode}: {reason}"], last + 1


@pytest.mark.slow
@every_kind
def test_ten_thousand_damages_of_a_kind_end_no_process(name: str) -> None:
    faults, first = [], 0
    while first < NUM_SLOW_CASES:
        more, first = run_batch(name, first, min(first + BATCH, NUM_SLOW_CASES))
        faults += more
    assert not faults
