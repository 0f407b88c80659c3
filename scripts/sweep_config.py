"""The flags of `sweep.py`, and what the environment says in their place. Imports no torch."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from config import UserError, flag, printable
from scripts.sweep_sections import SECTIONS

DEFAULT_SECTION = "kv"
DEFAULT_RESULTS = "benchmark_results.txt"
RESULTS_HELP = f"file to read and to append to, default: {DEFAULT_RESULTS}"
TIMEOUT_HELP = "end a case after so long; default: 600, or 5 times what is expected"
C = TypeVar("C", "RunConfig", "AbConfig")
LISTED = "; ".join(f"{name}: {section.about}" for name, section in SECTIONS.items())


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Measure all cases of sections that have no row yet; behind "--" stand flags of every case."""

    sections: str = flag(
        DEFAULT_SECTION, positional=True, help=f"first, with blanks or commas between; {LISTED}"
    )
    checkpoint_path: str | None = flag(
        None, help="as of generate.py, for all sections; without it legacy and million have theirs"
    )
    device: str | None = flag(None, help="as of generate.py, for all sections")
    results: str | None = flag(None, help=f"{RESULTS_HELP}; one row per case")
    rounds: int = flag(1, minimum=1, help="all cases so often, backwards in every second round")
    dry_run: bool = flag(
        False, help="print what each case would hold and take, and whether it would run; then stop"
    )
    rerun: bool = flag(False, help="also cases that have a row; with --resume: of another run")
    only_failed: bool = flag(False, help="only cases whose last row says that they failed")
    fail_fast: bool = flag(False, help="stop at the first case that fails")
    timeout_s: float | None = flag(None, minimum=1, help=TIMEOUT_HELP)
    resume: str | None = flag(None, help="go on under this name of an earlier run")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in SECTIONS:
                raise UserError(f"{printable(name)}: no such section; known: {', '.join(SECTIONS)}")
        if self.rerun and self.only_failed:
            raise UserError("--rerun and --only_failed: exclude each other; give one")
        check_run(self.resume)

    @property
    def path(self) -> Path:
        """Of the results."""
        return Path(self.results or DEFAULT_RESULTS)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sections, each once."""
        return tuple(dict.fromkeys(filter(None, self.sections.split(","))))


@dataclass(frozen=True, kw_only=True)
class AbConfig:
    """Run two commands of generate.py in turns, A B B A ..., as in: ab -- FLAGS_A -- FLAGS_B."""

    pairs: int | None = flag(None, minimum=1, help="default: 6 on CUDA, 10 elsewhere")
    results: str | None = flag(None, help=f"{RESULTS_HELP}; two rows per pair")
    timeout_s: float | None = flag(None, minimum=1, help=TIMEOUT_HELP)
    resume: str | None = flag(
        None, help="go on with this run, whose flags they are, after its last whole pair"
    )
    debug: bool = flag(False, repro=False, help="show the traceback of an error")

    def __post_init__(self) -> None:
        check_run(self.resume)

    @property
    def path(self) -> Path:
        """Of the results."""
        return Path(self.results or DEFAULT_RESULTS)


def with_environment(config: C, environment: Mapping[str, str]) -> C:
    """The config with what the environment says where no flag does."""
    names = [name for name in ("checkpoint_path", "device", "results") if hasattr(config, name)]
    unsaid = [name for name in names if not getattr(config, name)]
    said: dict[str, Any] = {name: environment.get(name.upper()) or None for name in unsaid}
    return dataclasses.replace(config, **said)


def check_run(run: str | None) -> None:
    """Refuse what cannot name a folder of logs."""
    if run is not None and not re.fullmatch(r"\w[\w.-]*", run):
        raise UserError(f"--resume {printable(run)}: is no name of a run")
