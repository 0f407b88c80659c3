"""Cases and the rows that they left: what is done already, and the next row. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from config import describe
from results import COLUMNS, SYSTEM, Row
from scripts.sweep_cases import Planned
from scripts.sweep_process import Ended

FAILED = ("oom", "error", "timeout", "interrupted")
SAME = ("commit", *SYSTEM)
"""Columns that a row must share with a case, beside the command, to be one of it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in its sweep, or pairing, a row belongs: columns of it."""

    run: str
    round: int
    section: str | None = None
    arm: str | None = None


def now() -> datetime:
    return datetime.now(UTC)


def row_of(planned: Planned, place: Place, ended: Ended, began: datetime) -> Row:
    """The row of a case: what the case said of itself, or of a failed one what was planned."""
    try:
        if "repro" in ended.document:
            return said_row(planned, place, ended)
        status, error = ended.status, ended.error
    except (TypeError, ValueError) as cause:
        status, error = "error", f"row: {describe(cause)}"
    known = {"time": began.strftime("%Y-%m-%dT%H:%M:%SZ"), "repro": planned.repro}
    values: dict[str, Any] = known | dict(planned.columns) | vars(place)
    return Row(**values | {"status": status, "error": error})


def said_row(planned: Planned, place: Place, ended: Ended) -> Row:
    """The row in a document.

    Raises:
        TypeError, ValueError: it is none, or one of another command.
    """
    document = ended.document
    if document["repro"] != planned.repro:
        raise ValueError(f"asked for {planned.repro!r}, got {document['repro']!r}")
    said = {name: document[name] for name in COLUMNS if name in document and name != "key"}
    return Row(**said | {"status": ended.status} | vars(place))


def rows_of(planned: Planned, rows: Iterable[Row]) -> list[Row]:
    """Rows of the same command on the same system and code."""
    return [
        row
        for row in rows
        if row.repro == planned.repro
        and all(getattr(row, name) == planned.columns.get(name) for name in SAME)
    ]


def last_status(planned: Planned, round_: int, rows: Iterable[Row]) -> str | None:
    """How the case last ended in this round: ok if it ever did; None if it never ran.

    Rows of pairings are not those of a sweep.
    """
    of_case = [row for row in rows_of(planned, rows) if row.round == round_ and row.arm is None]
    if any(row.status == "ok" for row in of_case):
        return "ok"
    return of_case[-1].status if of_case else None
