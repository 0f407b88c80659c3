"""Rows out of a file of results, as a command line names them."""

import logging
from collections.abc import Iterable
from pathlib import Path

from config import UserError, printable
from reporting.origin import scan_origin
from results import COLUMNS, Row, RowError, parse_row, read_rows

log = logging.getLogger("kv_fast")


def select(text: str) -> list[Row]:
    """The rows of `FILE`, `FILE:LINE` or `FILE:column=value,..`; torchao's too, behind ours.

    A bad row is left out with a warning.

    Raises:
        UserError: there is no such file, line, column or row.
    """
    if Path(text).exists() or ":" not in text:
        return load(Path(text))
    name, _, condition = text.rpartition(":")
    if condition.isdecimal():
        return [line_of(Path(name), int(condition))]
    rows = where(load(Path(name)), condition)
    if not rows:
        raise UserError(f"{printable(text)}: no such rows")
    return rows


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
    """The rows whose columns are as `column=value,..` says; `column=` is one without it."""
    wanted = {}
    for condition in conditions.split(","):
        name, equals, value = condition.partition("=")
        if name not in COLUMNS or not equals:
            raise UserError(f"{printable(condition)}: not column=value")
        wanted[name] = value
    return [row for row in rows if all(text_of(row, name) == wanted[name] for name in wanted)]


def text_of(row: Row, name: str) -> str:
    """A column as the row's line has it, without unit and escapes; absent: empty."""
    value = getattr(row, name)
    spec = COLUMNS[name].metadata["column"].format
    values = value if isinstance(value, tuple) else (value,) * (value is not None)
    return ";".join(format(one, spec) for one in values)
