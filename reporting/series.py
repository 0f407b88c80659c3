"""Rows as the lines of a plot: which differ only along its axis, and what tells the lines apart."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from config import printable
from derived import kv_name
from results import COLUMNS, KEY, SYSTEM, Row

Point = dict[str, Any]
"""What is plotted of one row: a line of the CSV."""

IDENTITY = [name for name in COLUMNS if name in ("model", *KEY, *SYSTEM)]
NOT_IN_A_LABEL = {"schema", "kind", "k_format", "v_format", "depth_fill"}


def with_labels(rows: Sequence[Row], along: Collection[str]) -> list[tuple[str, Row]]:
    """Each row with the label of its line: the formats, and all other settings that differ.

    Args:
        along: the fields that change along a line.
    """
    names = [
        name
        for name in IDENTITY
        if name not in along
        and name not in NOT_IN_A_LABEL
        and len({getattr(row, name) for row in rows} - {None}) > 1
    ]
    show_synthetic = "depth_fill" not in along
    rows = sorted(
        rows, key=lambda row: [_order(kv_name(row)), *(_order(getattr(row, n)) for n in names)]
    )
    return [(label(row, names, show_synthetic), row) for row in rows]


def _order(value: Any) -> tuple[bool, Any]:
    return (value is None, 0 if value is None else value)


def label(row: Row, names: Iterable[str], show_synthetic: bool = True) -> str:
    """`int8, weight_format int4-g32`."""
    parts = [kv_name(row) or "default cache"]
    parts += [f"{name} {getattr(row, name)}" for name in names if getattr(row, name) is not None]
    parts += ["synthetic depth"] * (show_synthetic and is_synthetic(row))
    return printable(", ".join(parts))


def is_synthetic(row: Row) -> bool:
    """Whether its depth holds random values: another measurement, drawn hollow."""
    return row.depth_fill == "synthetic"


def point(name: str, row: Row, **figures: Any) -> Point:
    """What every CSV says of a row, around the figures of one plot."""
    status = "check_failed" if row.check == "fail" else row.status
    of_row = {"is_synthetic": is_synthetic(row), "status": status, "reason": row.error}
    return {"series": name, **figures, **of_row, "commit": row.commit, "key": row.key}


def by_series(points: Iterable[Point]) -> dict[str, list[Point]]:
    """The points of each line, in the order in which the lines are first met."""
    found: dict[str, list[Point]] = {}
    for each in points:
        found.setdefault(each["series"], []).append(each)
    return found


def drawn(points: Iterable[Point], *names: str) -> list[Point]:
    """The points of runs that went well and have all these figures, by the first of them."""
    well = [p for p in points if p["status"] == "ok" and all(p[n] is not None for n in names)]
    return sorted(well, key=lambda p: p[names[0]])


def failures(points: Iterable[Point]) -> list[Point]:
    """The points of runs that did not go well."""
    return [p for p in points if p["status"] != "ok"]


def twin_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The row that differs in nothing but a cache in bf16."""
    formats = ("k_format", "v_format")
    names = [name for name in IDENTITY if name not in formats]

    def is_twin(other: Row) -> bool:
        is_plain = all(getattr(other, name) == "bf16" for name in formats)
        return is_plain and all(getattr(other, name) == getattr(row, name) for name in names)

    return next((other for other in rows if other.status == "ok" and is_twin(other)), None)


def listed(values: Iterable[object], limit: int = 4) -> str:
    """Different values, in the order of their first appearance; the rest as a number."""
    texts = list(dict.fromkeys(str(value) for value in values if value is not None))
    more = [f"{len(texts) - limit} more"] if len(texts) > limit else []
    return ", ".join(texts[:limit] + more)


def source_lines(rows: Sequence[Row]) -> list[str]:
    """What the footer of a plot says: model, machine, versions, date, how many."""
    weights = listed(row.weight_format for row in rows)
    model = f"{listed(row.model for row in rows)}, {listed(row.dtype for row in rows)}"
    machines = (f"{row.device_name}, {row.threads} threads" for row in rows if row.device_name)
    days = sorted({row.time.partition("T")[0] for row in rows})
    samples = listed(sorted({row.num_samples for row in rows if row.num_samples}))
    names = sorted({name for row in rows for name in row.flags})
    flags = [f"{name} in {sum(name in row.flags for row in rows)}" for name in names]
    number = f"{len(rows)} rows" + (f", n = {samples} samples each" if samples else "")
    return [
        f"{model}, weights {weights}; {listed(machines)}",
        f"torch {listed(row.torch for row in rows)}; commit {listed(row.commit for row in rows)};"
        f" {' to '.join(dict.fromkeys((days[0], days[-1])))}; {number}"
        + (f"; flags: {listed(flags)}" if flags else ""),
    ]
