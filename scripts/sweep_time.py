"""How long a case will take: from rows of cases like it, else roughly. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from results import SYSTEM, Row
from stats import linear_fit, median

START_S = 10.0
"""Rough: of a process until it loads, and of the bandwidth probe at its end."""

COMPILE_S = 15.0
"""Rough: of the decode step."""

LOAD_GB_S = 0.2
"""Rough: weights read, or drawn at random, and brought into their format."""

WARMUPS = 2
WARMUP_STEPS = 32
ALIKE = ("kind", "model", "k_format", "v_format", "weight_format", "dtype", "compile", "threads")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a speed case does.

    Attributes:
        fill: tokens prefilled before the clock, once.
        load_gb: weights.
    """

    fill: int
    prompt_len: int
    depth: int
    new_tokens: int
    num_samples: int
    load_gb: float
    compiles: bool

    @property
    def mean_filled(self) -> float:
        """Stored tokens that the mean decode step reads."""
        return self.depth + self.prompt_len + (self.new_tokens - 2) / 2

    def seconds(self, prefill_tok_s: float, step_s: float, compile_s: float) -> float:
        """With these rates."""
        steps = self.num_samples * self.new_tokens + WARMUPS * min(self.new_tokens, WARMUP_STEPS)
        prefilled = self.fill + (self.num_samples + WARMUPS) * self.prompt_len
        once = START_S + self.load_gb / LOAD_GB_S + compile_s * self.compiles
        return once + prefilled / prefill_tok_s + steps * step_s


def rows_alike(rows: Iterable[Row], columns: dict[str, object]) -> list[Row]:
    """Rows of runs that went well, of the same model, formats and system."""
    names = (*ALIKE, *SYSTEM)
    return [
        row
        for row in rows
        if row.status == "ok" and all(getattr(row, name) == columns.get(name) for name in names)
    ]


def from_rows(work: Work, rows: Sequence[Row]) -> float | None:
    """Seconds of a case, from rows alike: the time of a step as a line over the stored tokens.

    None where they do not tell it: one depth alone says nothing about another.
    """
    points = [(_filled(row), 1 / row.decode_tok_s) for row in rows if row.decode_tok_s]
    fills = [row for row in rows if row.prefill_tok_s]
    if not points or not fills:
        return None
    filled, steps = zip(*points, strict=True)
    if max(filled) > min(filled) and max(steps) > min(steps):
        line = linear_fit(filled, steps)
        step_s = max(line.intercept + line.slope * work.mean_filled, min(steps))
    elif work.mean_filled <= 2 * max(filled):
        step_s = median(steps)
    else:
        return None
    nearest = min(fills, key=lambda row: abs(_filled(row) - work.mean_filled))
    assert nearest.prefill_tok_s
    compiled = [row.compile_s for row in rows if row.compile_s is not None]
    return work.seconds(nearest.prefill_tok_s, step_s, max(compiled, default=COMPILE_S))


def _filled(row: Row) -> float:
    return (row.depth or 0) + (row.prompt_len or 0) + ((row.new_tokens or 2) - 2) / 2
