"""The document of bench_attention.py as a Markdown table that is also readable as it stands."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]

MARK = "†"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "heads": lambda cell: cell["heads"],
    "K, V": lambda cell: f"{cell['k_format']}, {cell['v_format']}",
    "filled": lambda cell: f"{cell['filled']}{MARK * cell['in_cache']}",
    "layers": lambda cell: f"{cell['layers']}",
    "us": lambda cell: f"{1e6 * cell['time_s']:.1f}",
    "spread %": lambda cell: f"{cell['spread_pct']:.1f}",
    "GB/s": lambda cell: f"{cell['bandwidth_gb_s']:.2f}",
    "sum GB/s": lambda cell: f"{cell['machine_gb_s']:.1f}",
    "% of sum": lambda cell: f"{cell['bandwidth_pct']:.1f}",
    "x bf16": lambda cell: _ratio(cell["speedup_over_bf16"]),
    "x SDPA": lambda cell: _ratio(cell["speedup_over_sdpa"]),
    "x origin": lambda cell: _ratio(cell["speedup_over_origin"]),
}
"""Header of each column and its text for a cell."""


def table(document: Record) -> str:
    """What was measured on what, a line per cell and per fit, and what the columns mean."""
    lines = [list(COLUMNS), *_lines(document)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (
        "| "
        + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([*_heading(document), "", head, rule, *body, "", *_legend(document)])


def _lines(document: Record) -> Iterator[list[str]]:
    """The cells, and behind the last one of each heads and format its fit."""
    fits = {_subject(fit): fit for fit in document["fits"]}
    cells = document["cells"]
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        yield [text(cell) for text in COLUMNS.values()]
        is_last = following is None or _subject(following) != _subject(cell)
        if is_last and (fit := fits.get(_subject(cell))):
            yield _fit_line(fit)


def _subject(record: Record) -> tuple[str, str, str]:
    return record["heads"], record["k_format"], record["v_format"]


def _fit_line(fit: Record) -> list[str]:
    texts = {
        "heads": fit["heads"],
        "K, V": f"{fit['k_format']}, {fit['v_format']}",
        "filled": "fit",
        "us": f"{1e6 * fit['intercept_s']:.1f} + {1e9 * fit['slope_s_per_token']:.3f} n/1000",
        "spread %": f"R2 {fit['r_squared']:.5f}",
    }
    return [texts.get(name, "") for name in COLUMNS]


def _heading(document: Record) -> Sequence[str]:
    return (
        f"`{document['command']}`",
        "",
        f"{document['device_name']}, {document['threads']} threads, torch {document['torch']},"
        f" attention {document['attention']}, commit {document['commit']},"
        f" {document['busy_cores']:.1f} cores busy with something else.",
        f"Batch {document['batch_size']}, queries {document['queries']}, median of"
        f" {document['repeats']} turns.",
    )


def _legend(document: Record) -> Iterator[str]:
    yield "us: one call on one layer. spread: between the quartiles. GB/s: codes and scales read."
    yield "sum GB/s: at which a plain sum of a large buffer read memory in the same turns."
    yield "x: times of the bf16 cache, of SDPA with enable_gqa on bf16, and of the origin's way"
    yield "(dequantise all, repeat heads, SDPA), each over this time; -: not measured."
    if document["fits"]:
        yield "fit: least squares over the lengths n."
    if any(cell["in_cache"] for cell in document["cells"]):
        size = document["evicting_bytes"] / 1e6
        yield f"{MARK} All layers hold less than {size:.0f} MB: part may come from the caches."
