"""Rows of results as tests need them: one real line with other figures."""

import dataclasses
import random
from pathlib import Path

from test_results import ROW

from results import Row, append

STEPS = ROW.new_tokens - 1


def speed_row(tok_s: float = 100.0, *, samples: int = 5, **changes) -> Row:
    """A row of that decode rate, all samples alike, on a CPU unless told otherwise."""
    values = {
        "device_name": "AMD EPYC",
        "decode_tok_s": tok_s,
        "decode_samples_s": (STEPS / tok_s,) * samples,
        **changes,
    }
    return dataclasses.replace(ROW, **values)


def in_turns(count: int, ratio: float, *, drift: float = 0.0, noise: float = 0.0, seed: int = 0):
    """Rows of arms A and B in `count` rounds, A B B A ..; B at `ratio` times A's rate.

    The machine slows down by `drift` from the first to the last row; each row varies by `noise`.
    """
    rng, rows = random.Random(seed), []
    for number in range(count):
        for arm in "AB" if number % 2 == 0 else "BA":
            rate = 100 * (ratio if arm == "B" else 1) * (1 - drift * len(rows) / (2 * count - 1))
            rate *= rng.gauss(1, noise)
            rows.append(speed_row(rate, run="r", round=number + 1, arm=arm))
    return rows


def sides(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Arms A and B."""
    return tuple([row for row in rows if row.arm == arm] for arm in "AB")


def in_blocks(count: int, ratio: float, *, drift: float = 0.0, noise: float = 0.0, seed: int = 0):
    """As `in_turns`, but all of A and then all of B, of two files: without run, round and arm."""
    rng, rows = random.Random(seed), []
    for number in range(2 * count):
        rate = 100 * (ratio if number >= count else 1) * (1 - drift * number / (2 * count - 1))
        rows.append(speed_row(rate * rng.gauss(1, noise)))
    return rows[:count], rows[count:]


def written(path: Path, rows: list[Row]) -> Path:
    for row in rows:
        append(path, row)
    return path
