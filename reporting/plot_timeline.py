"""The picture of `generate.py --memory_profile`: memory over time, phases, what was expected."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config import UserError, printable
from durable import check_writable
from reporting.canvas import COLOURS, GREY, PICTURES, csv_text, figure_of, small_words, write
from reporting.matching import label
from reporting.series import source_lines
from results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SHARE = 0.012  # of the time: shorter phases get no name of their own in the picture


class Sample(NamedTuple):
    """What was held at one moment of a phase."""

    time_s: float
    memory_gb: float
    phase: str


def check_picture(path: Path) -> None:
    """Refuse a name that says no kind of picture, or that cannot be written."""
    if path.suffix not in PICTURES:
        raise UserError(
            f"--memory_profile {printable(str(path))}: must end in {' or '.join(PICTURES)}"
        )
    check_writable(path)


def save_timeline(
    path: Path, samples: Sequence[Sample], parts: Mapping[str, int], row: Row
) -> None:
    """Write the picture, and beside it the samples as CSV.

    Args:
        path: ends in .png or .svg.
        samples: at least one, in order of time.
        parts: bytes that were expected, by name, what is there first at first; each is drawn as the
            level that it and those before it reach.
        row: of the run, for the words below.

    Raises:
        UserError: matplotlib is missing, or a file cannot be written.
    """
    words = [label(row), *source_lines([row]), row.repro]
    with figure_of(small_words(words, 1000)) as (figure, grid):
        draw(grid[0][0], samples, parts)
    points = [sample._asdict() for sample in samples]
    write(path.with_suffix(".csv"), csv_text(points).encode())
    write(path, PICTURES[path.suffix](figure, path.stem))


def draw(axes: "Axes", samples: Sequence[Sample], parts: Mapping[str, int]) -> None:
    """The line, a band per phase, a dashed level per expected part."""
    times = [sample.time_s for sample in samples]
    sizes = [sample.memory_gb for sample in samples]
    axes.fill_between(times, sizes, color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(times, sizes, color=COLOURS[0], linewidth=1.5)
    top = 1.25 * max(*sizes, sum(parts.values()) / 1e9)
    axes.set_ylim(0, top)
    axes.set_xlim(0, times[-1])
    draw_levels(axes, parts, times[-1])
    draw_phases(axes, samples)
    axes.set_title("Memory of a run", loc="left")
    axes.set_xlabel("time [s]")
    axes.set_ylabel("memory held [GB = 1e9 bytes]")


def draw_levels(axes: "Axes", parts: Mapping[str, int], end_s: float) -> None:
    """The sum of the expected parts up to each."""
    level, previous = 0.0, -1.0
    for name, size in parts.items():
        level += size / 1e9
        axes.axhline(level, color=GREY, linestyle="--", linewidth=0.8)
        if level - previous > 0.02 * axes.get_ylim()[1]:  # else the names would cover each other
            text = f"+ {name} {size / 1e9:.3f} GB"
            axes.annotate(
                text, (end_s, level), xytext=(4, 0), textcoords="offset points", fontsize=7,
                va="center", color=GREY, annotation_clip=False,
            )  # fmt: skip
            previous = level


def draw_phases(axes: "Axes", samples: Sequence[Sample]) -> None:
    """A band from the first sample of a phase to that of the next, with its name at the top."""
    runs = [list(run) for _, run in groupby(samples, key=lambda sample: sample.phase)]
    starts = [run[0].time_s for run in runs] + [samples[-1].time_s]
    for index, run in enumerate(runs):
        start_s, end_s = starts[index : index + 2]
        axes.axvspan(start_s, end_s, color=GREY, alpha=0.12 * (index % 2), linewidth=0)
        if end_s - start_s >= LEAST_SHARE * samples[-1].time_s:
            middle = (start_s + end_s) / 2
            axes.annotate(
                run[0].phase, (middle, 0.985), xycoords=("data", "axes fraction"), ha="center",
                va="top", rotation=90, fontsize=8,
            )  # fmt: skip
