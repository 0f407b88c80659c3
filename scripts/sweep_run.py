"""`sweep.py run`: the cases of sections, one process after the other, a row each."""

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import UserError, to_argv
from durable import check_writable
from reporting.bars import bars
from results import Row, append, read_rows
from scripts import sweep_cases
from scripts.sweep_cases import Order, Plan, Planned
from scripts.sweep_config import RunConfig
from scripts.sweep_lock import device_lock, run_folder
from scripts.sweep_process import Ended, last_lines, run_case
from scripts.sweep_rows import FAILED, Place, last_status, now, row_of
from scripts.sweep_show import Progress, flags_text, plan_line, table, time_text

log = logging.getLogger("kv_fast")

RUN, DONE, SKIP = "run", "done", "skip"
LEAST_TIMEOUT_S = 600.0
TIMEOUT_FACTOR = 5
"""Of the expected time, after which a case is ended."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A case in a round.

    Attributes:
        number: its place in the whole plan, from 1; names its log.
        state: RUN, DONE or SKIP.
        why: it is skipped.
        last: how it ended before; None if it never ran.
    """

    number: int
    round: int
    planned: Planned
    state: str
    why: str = ""
    last: str | None = None


def run_sweep(config: RunConfig, extra: Sequence[str] = ()) -> int:
    """Plan, then run what has no row yet; 1 where a case failed.

    Args:
        extra: flags of every case.

    Raises:
        UserError: nothing can run, or another sweep has the device.
    """
    results = config.path
    if not config.dry_run:
        check_writable(results)
    plan = sweep_cases.ask_plan(order_of(config, extra))
    check_plan(plan)
    for line in plan.left_out:
        log.info("%s", line)
    if config.dry_run:
        print(dry_run(turns_of(config, plan.cases)))
        return 0
    with device_lock(next(each.device for each in plan.cases if each.device)) as lock:
        turns = turns_of(config, plan.cases)
        to_run = [turn for turn in turns if turn.state == RUN]
        rough = any(turn.planned.is_rough for turn in to_run)
        seconds = time_text(sum(turn.planned.seconds for turn in to_run), is_rough=rough)
        log.info("%d cases, %d to run: %s", len(turns), len(to_run), seconds)
        return Sweep(config, extra, lock).run(turns)


def order_of(config: RunConfig, extra: Sequence[str]) -> Order:
    common = {"checkpoint_path": config.checkpoint_path, "device": config.device}
    return Order(
        sections=config.names,
        common={name: value for name, value in common.items() if value is not None},
        extra=tuple(extra),
        results=str(config.path),
    )


def check_plan(plan: Plan) -> None:
    """Refuse a plan with a wrong request in it, or without a case that could run."""
    if not plan.cases:
        raise UserError(*(plan.left_out or ("no cases",)))
    wrong = [planned.refused for planned in plan.cases if not planned.columns]
    if not any(planned.sizes for planned in plan.cases):
        wrong = [planned.refused for planned in plan.cases]
    if wrong:
        raise UserError(*dict.fromkeys(wrong))


def turns_of(config: RunConfig, cases: Sequence[Planned]) -> list[Turn]:
    """All cases of all rounds in their order; every second round goes backwards."""
    rows = read_rows(config.path) if config.path.is_file() else []
    rows = [row for row in rows if counts(row, config)]
    turns: list[Turn] = []
    for round_ in range(1, config.rounds + 1):
        for planned in cases if round_ % 2 else reversed(cases):
            last = last_status(planned, round_, rows)
            if not config.only_failed or last in FAILED:
                turns.append(turn_of(len(turns) + 1, round_, planned, last))
    return turns


def counts(row: Row, config: RunConfig) -> bool:
    """Whether a row may be that of a case; code with uncommitted changes is that of one run."""
    if config.resume and row.run == config.resume:
        return True
    return not config.rerun and not (row.commit or "").endswith("-dirty")


def turn_of(number: int, round_: int, planned: Planned, last: str | None) -> Turn:
    state = DONE if last == "ok" else SKIP if planned.refused else RUN
    return Turn(
        number=number, round=round_, planned=planned, state=state, why=planned.refused, last=last
    )


def dry_run(turns: Sequence[Turn]) -> str:
    """The plan as a table."""
    lines = [plan_line(turn.number, turn.planned, turn.round) for turn in turns]
    states = [f"{turn.state}: {turn.why}" if turn.state == SKIP else turn.state for turn in turns]
    rest = [
        f"{flags_text(turn.planned)}  [{state}]" for turn, state in zip(turns, states, strict=True)
    ]
    return table(lines, ["flags  [state]", *rest])


class Sweep:
    """Runs turns and counts how they end."""

    def __init__(self, config: RunConfig, extra: Sequence[str], lock: int) -> None:
        self._config, self._extra, self._lock = config, extra, lock
        self._results = config.path
        self._run = ""
        self._too_large: list[Planned] = []
        self._counts: dict[str, int] = {}
        self._rows: list[Row] = []

    def run(self, turns: Sequence[Turn]) -> int:
        """All of them; 1 where one failed."""
        to_run = [turn for turn in turns if turn.state != DONE]
        self._counts = {"done before": len(turns) - len(to_run)}
        folder = run_folder(self._config.resume) if to_run else None
        failures = 0
        with Progress(len(turns)) as progress:
            for turn in to_run:
                assert folder
                is_good = self._take(turn, folder, progress)
                failures += not is_good
                if not is_good and self._config.fail_fast:
                    break
        counted = ", ".join(f"{count} {name}" for name, count in self._counts.items() if count)
        if self._rows:
            log.info("%s", bars(self._rows, sys.stderr.encoding))
        log.info("%s; rows in %s", counted or "nothing to do", self._results)
        return int(failures > 0)

    def _take(self, turn: Turn, folder: Path, progress: Progress) -> bool:
        """One turn and its row; whether it went well."""
        planned, name = turn.planned, flags_text(turn.planned)
        progress.begins(planned.section or "")
        began, why = now(), turn.why or self._after_oom(planned)
        ended = Ended(status="skipped", error=why) if why else self._run_case(turn, folder)
        place = Place(run=folder.name, round=turn.round, section=planned.section)
        row = row_of(planned, place, ended, began)
        if row.status != "skipped" or turn.last != "skipped":
            append(self._results, row)
        self._rows.append(row)
        if row.status == "oom":
            self._too_large.append(planned)
        self._counts[row.status] = self._counts.get(row.status, 0) + 1
        is_good = row.status in ("ok", "skipped") and not (ended.error and not why)
        progress.ended(turn.number, name, row, is_good=is_good)
        return is_good

    def _run_case(self, turn: Turn, folder: Path) -> Ended:
        timeout_s = timeout_of(turn.planned, self._config.timeout_s)
        log_file = folder / f"{turn.number:03}.log"
        return run_planned(turn.planned, log_file, timeout_s, self._lock, self._command)

    def _after_oom(self, planned: Planned) -> str:
        """Why not to try a case: one that needs no more, of the same formats, had no memory."""
        for other in self._too_large:
            if alike(other, planned) and slots(planned) >= slots(other):
                return f"{slots(other)} slots of these formats ran out of memory before"
        return ""

    def _command(self, run: str) -> str:
        """What goes on with this sweep."""
        config = dataclasses.replace(self._config, resume=run)
        words = ["python", "scripts/sweep.py", "run", *to_argv(config)]
        return shlex.join([*words, *(["--", *self._extra] if self._extra else [])])


ALIKE = ("kind", "model", "k_format", "v_format", "weight_format", "dtype")


def run_planned(
    planned: Planned, log_file: Path, timeout_s: float, lock: int, resume: Callable[[str], str]
) -> Ended:
    """Run a case as `run_case` does; interrupted, say where it was and how to go on.

    Args:
        resume: the command that goes on with a run, by its name.
    """
    command = sweep_cases.command_of(planned.program, planned.words)
    try:
        return run_case(command, log_file, timeout_s, lock)
    except KeyboardInterrupt:
        log.info("%s", last_lines(log_file, 2))
        log.info("to go on: %s", resume(log_file.parent.name))
        raise


def timeout_of(planned: Planned, asked_s: float | None) -> float:
    """After how many seconds a case is ended."""
    return asked_s or max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * planned.seconds)


def alike(one: Planned, other: Planned) -> bool:
    """Whether two cases differ in their lengths alone."""
    return all(one.columns.get(name) == other.columns.get(name) for name in ALIKE)


def slots(planned: Planned) -> int:
    return planned.columns.get("cache_len", 0)
