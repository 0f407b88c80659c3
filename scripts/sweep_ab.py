"""`sweep.py ab`: two commands in turns, A B B A ..., so that drift meets both alike."""

import dataclasses
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from config import UserError, printable, to_argv
from durable import check_writable
from programs import PROGRAMS
from results import Row, append, read_rows
from scripts import sweep_cases
from scripts.sweep_cases import Order, Planned
from scripts.sweep_config import AbConfig
from scripts.sweep_lock import device_lock, run_folder
from scripts.sweep_rows import Place, now, row_of, rows_of
from scripts.sweep_run import run_planned, timeout_of
from scripts.sweep_sections import Case
from scripts.sweep_show import Progress, time_text

log = logging.getLogger("kv_fast")

ARMS = ("A", "B")
PAIRS = {"cuda": 6}
OTHER_PAIRS = 10
"""On a CPU, whose times vary more."""


def run_pairs(config: AbConfig, sides: Sequence[Sequence[str]]) -> int:
    """Run the pairs that are still to do; 1 where a case failed, which ends it.

    Args:
        sides: the flags of A and of B.

    Raises:
        UserError: one of them is a wrong request, or does not fit.
    """
    if len(sides) != len(ARMS):
        raise UserError("ab: give the flags of two commands: ab -- FLAGS_A -- FLAGS_B")
    results = config.path
    check_writable(results)
    cases = tuple(case_of(words) for words in sides)
    plan = sweep_cases.ask_plan(Order(cases=cases, results=str(config.path)))
    refused = [f"{arm}: {c.refused}" for arm, c in zip(ARMS, plan.cases, strict=True) if c.refused]
    if refused:
        raise UserError(*refused)
    with device_lock(plan.cases[0].device) as lock:
        return Pairing(config, sides, plan.cases, lock).run()


def case_of(words: Sequence[str]) -> Case:
    """A command without a section; its first word may be the program."""
    if words and words[0] in PROGRAMS:
        return Case(None, words[0], tuple(words[1:]))
    return Case(None, next(iter(PROGRAMS)), tuple(words))


class Pairing:
    """Runs pairs of A and B under one name."""

    def __init__(
        self,
        config: AbConfig,
        sides: Sequence[Sequence[str]],
        planned: Sequence[Planned],
        lock: int,
    ) -> None:
        self._config, self._sides, self._lock = config, sides, lock
        self._planned = dict(zip(ARMS, planned, strict=True))
        self._results = config.path
        self._rows = self._earlier_rows()

    def run(self) -> int:
        """The pairs that are missing."""
        device = self._planned["A"].device
        wanted = self._config.pairs or PAIRS.get(device, OTHER_PAIRS)
        last, whole = last_round(self._rows), whole_pairs(self._rows)
        missing = max(0, wanted - whole)
        seconds = missing * sum(each.seconds for each in self._planned.values())
        rough = any(each.is_rough for each in self._planned.values())
        log.info("%d pairs to run: %s", missing, time_text(seconds, is_rough=rough))
        folder = run_folder(self._config.resume)
        with Progress(2 * missing) as progress:
            for index in range(missing):
                order = ARMS if (whole + index) % 2 == 0 else ARMS[::-1]
                for place, arm in enumerate(order):
                    number = 2 * index + place + 1
                    if not self._take(arm, last + 1 + index, number, folder, progress):
                        log.info("to go on: %s", self._command(folder.name))
                        return 1
        log.info("rows in %s; what they say:", self._results)
        print(shlex.join(["python", "results.py", "compare", f"{self._results}:run={folder.name}"]))
        return 0

    def _take(self, arm: str, round_: int, number: int, folder: Path, progress: Progress) -> bool:
        """One arm of one pair and its row; whether it went well."""
        planned, began = self._planned[arm], now()
        name = f"{arm} of pair {round_}"
        progress.begins(name)
        log_file = folder / f"{2 * round_ - (arm == 'A'):03}.log"
        timeout_s = timeout_of(planned, self._config.timeout_s)
        ended = run_planned(planned, log_file, timeout_s, self._lock, self._command)
        row = row_of(planned, Place(run=folder.name, round=round_, arm=arm), ended, began)
        append(self._results, row)
        is_good = row.status == "ok" and ended.error is None
        progress.ended(number, name, row, is_good=is_good)
        return is_good

    def _earlier_rows(self) -> list[Row]:
        """Of the run to go on with.

        Raises:
            UserError: it has none, or was one of other commands.
        """
        run = self._config.resume
        if run is None:
            return []
        rows = [row for row in read_rows(self._results) if row.run == run and row.arm]
        if not rows:
            raise UserError(f"--resume {run}: {self._results} has no pairs of that name")
        for row in rows:
            if not rows_of(self._planned[row.arm or "A"], [row]):
                shown = f"{printable(row.repro, 400)} of commit {row.commit} on {row.device_name}"
                raise UserError(f"--resume {run}: its {row.arm} is {shown}; only that can go on")
        return rows

    def _command(self, run: str) -> str:
        """What goes on with these pairs."""
        config = dataclasses.replace(self._config, resume=run)
        flags = [word for side in self._sides for word in ("--", *side)]
        return shlex.join(["python", "scripts/sweep.py", "ab", *to_argv(config), *flags])


def last_round(rows: Sequence[Row]) -> int:
    """Of all rows, whole pairs or not; 0 where there are none."""
    return max((row.round or 0 for row in rows), default=0)


def whole_pairs(rows: Sequence[Row]) -> int:
    """Pairs whose two sides both went well."""
    good = {(row.round, row.arm) for row in rows if row.status == "ok"}
    return sum(all((round_, arm) in good for arm in ARMS) for round_ in {pair[0] for pair in good})
