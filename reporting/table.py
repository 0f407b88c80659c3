"""A Markdown table of rows: the columns that differ; what is equal in all rows is told once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from config import MISSING, UserError, flag, printable
from derived import kv_name
from reporting.select import ALL_HELP, FILE_HELP, WHERE_HELP, select_newest, text_of
from results import COLUMNS, SPECS, Row


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Print rows as a Markdown table."""

    file: str = flag(MISSING, help=FILE_HELP)
    columns: str = flag("", help="these instead: names of a row's fields, or of DEFAULT")
    where: str = flag("", help=WHERE_HELP)
    all: bool = flag(False, help=ALL_HELP)
    debug: bool = flag(False, help="show the traceback of an error")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """How one column of a table is made.

    Attributes:
        heading: above it.
        text: of a row; None: does not apply.
        role: "setting", by which rows are sorted; "figure", a result, which is shown even where it
            is equal in all rows; "condition", anything else.
        order: what stands for the text when rows are sorted; None comes last.
        better: higher or lower, of a figure.
    """

    heading: str
    text: Callable[[Row], str | None]
    role: str
    order: Callable[[Row], Any]
    better: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows, sorted, with the columns to show and the settings that are equal in all of them."""

    rows: list[Row]
    columns: list[TableColumn]
    equal: dict[str, str]

    def lines(self) -> list[list[str]]:
        """The cells of each row."""
        return [[column.text(row) or "" for column in self.columns] for row in self.rows]


def raw(name: str) -> TableColumn:
    """A field of the rows as it stands there, without escapes."""
    spec = SPECS[name]
    is_setting = spec.key or spec.system or name == "model"
    return TableColumn(
        heading=name,
        text=lambda row: text_of(row, name) or None,
        role="figure" if spec.better else "setting" if is_setting else "condition",
        order=lambda row: getattr(row, name) if getattr(row, name) != () else None,
        better=spec.better,
    )


def figure(heading: str, name: str, spec: str, scale: float = 1) -> TableColumn:
    """A figure of the rows in a unit and precision for people."""

    def text(row: Row) -> str | None:
        value = getattr(row, name)
        return None if value is None else format(scale * value, spec)

    return TableColumn(
        heading=heading,
        text=text,
        role="figure",
        order=lambda row: getattr(row, name),
        better=SPECS[name].better,
    )


def with_error(column: TableColumn, error: Callable[[Row], str | None]) -> TableColumn:
    """The column with `± error` behind its values."""

    def text(row: Row) -> str | None:
        value, plus_minus = column.text(row), error(row)
        return f"{value} ± {plus_minus}" if value and plus_minus else value

    return replace(column, text=text)


def setting(heading: str, text: Callable[[Row], str | None]) -> TableColumn:
    """Something that is set, put in words."""
    return TableColumn(heading=heading, text=text, role="setting", order=text)


def _weights(row: Row) -> str | None:
    if row.model_size_gb is None:
        return row.weight_format
    return f"{row.weight_format}, {1000 * row.model_size_gb:.0f} MB"


def _depth(row: Row) -> str | None:
    if row.depth is None:
        return None
    return f"{row.depth}" + (" synthetic" if row.depth_fill == "synthetic" else "")


def _status(row: Row) -> str:
    return row.status + (f": {printable(row.error, 80)}" if row.error else "")


DECODE = with_error(
    figure("decode tok/s, ± 95 %", "decode_tok_s", ".2f"),
    lambda row: None if row.decode_ci_pct is None else f"{row.decode_ci_pct:.1f} %",
)
KL = with_error(
    figure("KL nat", "kl_mean", ".1e"),
    lambda row: None if row.kl_se is None else f"{row.kl_se:.1e}",
)
NEEDLE = with_error(
    figure("needle change nat", "needle_change", ".1e"),
    lambda row: None if row.needle_change_se is None else f"{row.needle_change_se:.1e}",
)
DEFAULT: dict[str, TableColumn] = {
    "kind": raw("kind"),
    "model": raw("model"),
    "depth": replace(raw("depth"), text=_depth),
    "prompt_len": raw("prompt_len"),
    "weights": setting("weights", _weights),
    "kv": setting("K, V", kv_name),
    **{name: raw(name) for name in ("reference", "text", "context", "windows", "scored")},
    **{name: raw(name) for name in ("dtype", "batch_size", "new_tokens", "cache_len")},
    **{name: raw(name) for name in ("prefill_chunk", "compile")},
    "status": replace(raw("status"), text=_status),
    "decode": DECODE,
    "ttft": figure("TTFT s", "ttft_s", ".3f"),
    "cache": figure("KV cache MB", "kv_cache_gb", ".1f", 1000),
    "peak": figure("peak GB", "peak_mem_gb", ".3f"),
    "kl": KL,
    "kl_floor": figure("KL floor nat", "kl_floor", ".1e"),
    "top1": figure("top-1 %", "top1_pct", ".2f"),
    "needle": NEEDLE,
    **{name: raw(name) for name in ("attention", "flags", "num_samples")},
    **{name: raw(name) for name in ("device_name", "threads", "torch", "commit")},
}


def make_table(rows: Sequence[Row], names: str = "") -> Table:
    """The table of `names`, or of those of DEFAULT that differ; sorted by its settings.

    Raises:
        UserError: a name is no column.
    """
    asked = [_column(name) for name in filter(None, names.split(","))]
    shown, equal = [], {}
    for column in DEFAULT.values():
        texts = {column.text(row) for row in rows}
        if texts == {None}:
            continue
        if len(texts) > 1 or column.role == "figure":
            shown.append(column)
        elif column.heading not in {each.heading for each in asked}:
            equal[column.heading] = texts.pop() or ""
    shown = asked or shown
    return Table(rows=_sorted(rows, shown), columns=shown, equal=equal)


def _column(name: str) -> TableColumn:
    if name in DEFAULT:
        return DEFAULT[name]
    if name in COLUMNS:
        return raw(name)
    raise UserError(
        f"--columns {printable(name)}: no field of a row, nor one of {', '.join(DEFAULT)}"
    )


def _sorted(rows: Sequence[Row], columns: Sequence[TableColumn]) -> list[Row]:
    settings = [column for column in columns if column.role == "setting"]

    def order(row: Row) -> list[tuple[bool, Any]]:
        values = [column.order(row) for column in settings]
        return [(value is None, 0 if value is None else value) for value in values]

    return sorted(rows, key=order)


def markdown(table: Table) -> str:
    """The table, and below it what is equal in all rows."""
    head = [column.heading for column in table.columns]
    rule = ["---:" if column.role == "figure" else "---" for column in table.columns]
    lines = [markdown_line(line) for line in (head, rule, *table.lines())]
    if table.equal:
        equal = "; ".join(f"{name} {value}" for name, value in table.equal.items())
        lines += ["", f"In all rows: {_escaped(equal)}."]
    return "\n".join(lines)


def markdown_line(line: Sequence[str]) -> str:
    """Cells in which nothing is a mark of Markdown's tables, and no control character."""
    return f"| {' | '.join(map(_escaped, line))} |"


def _escaped(text: str) -> str:
    return printable(text, 10_000).replace("|", "\\|")


def table(config: TableConfig) -> None:
    """Print the table of the rows that are meant."""
    rows = select_newest(config.file, config.where, config.all)
    print(markdown(make_table(rows, config.columns)))
