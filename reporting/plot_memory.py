"""Plots of memory: what a run was expected to hold and held, by cache length; speed against it."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reporting.canvas import GREY, count_text, draw_failures, panels, styles
from reporting.plot_speed import WITH_DEPTH
from reporting.series import Point, by_series, drawn, point, with_labels
from results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_CACHE = (*WITH_DEPTH, "depth_fill")  # random K and V take as much memory as any
# What nvidia-smi calls the total memory of a device, by its exact name, in MiB.
CAPACITY_MIB = {
    "NVIDIA A100-SXM4-80GB": 81920,
    "NVIDIA H100 80GB HBM3": 81559,
    "NVIDIA H200": 143771,
    "NVIDIA GeForce RTX 4090": 24564,
    "NVIDIA GeForce RTX 3090": 24576,
}


def capacity_gb(row: Row) -> float | None:
    """All memory of the device, where its name says how much that is."""
    size_mib = CAPACITY_MIB.get(row.device_name or "")
    return None if size_mib is None else size_mib * 2**20 / 1e9


def fits_slots(row: Row) -> int | None:
    """The longest cache for which weights, cache and the rest stay within the capacity."""
    capacity = capacity_gb(row)
    if capacity is None or not row.cache_len or not row.kv_cache_gb or row.expected_gb is None:
        return None
    rest_gb = row.expected_gb - row.kv_cache_gb
    return max(0, int((capacity - rest_gb) / (row.kv_cache_gb / row.cache_len)))


def memory_points(rows: Sequence[Row]) -> list[Point]:
    """The expected parts, the measured peak, the capacity and what would fit it."""
    points = []
    for name, row in with_labels(rows, WITH_CACHE):
        rest = (row.expected_gb or 0) - (row.model_size_gb or 0) - (row.kv_cache_gb or 0)
        points.append(
            point(
                name,
                row,
                cache_len=row.cache_len,
                weights_gb=row.model_size_gb,
                rest_gb=None if row.expected_gb is None else round(rest, 4),
                kv_cache_gb=row.kv_cache_gb,
                expected_gb=row.expected_gb,
                peak_mem_gb=row.peak_mem_gb,
                capacity_gb=capacity_gb(row),
                fits_slots=fits_slots(row),
            )
        )
    return points


def draw_memory(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Bars of the expected parts beside each other for each cache length, peaks as diamonds."""
    with panels(rows, points) as (figure, grid):
        (axes,) = grid[0]
        axes.set_title("Memory by cache length: expected parts and measured peak")
        placed = places(points)
        for name, style in styles(points).items():
            own = [(x, p) for x, p in placed if p["series"] == name]
            _draw_bars(axes, own, style["color"], bar_width(points))
        _draw_peaks(axes, placed)
        _draw_capacity(axes, points)
        _label_slots(axes, points)
        axes.set_ylabel("memory [GB = 1e9 bytes]")
        return figure


def categories(points: Sequence[Point]) -> list[tuple[int, int]]:
    """The cache lengths, each as often as one series has it: (length, number) in their order."""
    return sorted({each for _, each in _numbered(points)})


def _numbered(points: Sequence[Point]) -> list[tuple[Point, tuple[int, int]]]:
    met: Counter[tuple[str, int]] = Counter()
    numbered = []
    for p in points:
        if p["cache_len"] is not None:
            here = (p["series"], p["cache_len"])
            numbered.append((p, (p["cache_len"], met[here])))
            met[here] += 1
    return numbered


def bar_width(points: Sequence[Point]) -> float:
    return 0.8 / len(by_series(points))


def places(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """The x of each bar: the categories are one apart, the series stand side by side."""
    order, names = categories(points), list(by_series(points))
    shift = (len(names) - 1) / 2
    return [
        (order.index(here) + (names.index(p["series"]) - shift) * bar_width(points), p)
        for p, here in _numbered(points)
    ]


def _draw_bars(axes: "Axes", own: Sequence[tuple[float, Point]], colour: str, width: float) -> None:
    known = [(x, p) for x, p in own if p["expected_gb"] is not None and p["rest_gb"] is not None]
    x = [place for place, _ in known]
    bottom = [0.0] * len(known)
    for part, words, fill in (
        ("weights_gb", "weights", "#999999"),
        ("rest_gb", "scratch; on CPU Python, torch", "#d9d9d9"),
        ("kv_cache_gb", "", colour),
    ):
        heights = [p[part] or 0.0 for _, p in known]
        label = words or f"KV cache: {own[0][1]['series']}"
        axes.bar(x, heights, 0.9 * width, bottom, label=label, color=fill)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _draw_peaks(axes: "Axes", placed: Sequence[tuple[float, Point]]) -> None:
    peaks = [(x, p["peak_mem_gb"]) for x, p in placed if p["peak_mem_gb"] is not None]
    if peaks:
        x, y = zip(*peaks, strict=True)
        axes.plot(x, y, "D", color="black", markerfacecolor="white", label="measured peak")
    failed = [p | {"x": x} for x, p in placed if p["status"] != "ok"]
    draw_failures(axes, failed, "x")


def _draw_capacity(axes: "Axes", points: Sequence[Point]) -> None:
    """The line where it is near the bars, else its value; and the longest cache that would fit."""
    for capacity in sorted({p["capacity_gb"] for p in points if p["capacity_gb"]}):
        words = f"capacity {capacity:.1f} GB"
        for name, own in by_series(points).items():
            fits = [p["fits_slots"] for p in own if p["fits_slots"] is not None]
            words += (
                f"\n{name}: {count_text(round(fits[-1] / 1024) * 1024)} slots fit" if fits else ""
            )
        if capacity < 3 * axes.get_ylim()[1]:
            axes.axhline(capacity, color="#D55E00", linestyle="--", label=words)
        else:
            axes.plot([], [], " ", label=f"{words}\n(above the axis)")


def _label_slots(axes: "Axes", points: Sequence[Point]) -> None:
    order = categories(points)
    names = [f"{length}" for length, _ in order]
    axes.set_xticks(range(len(order)), names, rotation=45 if len("  ".join(names)) > 60 else 0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("cache length [slots per sequence]")


def pareto_points(rows: Sequence[Row]) -> list[Point]:
    """Rate, peak and cache of each row, and whether no row of its workload has more for less."""
    labelled = with_labels(rows, WITH_DEPTH)
    points = []
    for name, row in labelled:
        workload = [other for _, other in labelled if workload_of(other) == workload_of(row)]
        is_best = row.status == "ok" and not any(beats(other, row) for other in workload)
        points.append(
            point(
                name,
                row,
                peak_mem_gb=row.peak_mem_gb,
                kv_cache_gb=row.kv_cache_gb,
                decode_tok_s=row.decode_tok_s,
                workload=workload_of(row),
                is_on_frontier=is_best,
            )
        )
    return points


def workload_of(row: Row) -> str:
    """What is generated, whatever with."""
    return f"depth {row.depth}, prompt {row.prompt_len}"


def beats(other: Row, row: Row) -> bool:
    """Whether it is as fast with as little memory, and better in one of them."""
    if other.status != "ok":
        return False
    speeds = (other.decode_tok_s or 0, row.decode_tok_s or 0)
    peaks = (other.peak_mem_gb or 0, row.peak_mem_gb or 0)
    as_good = speeds[0] >= speeds[1] and peaks[0] <= peaks[1]
    return as_good and (speeds[0] > speeds[1] or peaks[0] < peaks[1])


def draw_pareto(rows: Sequence[Row], points: Sequence[Point]) -> "Figure":
    """Points by their settings, and for each workload the line of those that nothing beats."""
    with panels(rows, points) as (figure, grid):
        (axes,) = grid[0]
        axes.set_title("Decode speed against peak memory")
        for name, style in styles(points).items():
            own = drawn(by_series(points)[name], "peak_mem_gb", "decode_tok_s")
            x, y = ([p[key] for p in own] for key in ("peak_mem_gb", "decode_tok_s"))
            hollow = {"markerfacecolor": "white"} if own and own[0]["is_synthetic"] else {}
            axes.plot(x, y, markersize=7, label=name, **style | {"linestyle": ""}, **hollow)
        ends = [_draw_frontier(axes, own) for own in _by_workload(points)]
        axes.set_xlabel("measured peak memory [GB = 1e9 bytes]")
        axes.set_ylabel("decode [tok/s]")
        axes.margins(0.15)
        axes.set_ylim(bottom=0)
        _label_ends(axes, [end for end in ends if end])
        return figure


def _by_workload(points: Sequence[Point]) -> list[list[Point]]:
    names = dict.fromkeys(p["workload"] for p in points)
    return [[p for p in points if p["workload"] == name] for name in names]


def _draw_frontier(axes: "Axes", points: Sequence[Point]) -> Point | None:
    """The steps between the points that nothing beats; the fastest of them."""
    best = drawn([p for p in points if p["is_on_frontier"]], "peak_mem_gb", "decode_tok_s")
    x, y = ([p[key] for p in best] for key in ("peak_mem_gb", "decode_tok_s"))
    if len(best) > 1:
        axes.step(x, y, "--", where="post", color=GREY, linewidth=1, label="frontier of a workload")
    return best[-1] if best else None


def _label_ends(axes: "Axes", ends: Sequence[Point]) -> None:
    """Name the workloads, but for one whose name would lie on another's."""
    taken: list[Any] = []
    for p in ends:
        here = axes.transAxes.inverted().transform(
            axes.transData.transform((p["peak_mem_gb"], p["decode_tok_s"]))
        )
        if all(abs(here[0] - x) > 0.3 or abs(here[1] - y) > 0.04 for x, y in taken):
            taken.append(here)
            axes.annotate(
                p["workload"], (p["peak_mem_gb"], p["decode_tok_s"]), xytext=(0, 8), fontsize=7,
                textcoords="offset points", color=GREY, ha="center",
            )  # fmt: skip
