"""How far a long step is: a bar on a terminal, else a line when it begins and every 30 seconds."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY_S = 30.0
BAR_EVERY_S = 0.2  # seldom enough that a bar during a timed run does not show in its time

log = logging.getLogger("kv_fast")

Advance = Callable[[int], object]
"""Told how many more units are done; called often, cheap."""


def ignore(count: int) -> None:
    """An `Advance` that shows nothing."""


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Advance]:
    """Show how many of `total` units are done while the block runs.

    Args:
        what: the step, as the line begins.
        unit: `tok`, or `B`, which is shown in MB and GB.
    """
    if sys.stderr.isatty():
        scaled = unit == "B"
        with tqdm(total=total, desc=what, unit=unit, unit_scale=scaled, mininterval=BAR_EVERY_S,
                  leave=False) as bar:  # fmt: skip
            yield bar.update
        return
    log.info("%s: %s", what, _amount(total, unit))
    lines = _Lines(what, total, unit)
    yield lines.advance


class _Lines:
    """A line now and then for a file or pipe, without escape codes."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.last_s = 0, time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        if (now := time.monotonic()) - self.last_s >= LINE_EVERY_S:
            self.last_s = now
            of = _amount(self.total, self.unit)
            log.info("%s: %s of %s", self.what, _amount(self.done, self.unit), of)


def _amount(count: int, unit: str) -> str:
    return tqdm.format_sizeof(count, unit) if unit == "B" else f"{count} {unit}"
