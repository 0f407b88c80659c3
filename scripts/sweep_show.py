"""What a sweep shows: its plan as a table, a line or a bar for its progress. Imports no torch."""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from config import printable
from results import Row
from scripts.sweep_cases import Planned
from summary import size_text

log = logging.getLogger("kv_fast")

FIGURES = (
    ("{:.2f} tok/s", "decode_tok_s"),
    ("TTFT {:.3f} s", "ttft_s"),
    ("KL {:.2e}", "kl_mean"),
    ("needle {:+.2e} nat", "needle_change"),
    ("peak {:.2f} GB", "peak_mem_gb"),
)
HEAD = ("#", "section", "round", "weights", "cache", "workspace", "total", "free", "fits", "time")


def plan_line(number: int, planned: Planned, round_: int) -> tuple[str, ...]:
    """The cells of a case in the table of a dry run, but for its state and flags."""
    sizes = planned.sizes
    if not sizes:
        return (str(number), planned.section or "", str(round_), *["-"] * (len(HEAD) - 3))
    parts = [sizes["weights"], planned.cache_bytes(), sizes["workspace"]]
    figures = [*parts, planned.total_bytes, planned.free_bytes]
    return (
        str(number),
        planned.section or "",
        str(round_),
        *(size_text(size / 1e9) for size in figures),
        "yes" if planned.fits else "no",
        time_text(planned.seconds, is_rough=planned.is_rough),
    )


def table(lines: Sequence[Sequence[str]], rest: Sequence[str]) -> str:
    """Aligned columns under `HEAD`, and what stands behind each line."""
    rows = [HEAD, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    padded = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{line}  {end}" for line, end in zip(padded, rest, strict=True))


def time_text(seconds: float, *, is_rough: bool) -> str:
    """`~12 min`; the mark says that no row tells it."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{'~' * is_rough}{seconds / size:.0f} {unit}"
    return f"{'~' * is_rough}{seconds:.0f} s"


def flags_text(planned: Planned) -> str:
    """The command without the interpreter."""
    return planned.repro.removeprefix("python ") or shlex.join((planned.program, *planned.words))


def figures_text(row: Row) -> str:
    """The figures of a row that ran, or why there are none."""
    if row.status != "ok":
        return printable(row.error or "", 120)
    found = ((text, getattr(row, name)) for text, name in FIGURES)
    return ", ".join(text.format(value) for text, value in found if value is not None)


class Bar(tqdm):
    """A bar without the thread that redraws it: nothing happens here while a case runs."""

    monitor_interval = 0


class Progress:
    """Of cases that run one after the other: a bar where stderr is a terminal, else lines."""

    def __init__(self, count: int) -> None:
        self._count, self._failures = count, 0
        self._bar = Bar(total=count, unit="case") if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begins(self, name: str) -> None:
        """A case starts; nothing is drawn until it ends."""
        self._began_s = time.monotonic()
        if self._bar is not None:
            self._bar.set_description(name, refresh=True)

    def ended(self, number: int, name: str, row: Row, *, is_good: bool) -> None:
        """A case has its row."""
        self._failures += not is_good
        seconds = time_text(time.monotonic() - self._began_s, is_rough=False)
        line = f"[{number}/{self._count}] {name}: {row.status}, {figures_text(row)}, {seconds}"
        if self._bar is None:
            log.info("%s", line)
            return
        if not is_good:
            self._bar.write(line, file=sys.stderr)
        self._bar.set_postfix(failed=self._failures)
        self._bar.update()
