"""A sweep at a glance, on any terminal."""

import dataclasses

import pytest
from sweep_rows import failed_row, quality_row, sweep

from reporting.bars import WIDTH, bars

ROWS = [*sweep(), failed_row("bf16", 65536), quality_row()]


@pytest.mark.parametrize(("encoding", "full"), [("utf-8", "█"), ("ascii", "#"), ("latin-1", "#")])
def test_every_speed_row_has_a_bar_as_long_as_its_share_of_the_best(encoding, full):
    *lines, failure = sorted(bars(ROWS, encoding).split("\n"), key=lambda line: "oom" in line)
    assert "x oom: decode: OutOfMemoryError" in failure
    assert len(lines) == len(sweep())
    best = max(row.decode_tok_s for row in sweep())
    for row in sweep():
        (line,) = (line for line in lines if f"{row.decode_tok_s:.2f} tok/s" in line)
        assert line.startswith(f"{row.k_format}, depth {row.depth}, ")
        assert abs(line.count(full) - WIDTH * row.decode_tok_s / best) <= 1
        line.encode(encoding)
    assert len({line.index(" tok/s") for line in lines}) == 1


def test_half_the_speed_is_half_the_bar():
    rows = [row for row in sweep((0, 1024)) if row.k_format == "int8"]
    rows = [
        dataclasses.replace(row, decode_tok_s=rate)
        for row, rate in zip(rows, (100, 50), strict=True)
    ]
    first, second = bars(rows).split("\n")
    assert (first.count("█"), second.count("█")) == (WIDTH, WIDTH // 2)


@pytest.mark.parametrize("rows", [[], [quality_row()]])
def test_where_nothing_was_timed_nothing_is_said(rows):
    assert bars(rows) == ""
