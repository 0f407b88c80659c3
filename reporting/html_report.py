"""One HTML file of a file of results: verdicts, environment, rows, pictures, failures, commands.

It holds no script and refers to nothing outside. Its table is sorted by style alone: each heading
is the label of a radio button, and the chosen one gives the rows their `order`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import MISSING, UserError, flag, printable
from reporting.canvas import svg_text, write
from reporting.compare import verdicts
from reporting.compare_text import cells, common, ends, telling
from reporting.definitions import DEFINITIONS
from reporting.matching import Comparison, by_arm, by_setting, usable
from reporting.metrics import DEFAULT_METRICS
from reporting.plots import PLOTS
from reporting.select import ALL_HELP, FILE_HELP, WHERE_HELP, newest, select, text_of
from reporting.table import Table, TableColumn, make_table
from reporting.verdict import Rule
from results import Row, RowError, scan
from summary import FLAG_WORDS

ENVIRONMENT = ("device_name", "threads", "torch", "attention", "model", "model_sha", "commit")
KV = ("k_format", "v_format")
TEMPLATE = "report.html"


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write one HTML file that tells all, for a browser without a network."""

    file: str = flag(MISSING, help=FILE_HELP)
    out: Path = flag(Path("report.html"), help="the file to write")
    where: str = flag("", help=WHERE_HELP)
    all: bool = flag(False, help=ALL_HELP)
    debug: bool = flag(False, help="show the traceback of an error")


def report(config: ReportConfig) -> None:
    """Write the report and print its name."""
    found = select(config.file, config.where)
    if not found:
        raise UserError(f"{printable(config.file)}: no rows")
    bad = bad_lines(config.file)
    page = render(config.file, found, found if config.all else newest(found), bad)
    print(write(config.out, page.encode()))


def bad_lines(selection: str) -> list[str]:
    """Lines of the file that should be rows but are none."""
    names = [Path(selection), Path(selection.rpartition(":")[0])]
    path = next((name for name in names if name.is_file()), None)
    return [str(entry) for entry in scan(path) if isinstance(entry, RowError)] if path else []


def render(name: str, found: Sequence[Row], rows: Sequence[Row], bad: Sequence[str]) -> str:
    """The page.

    Args:
        name: of what was read.
        found: all rows, of which verdicts may need several of one setting.
        rows: to be shown.
        bad: what is wrong with other lines.
    """
    import jinja2  # noqa: PLC0415  (other commands start without it)
    from markupsafe import Markup  # noqa: PLC0415

    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else printable(str(value), 10_000)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables = tables_of(rows)
    shown_rows = [row for _, table in tables for row in table.rows]
    numbers = {id(row): number for number, row in enumerate(shown_rows, start=1)}
    return environment.get_template(TEMPLATE).render(
        name=name,
        verdicts=verdict_tables(found),
        environment=environment_of(rows),
        kinds=[kind for kind, _ in tables],
        tables=[(kind, table, lines_of(table, numbers)) for kind, table in tables],
        pictures=[
            {"name": each, "svg": Markup(svg), "rows": drawn}
            for each, svg, drawn in pictures(shown_rows, numbers)
        ],
        failures=[(numbers[id(row)], row) for row in shown_rows if row.status != "ok"],
        bad=bad,
        rows=list(enumerate(shown_rows, start=1)),
        definitions=DEFINITIONS,
        flags={each: FLAG_WORDS.get(each, each) for row in shown_rows for each in row.flags},
    )


def tables_of(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """A table for each kind of rows."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return [(kind, make_table([row for row in rows if row.kind == kind])) for kind in kinds]


def lines_of(table: Table, numbers: Mapping[int, int]) -> list[tuple[int, list[str], list[int]]]:
    """Of each row its number, its cells and its rank by each column."""
    found = zip(table.rows, table.lines(), ranks(table), strict=True)
    return [(numbers[id(row)], line, places) for row, line, places in found]


def verdict_tables(rows: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    """Arms in turns, and cache formats against the first one, a table for each kind of rows.

    What all comparisons of a table have in common, and its heading and lines.
    """
    found = by_arm(usable(rows)) + by_setting(usable(newest(rows)), KV, None, across=False)
    kinds = dict.fromkeys(each.a[0].kind for each in found)
    return [_verdict_table([each for each in found if each.a[0].kind == kind]) for kind in kinds]


def _verdict_table(comparisons: Sequence[Comparison]) -> tuple[str, list[list[str]]]:
    names = telling(comparisons)
    is_told = all(each.differs == comparisons[0].differs for each in comparisons)
    sides = [] if is_told else ["A", "B"]
    lines = [[*names, *sides, "figure", "A", "B", "B / A", "n", "verdict"]]
    for each in comparisons:
        start = [text_of(each.a[-1], name) for name in names]
        start += [] if is_told else [ends(each, 0), ends(each, 1)]
        lines += [[*start, *cells(verdict)] for verdict in verdicts(each, DEFAULT_METRICS, Rule())]
    return common(comparisons, names).replace("\n\n", "; "), lines


def environment_of(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """What ran where: each with its different values."""
    found = []
    for name in ENVIRONMENT:
        values = list(dict.fromkeys(text_of(row, name) for row in rows))
        found.append((name, [value for value in values if value] or ["unknown"]))
    days = sorted({row.time.partition("T")[0] for row in rows})
    return [*found, ("days", days if len(days) < 4 else [f"{days[0]} to {days[-1]}"])]


def ranks(table: Table) -> list[list[int]]:
    """Of each row, its place from 1 when sorted by each column: the best figure first."""
    places = [_places(table.rows, column) for column in table.columns]
    return [list(line) for line in zip(*places, strict=True)]


def _places(rows: Sequence[Row], column: TableColumn) -> list[int]:
    values = [column.order(row) for row in rows]
    there = sorted(
        (i for i, value in enumerate(values) if value is not None),
        key=lambda i: values[i],
        reverse=column.better == "higher",
    )
    order = there + [i for i, value in enumerate(values) if value is None]
    return [order.index(i) + 1 for i in range(len(rows))]


def pictures(
    rows: Sequence[Row], numbers: Mapping[int, int]
) -> list[tuple[str, str, list[tuple[int, Row]]]]:
    """Each plot that has rows: its name, its SVG, and its rows by their numbers."""
    found = []
    for name, plot in PLOTS.items():
        if own := plot.rows(rows):
            svg = svg_text(plot.draw(own, plot.points(own)), name)
            found.append(
                (name, svg, sorted(((numbers[id(row)], row) for row in own), key=lambda p: p[0]))
            )
    return found
