"""Plots of quality: the KL and agreement by context, and the KL against the bytes that it saves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reporting.canvas import GREY, count_axis, draw_failures, draw_lines, draw_plain, panels, styles
from reporting.series import Point, point, with_labels
from results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_CONTEXT = ("context", "prompt_sha")
BYTES = {
    "cache": ("kv_bytes_per_token", "KV cache [bytes per token]"),
    "weights": ("model_size_gb", "weights [GB = 1e9 bytes]"),
}
KL = "KL from the reference\n[nats per token]"


def quality_points(rows: Sequence[Row]) -> list[Point]:
    """The KL with its standard error and floor, and how often the likeliest token is the same."""
    return [
        point(
            name,
            row,
            context=row.context,
            kl_mean=row.kl_mean,
            **_error_bar(row),
            kl_floor=row.kl_floor,
            top1_pct=row.top1_pct,
            top1_floor_pct=row.top1_floor_pct,
        )
        for name, row in with_labels(rows, WITH_CONTEXT)
    ]


def _error_bar(row: Row) -> dict[str, float | None]:
    if row.kl_mean is None or row.kl_se is None:
        return {"kl_low": None, "kl_high": None}
    return {"kl_low": max(0.0, row.kl_mean - row.kl_se), "kl_high": row.kl_mean + row.kl_se}


def draw_quality(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """KL above, agreement below, each beside what the reference gives against itself."""
    with panels(rows, points, nrows=2, sharex=True) as (figure, grid):
        kl, top1 = grid[:, 0]
        kl.set_title("Quality by context, read from the cache as stored")
        draw_lines(kl, points, ["context", "kl_mean", "kl_low", "kl_high"])
        _log_kl([kl], points)
        for axes in (kl, top1):
            draw_failures(axes, points, "context")
        draw_lines(top1, points, ["context", "top1_pct"])
        if draw_plain(top1, points, ["context", "top1_floor_pct"], ":_"):
            top1.plot([], [], ":_", color=GREY, label="noise floor of the same token")
        top1.set_ylabel("same likeliest\ntoken [%]")
        count_axis(top1, "context before the scored tokens [tokens]")
        return figure


def _log_kl(panels_of_kl: Sequence["Axes"], points: Sequence[Point]) -> None:
    """A logarithmic KL with everything up to the highest noise floor shaded; y may be shared."""
    values = [p[name] for p in points for name in ("kl_mean", "kl_floor") if p[name]]
    floors = [p["kl_floor"] for p in points if p["kl_floor"]]
    for axes in panels_of_kl:
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylabel(KL)
    for axes in panels_of_kl if floors else ():
        axes.axhspan(min(values) / 3, max(floors), color="#cccccc", alpha=0.6, label="noise floor")
    if values:
        panels_of_kl[0].set_ylim(bottom=min(values) / 3)


def bytes_points(rows: Sequence[Row]) -> list[Point]:
    """The KL with its error and floor, and the bytes of what is compared with the reference."""
    return [
        point(
            name,
            row,
            reference=row.reference,
            kv_bytes_per_token=row.kv_bytes_per_token,
            model_size_gb=row.model_size_gb,
            kl_mean=row.kl_mean,
            **_error_bar(row),
            kl_floor=row.kl_floor,
        )
        for name, row in with_labels(rows, ("prompt_sha", "reference"))
    ]


def draw_bytes(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """A panel for caches and one for weights, as far as there are such rows."""
    found = [name for name in BYTES if any(p["reference"] == name for p in points)]
    with panels(rows, points, ncols=len(found), sharey=True) as (figure, grid):
        for axes, name in zip(grid[0], found, strict=True):
            column, words = BYTES[name]
            own = [p for p in points if p["reference"] == name]
            names = [column, "kl_mean", "kl_low", "kl_high"]
            draw_lines(axes, own, names, styles(points))
            axes.set_xlabel(words)
            axes.set_xlim(0, 1.1 * max((p[column] or 0 for p in own), default=1))
            axes.set_title(f"KL against bytes: {name}")
        _log_kl(grid[0], points)
        return figure
