"""Plots of speed: decode and time per token by filled length, prefill by prompt length."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from derived import decode_rates, mean_filled, roofline_tok_s, tpot_s
from reporting.canvas import (
    GREY,
    count_axis,
    count_text,
    draw_failures,
    draw_lines,
    draw_plain,
    panels,
    styles,
)
from reporting.series import Point, by_series, drawn, point, twin_of, with_labels
from results import Row
from stats import LinearFit, linear_fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_DEPTH = ("depth", "prompt_len", "prompt_sha", "new_tokens", "cache_len")
WITH_PROMPT = ("prompt_len", "prompt_sha", "new_tokens", "cache_len")
FILLED = "filled length, the mean over the decode steps [tokens]"


def filled(row: Row) -> float | None:
    """Where a row stands on the axis; a failure, by what it was to hold."""
    if row.status == "ok" or row.depth is None or row.prompt_len is None:
        return mean_filled(row)
    return mean_filled(row) or row.depth + row.prompt_len


def decode_points(rows: Sequence[Row]) -> list[Point]:
    """Decode rate with the range of its samples, the roofline, and the rate relative to bf16."""
    points = []
    for name, row in with_labels(rows, WITH_DEPTH):
        tok_s = decode_rates(row)
        ratio, ratio_ci_pct = ratio_to(twin_of(row, rows), row)
        points.append(
            point(
                name,
                row,
                mean_filled=filled(row),
                decode_tok_s=row.decode_tok_s,
                slowest_tok_s=min(tok_s, default=None),
                fastest_tok_s=max(tok_s, default=None),
                roofline_tok_s=roofline_tok_s(row),
                ratio_to_bf16=ratio,
                ratio_ci_pct=ratio_ci_pct,
            )
        )
    return points


def ratio_to(base: Row | None, row: Row) -> tuple[float | None, float | None]:
    """The decode rate in units of another row's, and both intervals together in percent."""
    if base is None or base is row or not base.decode_tok_s or not row.decode_tok_s:
        return None, None
    ends = (base.decode_ci_pct, row.decode_ci_pct)
    ci_pct = None if ends[0] is None or ends[1] is None else math.hypot(ends[0], ends[1])
    return row.decode_tok_s / base.decode_tok_s, ci_pct


def draw_decode(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Rate above, ratio to bf16 below where there is something to compare."""
    compared = drawn(points, "ratio_to_bf16")
    heights = {"nrows": 2, "height_ratios": [3, 1.4], "sharex": True} if compared else {}
    with panels(rows, points, **heights) as (figure, grid):
        axes = grid[:, 0]
        axes[0].set_title("Decode speed by filled length")
        names = ["mean_filled", "decode_tok_s", "slowest_tok_s", "fastest_tok_s"]
        draw_lines(axes[0], points, names)
        draw_failures(axes[0], points, "mean_filled")
        if draw_plain(axes[0], points, ["mean_filled", "roofline_tok_s"], "--_"):
            axes[0].plot(
                [], [], "--_", color=GREY, label="roofline: bytes at the measured bandwidth"
            )
        axes[0].set_ylabel("decode [tok/s]")
        axes[0].set_ylim(bottom=0)
        if compared:
            _draw_ratios(axes[1], points)
        count_axis(axes[-1], FILLED)
        return figure


def _draw_ratios(axes: "Axes", points: Sequence[Point]) -> None:
    axes.axhline(1, color=GREY, linewidth=1)
    looks = styles(points)
    for name, own in by_series(points).items():
        line = drawn(own, "mean_filled", "ratio_to_bf16")
        x, y = ([p[key] for p in line] for key in ("mean_filled", "ratio_to_bf16"))
        errors = [value * (p["ratio_ci_pct"] or 0) / 100 for value, p in zip(y, line, strict=True)]
        if line:
            axes.errorbar(x, y, errors, capsize=3, markersize=6, **looks[name])
        for place in crossovers(x, y, errors):
            axes.axvline(place, color=looks[name]["color"], linewidth=1, linestyle=":")
            axes.annotate(
                f" even at {count_text(round(place))}", (place, 0.86), fontsize=7,
                xycoords=axes.get_xaxis_transform(), color=looks[name]["color"],
            )  # fmt: skip
    axes.set_ylabel("ratio to bf16\n(above 1: faster)")


def crossovers(x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Where a ratio passes 1, on straight lines over log x, between ends that are clear of 1."""
    found = []
    clear = [(a, b) for a, b, error in zip(x, y, errors, strict=True) if abs(b - 1) > error]
    for (x0, y0), (x1, y1) in pairwise(clear):
        if (y0 - 1) * (y1 - 1) < 0:
            share = (1 - y0) / (y1 - y0)
            found.append(math.exp(math.log(x0) + share * math.log(x1 / x0)))
    return found


def step_points(rows: Sequence[Row]) -> list[Point]:
    """Time per token, its range, and what the straight line through its series gives there."""
    points = []
    for name, row in with_labels(rows, WITH_DEPTH):
        own_s = [(row.batch_size or 1) / tok_s for tok_s in decode_rates(row)]
        middle_s = tpot_s(row)
        points.append(
            point(
                name,
                row,
                mean_filled=filled(row),
                tpot_ms=middle_s and 1000 * middle_s,
                fastest_ms=1000 * min(own_s) if own_s else None,
                slowest_ms=1000 * max(own_s) if own_s else None,
                fit_ms=None,
            )
        )
    for own in by_series(points).values():
        if fit := fit_of(own):
            for p in drawn(own, "mean_filled", "tpot_ms"):
                p["fit_ms"] = fit.intercept + fit.slope * p["mean_filled"]
    return points


def fit_of(points: Sequence[Point]) -> LinearFit | None:
    """Time per token as a line over the filled length; None where no line is determined."""
    own = drawn(points, "mean_filled", "tpot_ms")
    x, y = ([p[name] for p in own] for name in ("mean_filled", "tpot_ms"))
    return linear_fit(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else None


def draw_step(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Points with their range, and the line through each series."""
    with panels(rows, points) as (figure, grid):
        (axes,) = grid[0]
        axes.set_title("Time per token: what all steps cost, and what the stored tokens add")
        names = ["mean_filled", "tpot_ms", "fastest_ms", "slowest_ms"]
        in_words = _with_fits_in_words(points)
        looks = {name: look | {"linestyle": ""} for name, look in styles(in_words).items()}
        draw_lines(axes, in_words, names, looks)
        draw_plain(axes, points, ["mean_filled", "fit_ms"], "--")
        axes.set_xlabel(FILLED)
        axes.set_ylabel("time per output token [ms]")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        return figure


def _with_fits_in_words(points: Sequence[Point]) -> list[Point]:
    words = {}
    for name, own in by_series(points).items():
        if fit := fit_of(own):
            number = len(drawn(own, "mean_filled", "tpot_ms"))
            trust = "2 points" if number == 2 else f"R² {fit.r_squared:.3f}, {number} points"
            words[name] = (
                f"{name}\n{fit.intercept:.3g} ms + {1024 * fit.slope:.3g} ms per 1024 tokens"
                f" ({trust})"
            )
    return [p | {"series": words.get(p["series"], p["series"])} for p in points]


def prefill_points(rows: Sequence[Row]) -> list[Point]:
    """Prefill rate and time to the first token, with the range of the samples."""
    along = WITH_PROMPT if len({row.prompt_len for row in rows}) > 1 else WITH_DEPTH
    return [
        point(
            name,
            row,
            depth=row.depth,
            prompt_len=row.prompt_len,
            stored=None if row.depth is None or not row.prompt_len else row.depth + row.prompt_len,
            prefill_tok_s=row.prefill_tok_s,
            **_prefill_range(row),
            ttft_s=row.ttft_s,
            fastest_s=min(row.ttft_samples_s, default=None),
            slowest_s=max(row.ttft_samples_s, default=None),
        )
        for name, row in with_labels(rows, along)
    ]


def _prefill_range(row: Row) -> dict[str, float | None]:
    samples = row.ttft_samples_s
    tokens = (row.batch_size or 1) * (row.prompt_len or 0)
    return {
        "slowest_tok_s": tokens / max(samples) if samples else None,
        "fastest_tok_s": tokens / min(samples) if samples else None,
    }


def draw_prefill(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Rate above, time below."""
    with panels(rows, points, nrows=2, sharex=True) as (figure, grid):
        rate, time = grid[:, 0]
        rate.set_title("Prefill by the length that it leaves stored")
        draw_lines(rate, points, ["stored", "prefill_tok_s", "slowest_tok_s", "fastest_tok_s"])
        rate.set_ylabel("prefill [tok/s]")
        draw_lines(time, points, ["stored", "ttft_s", "fastest_s", "slowest_s"])
        time.set_ylabel("time to first token [s]")
        for axes in (rate, time):
            draw_failures(axes, points, "stored")
            axes.set_ylim(bottom=0)
        count_axis(time, "stored after the prompt: depth + prompt [tokens]")
        return figure
