"""What the sweep knows of a case before it runs, and how it asks for it. Imports no torch."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import UserError
from scripts.sweep_sections import Case

ROOT = Path(__file__).resolve().parent.parent
PLANNER = Path(__file__).with_name("sweep_plan.py")

FITS = 0.95
"""Share of the free memory that a case may be expected to hold; beyond it is skipped."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to plan: sections, or cases by themselves.

    Attributes:
        common: flags of every case of the sections.
        extra: words behind all their flags.
        results: the file whose rows tell how long a case takes.
    """

    sections: tuple[str, ...] = ()
    common: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    results: str = ""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case that was looked at: headers were read, no weights.

    Attributes:
        words: flags of the program.
        repro: the command that its row will hold.
        device: type of the one it will run on.
        columns: of its row, as far as they are known before.
        sizes: expected bytes, by part, the program's own included.
        seconds: expected; `is_rough` without rows like it.
        refused: why it cannot run; '' where it can.
    """

    section: str | None
    program: str
    words: tuple[str, ...]
    repro: str
    device: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int = 0
    seconds: float = 0.0
    is_rough: bool = True
    refused: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= FITS * self.free_bytes

    def cache_bytes(self) -> int:
        """Of the parts that are caches."""
        return sum(size for name, size in self.sizes.items() if name.startswith("KV cache"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cases that can be asked of the checkpoint, and a line for what cannot."""

    cases: tuple[Planned, ...]
    left_out: tuple[str, ...] = ()


def ask_plan(order: Order) -> Plan:
    """What `sweep_plan.py` finds, in a process of its own: it imports torch, and may use a GPU.

    Raises:
        UserError: it ended otherwise; its own line is on stderr.
    """
    asked = json.dumps(dataclasses.asdict(order))
    process = subprocess.Popen(
        [sys.executable, str(PLANNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        found, _ = process.communicate(asked)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise UserError(f"the plan was not made: {PLANNER.name} ended with {process.returncode}")
    document = json.loads(found)
    cases = tuple(Planned(**_tuples(each)) for each in document["cases"])
    return Plan(cases=cases, left_out=tuple(document["left_out"]))


def read_order(text: str) -> Order:
    """The order of a JSON document."""
    document = json.loads(text)
    cases = tuple(Case(**_tuples(each)) for each in document.pop("cases"))
    return Order(cases=cases, **_tuples(document))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass as JSON gives them, with its lists as tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def command_of(program: str, words: Sequence[str]) -> list[str]:
    """The process of a case; its row comes on stdout as one JSON document."""
    return [sys.executable, str(ROOT / program), *words, "--json"]
