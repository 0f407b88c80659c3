"""All rows with all their fields, as CSV, JSON or Markdown."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from config import MISSING, flag
from reporting.select import FILE_HELP, WHERE_HELP, cells, select_newest
from reporting.table import Table, markdown, raw
from results import COLUMNS, Row, to_json


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Print all fields of rows in another format."""

    file: str = flag(MISSING, help=FILE_HELP)
    format: str = flag("csv", choices=("csv", "json", "md"), help="of what is printed")
    where: str = flag("", help=WHERE_HELP)
    debug: bool = flag(False, help="show the traceback of an error")


def to_csv(rows: Sequence[Row]) -> str:
    """RFC 4180: a header of field names, values as in a row's line; absent ones are empty."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(COLUMNS))
    writer.writeheader()
    writer.writerows(map(cells, rows))
    return stream.getvalue()


def to_document(rows: Sequence[Row]) -> str:
    """A JSON list of what `--json` prints of one row."""
    return json.dumps(list(map(to_json, rows)), indent=1) + "\n"


def to_markdown(rows: Sequence[Row]) -> str:
    """Every field that a row has, in the order of the rows."""
    present = {name for row in rows for name in cells(row)}
    columns = [raw(name) for name in COLUMNS if name in present]
    return markdown(Table(rows=list(rows), columns=columns, equal={})) + "\n"


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "csv": to_csv,
    "json": to_document,
    "md": to_markdown,
}


def export(config: ExportConfig) -> None:
    """Print the rows that are meant."""
    print(FORMATS[config.format](select_newest(config.file, config.where, keep_all=True)), end="")
