"""What is drawn is what the rows say, with axes, units and the machine's name."""

import csv
import dataclasses
import io
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from result_rows import written
from sweep_rows import failed_row, quality_row, speed_row, sweep

import results
from command import run_one_of
from reporting.canvas import COLOURS, count_text, csv_text, styles, svg_text
from reporting.commands import COMMANDS
from reporting.plot_memory import beats, capacity_gb, fits_slots
from reporting.plot_speed import crossovers, fit_of
from reporting.plots import PLOTS
from reporting.select import newest
from reporting.series import by_series
from results import read_rows

ROOT = Path(results.__file__).parent
COMMITTED = newest(read_rows(ROOT / "benchmark_results.txt"))
SYNTHETIC = speed_row("int8", 262144, depth_fill="synthetic")
WEIGHTS = [
    quality_row("bf16", reference="weights", weight_format=name, kl_mean=kl, model_size_gb=size)
    for name, kl, size in (("int8", 8e-4, 8.2), ("int4-g32", 3e-2, 5.0))
]
MADE = [
    *sweep(),
    SYNTHETIC,
    failed_row(),
    *(quality_row(kv, context) for kv in ("bf16", "int8") for context in (512, 2048)),
    *WEIGHTS,
]
CASES = [
    pytest.param(name, rows, id=f"{name}-{origin}")
    for origin, rows in (("made", MADE), ("committed", COMMITTED))
    for name, plot in PLOTS.items()
    if plot.rows(rows)
]


def drawn(name, rows):
    """The rows that a plot takes, their points, and the figure."""
    own = PLOTS[name].rows(rows)
    points = PLOTS[name].points(own)
    return own, points, PLOTS[name].draw(own, points)


def texts(svg: str) -> str:
    """All text of a picture, lines joined, as a reader sees it."""
    return " ".join(
        node.text or "" for node in ET.fromstring(svg).iter() if node.tag.endswith("text")
    )


def test_every_plot_is_tried():
    assert {case.values[0] for case in CASES} == set(PLOTS)


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_no_chart_is_without_axes_units_and_the_name_of_the_machine(name, rows):
    own, points, figure = drawn(name, rows)
    labels = [text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert any(axes.get_xlabel() for axes in figure.axes)
    for text in filter(None, labels):
        assert "[" in text or text.startswith("ratio"), text
    shown = texts(svg_text(figure, name))
    for row in own:
        assert row.device_name in shown
        assert row.commit in shown
        assert row.torch in shown
        assert row.time[:10] in shown
    assert f"{len(own)} rows" in shown


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_the_csv_is_equal_to_the_rows_and_its_numbers_are_in_the_picture(name, rows):
    own, points, figure = drawn(name, rows)
    lines = list(csv.DictReader(io.StringIO(csv_text(points), newline="")))
    assert len(lines) == len(own)
    by_key = {(row.key, row.status): row for row in own}
    for line in lines:
        row = by_key[line["key"], line["status"]]
        for column in set(line) & set(results.COLUMNS):
            value = getattr(row, column)
            assert line[column] == ("" if value is None else str(value))
    places = {
        tuple(map(float, pair))
        for axes in figure.axes
        for curve in axes.lines
        for pair in zip(curve.get_xdata(), curve.get_ydata(), strict=True)
    }
    y = PLOTS[name].needs[0] if name not in ("step", "memory") else {"step": "tpot_ms"}.get(name)
    for p in points:
        if p["status"] == "ok" and y:
            assert any(pair[1] == p[y] for pair in places)


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_every_series_is_in_the_legend(name, rows):
    _, points, figure = drawn(name, rows)
    (legend,) = figure.legends
    words = " | ".join(" ".join(text.get_text().split()) for text in legend.get_texts())
    for series, own in by_series(points).items():
        if any(p["status"] == "ok" for p in own):
            assert series in words


def test_the_decode_plot_holds_range_roofline_and_ratio():
    rows = sweep((1024,))
    plain, int8 = PLOTS["decode"].points(rows)
    assert (plain["series"], int8["series"]) == ("bf16", "int8")
    row = rows[1]
    assert int8["mean_filled"] == 1024 + 512 + 63
    assert int8["slowest_tok_s"] == 127 / max(row.decode_samples_s)
    assert int8["fastest_tok_s"] == 127 / min(row.decode_samples_s)
    assert int8["roofline_tok_s"] == pytest.approx(row.decode_tok_s / 0.772)
    assert int8["ratio_to_bf16"] == row.decode_tok_s / rows[0].decode_tok_s
    assert int8["ratio_ci_pct"] == pytest.approx(0.04 * 2**0.5)
    assert plain["ratio_to_bf16"] is None


def test_a_ratio_needs_a_row_that_differs_in_the_cache_alone():
    others = [{"dtype": "float32"}, {"device_name": "other"}, {"depth": 5}, {"status": "error"}]
    for change in others:
        rows = [dataclasses.replace(speed_row("bf16"), **change), speed_row("int8")]
        assert [p["ratio_to_bf16"] for p in PLOTS["decode"].points(rows)] == [None, None]


@pytest.mark.parametrize(
    ("y", "errors", "wanted"),
    [
        ([0.9, 1.1], [0.01, 0.01], [2.0]),
        ([1.1, 0.9], [0.01, 0.01], [2.0]),
        ([0.9, 0.95], [0.01, 0.01], []),
        ([0.99, 1.1], [0.02, 0.01], []),  # the first may be 1 as well
        ([0.9, 1.0, 1.1], [0.0, 0.01, 0.0], [2.0]),
        ([], [], []),
    ],
)
def test_a_crossover_is_told_between_ends_that_are_clear_of_1(y, errors, wanted):
    x = [1.0, 4.0] if len(y) < 3 else [1.0, 2.0, 4.0]
    assert crossovers(x[: len(y)], y, errors) == pytest.approx(wanted)


def test_the_time_per_token_is_fitted_by_a_line():
    rows = []
    for depth in (0, 1000, 5000):
        filled = depth + 512 + 63
        rows.append(speed_row(depth=depth, decode_tok_s=1000 / (4 + 0.002 * filled)))
    points = PLOTS["step"].points(rows)
    fit = fit_of(points)
    assert (fit.intercept, fit.slope) == pytest.approx((4, 0.002), rel=1e-3)
    for p in points:
        assert p["fit_ms"] == pytest.approx(p["tpot_ms"], rel=1e-3)
    assert [p["fit_ms"] for p in PLOTS["step"].points(rows[:1])] == [None]


def test_a_failure_is_a_cross_with_its_reason_and_a_synthetic_depth_is_hollow():
    _, points, figure = drawn("decode", MADE)
    axes = figure.axes[0]
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert list(cross.get_xdata()) == [(1 << 20) + 512 + 63]
    shown = texts(svg_text(figure, "decode"))
    assert "oom" in shown
    assert "x bf16: oom: decode: OutOfMemoryError: CUDA out of memory" in shown
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [tuple(line.get_xdata()) for line in hollow] == [(262144 + 512 + 63,)]


def test_the_bars_of_memory_are_the_expected_parts():
    rows = sweep((0, 16384))
    _, points, figure = drawn("memory", rows)
    tops = {}
    for bar in figure.axes[0].patches:
        place = round(bar.get_x() + bar.get_width() / 2, 6)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    wanted = sorted(row.expected_gb for row in rows)
    assert sorted(tops.values()) == pytest.approx(wanted)
    peaks = next(line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert sorted(peaks.get_ydata()) == sorted(row.peak_mem_gb for row in rows)


def test_what_fits_the_capacity_is_counted_from_the_rest():
    row = speed_row("int8", 16384, device_name="NVIDIA H100 80GB HBM3")
    assert capacity_gb(row) == pytest.approx(85.52, abs=0.01)
    per_slot_gb = row.kv_cache_gb / row.cache_len
    used = row.expected_gb - row.kv_cache_gb + fits_slots(row) * per_slot_gb
    assert 0 <= capacity_gb(row) - used < per_slot_gb
    assert fits_slots(dataclasses.replace(row, device_name="some CPU")) is None


def test_the_frontier_is_what_nothing_of_the_same_workload_beats():
    rows = [speed_row(decode_tok_s=y, peak_mem_gb=x, commit=str(i)) for i, (x, y) in enumerate(
        [(1, 10), (2, 20), (2, 15), (3, 20), (4, 30), (5, 1)]
    )]  # fmt: skip
    points = PLOTS["pareto"].points(rows)
    assert [p["is_on_frontier"] for p in points] == [True, True, False, False, True, False]
    assert not beats(failed_row(), rows[0])
    elsewhere = speed_row("int8", 1024, decode_tok_s=5, peak_mem_gb=9)
    assert [p["is_on_frontier"] for p in PLOTS["pareto"].points([*rows, elsewhere])].count(
        True
    ) == 4


def test_lines_are_told_apart_by_colour_and_mark_and_more_of_them_by_dashes():
    points = [{"series": str(i)} for i in range(3 * len(COLOURS))]
    looks = list(styles(points).values())
    assert len({tuple(look.values()) for look in looks}) == len(looks)
    assert len({look["marker"] for look in looks[: len(COLOURS)]}) == len(COLOURS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(512, "512"), (1024, "1k"), (1664, "1.625k"), (65536, "64k"), (1 << 20, "1M"), (8, "8")],
)
def test_numbers_of_tokens_are_short(value, text):
    assert count_text(value) == text


def test_names_out_of_a_file_cannot_break_a_picture():
    names = ["$a$", "<b>&", "c\x1b[31m", "\u2028", 'id="x']
    rows = [speed_row(model=name, device_name=name) for name in names]
    for name in ("decode", "memory", "pareto"):
        _, _, figure = drawn(name, rows)
        shown = texts(svg_text(figure, name))
        assert "$a$" in shown
        assert "<b>&" in shown
        assert r"\x1b[31m" in shown


def test_a_picture_is_the_same_every_time_and_shares_no_id_with_another():
    pictures = [svg_text(drawn(name, MADE)[2], name) for name in ("decode", "step", "decode")]
    assert pictures[0] == pictures[2]
    ids = [{node.get("id") for node in ET.fromstring(svg).iter()} - {None} for svg in pictures]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_the_command_writes_three_files_per_plot(tmp_path, capsys):
    path = written(tmp_path / "rows.txt", MADE)
    command = ["plot", "all", str(path), "--out", str(tmp_path / "a" / "b")]
    assert run_one_of(COMMANDS, command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    files = [Path(line) for line in out.splitlines()]
    assert [file.name for file in files] == [
        f"{name}.{kind}" for name in PLOTS for kind in ("png", "svg", "csv")
    ]
    for file in files:
        data = file.read_bytes()
        if file.suffix == ".png":
            assert int.from_bytes(data[16:20], "big") == 1280
        if file.suffix == ".svg":
            ET.fromstring(data)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mbu", "FILE"], "name mbu: must be one of all, decode, step,"),
        (["quality", "FILE"], "no row to draw: none that went well has kl_mean, context"),
        (["all", "FILE", "--where", "status=oom"], "no row to draw: none that went well has what"),
        (["decode", "FILE:depth=7"], "depth=7: no such rows"),
        (["decode", "FILE", "--out", "FILE"], "cannot be written: "),
    ],
)
def test_what_cannot_be_drawn_is_told_in_a_line(words, message, tmp_path, capsys):
    path = str(written(tmp_path / "rows.txt", [*sweep((0,)), failed_row()]))
    assert run_one_of(COMMANDS, ["plot", *(word.replace("FILE", path) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_only_drawing_imports_matplotlib_and_nothing_imports_torch():
    program = (
        "import sys, reporting.commands; print({'matplotlib', 'torch', 'jinja2'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    program = (
        "import sys, reporting.commands as c, command\n"
        "code = command.run_one_of(c.COMMANDS)\n"
        "print(code, 'torch' in sys.modules)"
    )
    words = ["report", "benchmark_results.txt", "--out", "/dev/null"]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "/dev/null\n0 False\n"


def test_without_matplotlib_the_cure_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = str(written(tmp_path / "rows.txt", sweep((0,))))
    assert run_one_of(COMMANDS, ["plot", "decode", path, "--out", str(tmp_path / "out")]) == 2
    assert "pip install -r requirements.txt" in capsys.readouterr().err
