"""Rows out of a file of results, as a command line names them, and the newest of each setting."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from config import UserError, printable
from reporting.origin import ORIGIN_FLAG, scan_origin
from results import COLUMNS, SPECS, SYSTEM, Row, RowError, format_row, parse_row, read_rows

FILE_HELP = "FILE, FILE:LINE or FILE:column=value,.."
WHERE_HELP = "only rows with these values: column=value,..; a column named twice: either value"
ALL_HELP = "also rows that a newer one of the same setting and machine replaces"

log = logging.getLogger("kv_fast")


def select(text: str, conditions: str = "") -> list[Row]:
    """The rows of `FILE`, `FILE:LINE` or `FILE:column=value,..`; torchao's too, behind ours.

    A bad row is left out with a warning.

    Args:
        conditions: `column=value,..` that must hold too.

    Raises:
        UserError: there is no such file, line, column or row.
    """
    rows = where(_named(text), conditions)
    if not rows and (conditions or not Path(text).exists()):
        raise UserError(f"{printable(text)}: no such rows{' with ' * bool(conditions)}{conditions}")
    return rows


def select_newest(text: str, conditions: str, keep_all: bool) -> list[Row]:
    """As `select`, but at least one, and unless all are kept only the newest of each setting."""
    rows = select(text, conditions)
    if not rows:
        raise UserError(f"{printable(text)}: no rows")
    return rows if keep_all else newest(rows)


def _named(text: str) -> list[Row]:
    if Path(text).exists() or ":" not in text:
        return load(Path(text))
    name, _, condition = text.rpartition(":")
    if condition.isdecimal():
        return [line_of(Path(name), int(condition))]
    return where(load(Path(name)), condition)


def load(path: Path) -> list[Row]:
    """All rows of a file."""
    rows = read_rows(path)
    for entry in scan_origin(path):
        if isinstance(entry, Row):
            rows.append(entry)
        else:
            log.warning("%s", entry)
    return rows


def line_of(path: Path, number: int) -> Row:
    """The row in one line of a file, counted from 1."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    where_ = f"{printable(str(path))}:{number}"
    if not 1 <= number <= len(lines):
        raise UserError(f"{where_}: no such line")
    try:
        return parse_row(lines[number - 1].decode())
    except (RowError, UnicodeDecodeError) as error:
        raise UserError(f"{where_}: {error}") from None


def where(rows: Iterable[Row], conditions: str) -> list[Row]:
    """The rows whose columns are as `column=value,..` says; `column=` is one without it.

    A value is as in the row's line, where `%2C` is a comma; of a list, all of it or one item. A
    column named twice may have either value.
    """
    wanted: dict[str, set[str]] = {}
    for condition in conditions.split(",") if conditions else ():
        name, equals, value = condition.partition("=")
        if name not in COLUMNS or not equals:
            raise UserError(f"{printable(condition)}: not column=value")
        wanted.setdefault(name, set()).add(unquote(value))
    return [row for row in rows if all(_texts(row, name) & wanted[name] for name in wanted)]


def _texts(row: Row, name: str) -> set[str]:
    text = text_of(row, name)
    return {text, *text.split(";")} if isinstance(getattr(row, name), tuple) else {text}


def text_of(row: Row, name: str) -> str:
    """A column as the row's line has it, without unit and escapes; absent: empty."""
    value = getattr(row, name)
    spec = SPECS[name].format
    values = value if isinstance(value, tuple) else (value,) * (value is not None)
    return ";".join(format(one, spec) for one in values)


def cells(row: Row) -> dict[str, str]:
    """The text of each column that applies, as it stands in the row's line, without its unit."""
    head, _, repro = format_row(row).partition(", repro: ")
    texts = dict(cell.split("=", 1) for cell in head.split(", "))
    for name, text in texts.items():
        unit = SPECS[name].unit
        texts[name] = text.removesuffix(f" {unit}") if unit else text
    return texts | {"repro": repro}


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last good row of each setting and machine, and failures that nothing good followed.

    Rows of torchao's tell too few settings to replace each other.
    """
    last: dict[Any, tuple[int, Row]] = {}
    done: dict[Any, int] = {}
    for place, row in enumerate(rows):
        setting = (row.key, row.model, row.status, system_of(row))
        last[row if ORIGIN_FLAG in row.flags else setting] = (place, row)
        if row.status == "ok":
            done[row.repro, system_of(row)] = place
    return [
        row
        for place, row in last.values()
        if row.status == "ok" or place > done.get((row.repro, system_of(row)), -1)
    ]


def system_of(row: Row) -> tuple[Any, ...]:
    """What must be equal for rows to be of one machine."""
    return tuple(getattr(row, name) for name in SYSTEM)
