"""How every plot looks: panels, colours and marks, footer; and how it becomes SVG, PNG and CSV.

matplotlib is imported when something is drawn, so that other commands start at once.
"""

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import UserError, printable
from reporting.series import Point, by_series, drawn, failures, source_lines
from results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, Color Universal Design: told apart with any colour vision. Yellow is too pale here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")  # a cross is a failure
GREY = "#666666"
DPI = 160  # 1280 pixels wide
SIZE_IN = (8.0, 5.2)
LINE_WIDTH = 128  # characters of the footer
SETTINGS: Any = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a $ in a name is a $
}
Looks = Mapping[str, dict[str, Any]]
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def panels(
    rows: Sequence[Row], points: Sequence[Point], **grid: Any
) -> "Iterator[tuple[Figure, Any]]":
    """A figure whose panels are drawn inside the block; its legend and footer are added after it.

    Args:
        rows: that are drawn: the footer tells where they come from.
        grid: as of matplotlib's `subplots`.

    Raises:
        UserError: matplotlib is not installed.
    """
    with figure_of(footer(rows, points), **grid) as (figure, axes):
        yield figure, axes
        _add_legend(figure)


@contextmanager
def figure_of(footer: str, **grid: Any) -> "Iterator[tuple[Figure, Any]]":
    """A figure with a grid of panels and small words below; errors as `panels`."""
    try:
        from matplotlib import rc_context  # noqa: PLC0415  (slow to import)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"plots need matplotlib ({printable(str(error))}); pip install -r requirements.txt"
        ) from None
    with rc_context(SETTINGS):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        yield figure, figure.subplots(squeeze=False, **grid)
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=7, color=GREY)


def footer(rows: Sequence[Row], points: Sequence[Point]) -> str:
    """Where the rows come from, and why some of them failed."""
    causes = sorted({f"x {p['series']}: {p['status']}: {p['reason']}" for p in failures(points)})
    return small_words([*source_lines(rows), *causes], 400)


def small_words(lines: Iterable[str], limit: int) -> str:
    """Lines of at most so many characters, folded to the width of the figure."""
    return "\n".join(textwrap.fill(printable(line, limit), LINE_WIDTH) for line in lines)


def _add_legend(figure: "Figure") -> None:
    """One legend for all panels, at the right, where it covers nothing."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    # series, which are containers of matplotlib, before what explains marks
    order = sorted(found, key=lambda label: not isinstance(found[label], tuple))
    words = ["\n".join(textwrap.fill(line, 26) for line in label.split("\n")) for label in order]
    if found:
        handles = [found[label] for label in order]
        figure.legend(handles, words, loc="outside right upper", fontsize=8)


def styles(points: Sequence[Point]) -> Looks:
    """Colour and marker of each line; both repeat at the same pace, dashes tell rounds apart."""
    names = list(by_series(points))
    marks = islice(cycle(zip(COLOURS, MARKERS, strict=True)), len(names))
    dashes = ["-", "--", ":", "-."]
    return {
        name: {"color": colour, "marker": marker, "linestyle": dashes[i // len(COLOURS) % 4]}
        for i, (name, (colour, marker)) in enumerate(zip(names, marks, strict=True))
    }


def draw_lines(
    axes: "Axes", points: Sequence[Point], names: Sequence[str], looks: Looks | None = None
) -> None:
    """A line per series; synthetic depths hollow.

    Args:
        names: of the figures that are x and y, and of the ends of y's range if it has one.
        looks: as of `styles`, where they are those of more points than these.
    """
    looks = looks or styles(points)
    for name, own in by_series(points).items():
        if line := drawn(own, *names[:2]):
            _draw_line(axes, line, names, {"label": name, **looks[name]})


def _draw_line(axes: "Axes", own: list[Point], names: Sequence[str], style: dict[str, Any]) -> None:
    x, y, *ends = ([p[name] for p in own] for name in names)
    if own[0]["is_synthetic"]:
        style["markerfacecolor"] = "white"
    if ends and None not in ends[0]:
        gaps = [[abs(a - b) for a, b in zip(y, end, strict=True)] for end in ends]
        style |= {"yerr": gaps, "capsize": 3}
    axes.errorbar(x, y, markersize=6, linewidth=1.5, **style)


def draw_plain(axes: "Axes", points: Sequence[Point], names: Sequence[str], dashes: str) -> bool:
    """A thin line per series without an entry of its own in the legend; whether there is any."""
    looks = styles(points)
    lines = {name: drawn(own, *names) for name, own in by_series(points).items()}
    for name, line in lines.items():
        x, y = ([p[each] for p in line] for each in names)
        axes.plot(x, y, dashes, color=looks[name]["color"], linewidth=1)
    return any(lines.values())


def draw_failures(axes: "Axes", points: Sequence[Point], x: str) -> None:
    """A cross on the axis for each run that failed where its place is known, with its status."""
    looks = styles(points)
    at_axis = axes.get_xaxis_transform()
    for p in failures(points):
        if p[x] is None:
            continue
        colour = looks[p["series"]]["color"]
        axes.plot(
            [p[x]], [0.04], "x", color=colour, markersize=9, markeredgewidth=2, transform=at_axis,
            label="run that failed", clip_on=False,
        )  # fmt: skip
        axes.annotate(
            p["status"], (p[x], 0.04), xycoords=at_axis, xytext=(0, 9), ha="center",
            textcoords="offset points", rotation=90, fontsize=7, color=colour,
            bbox={"facecolor": "white", "linewidth": 0, "alpha": 0.8, "pad": 0.5},
        )  # fmt: skip


def count_axis(axes: "Axes", label: str) -> None:
    """A logarithmic x axis of tokens: 512, 1k, 64k, 1M, of 1024 and 1024 squared."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: count_text(value))
    axes.minorticks_off()
    axes.set_xlabel(label)


def count_text(value: float) -> str:
    """A number of tokens as short as its ticks allow."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"


def svg_text(figure: "Figure", name: str) -> str:
    """The figure as SVG that is the same every time, with ids of its own, for a page or a file."""
    from matplotlib import rc_context  # noqa: PLC0415  (slow to import)

    stream = io.StringIO()
    with rc_context(SETTINGS | {"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata=NO_METADATA)
    text = re.sub(r"\A.*?(?=<svg )", "", stream.getvalue(), flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", text)


def csv_text(points: Sequence[Point]) -> str:
    """The plotted numbers; what does not apply is empty."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(points[0]))
    writer.writeheader()
    writer.writerows(points)
    return stream.getvalue()


def save(figure: "Figure", points: Sequence[Point], path: Path) -> list[Path]:
    """Write PATH.svg, PATH.png and PATH.csv.

    Raises:
        UserError: naming the file that cannot be written.
    """
    names = [path.with_suffix(suffix) for suffix in PICTURES]
    written = [write(name, PICTURES[name.suffix](figure, path.name)) for name in names]
    return [*written, write(path.with_suffix(".csv"), csv_text(points).encode())]


def svg_file(figure: "Figure", name: str) -> bytes:
    """The figure as an SVG file."""
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg_text(figure, name)}'.encode()


def png_file(figure: "Figure", name: str) -> bytes:  # noqa: ARG001  (as svg_file)
    """The figure as a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


PICTURES = {".png": png_file, ".svg": svg_file}
"""How a figure becomes a file, by the end of its name."""


def write(path: Path, data: bytes) -> Path:
    """A whole file in place of an older one, whose folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{printable(str(path))}: cannot be written: {error.strerror}") from None
    return path
