"""A table shows what differs, says once what does not, and is the README's."""

import dataclasses
from pathlib import Path

import pytest
from sweep_rows import failed_row, quality_row, speed_row, sweep

from command import run_one_of
from reporting.commands import COMMANDS
from reporting.select import cells, newest
from reporting.table import DEFAULT, make_table, markdown
from results import COLUMNS, SYSTEM, append, read_rows
from scripts import readme

ROOT = Path(readme.__file__).parent.parent
RESULTS = ROOT / "benchmark_results.txt"
MIXED = [*sweep(), failed_row(), quality_row(), quality_row("bf16")]


def parsed(text: str) -> tuple[list[dict[str, str]], str]:
    """A Markdown table as a dictionary per line, and what stands below it."""
    block, _, rest = text.partition("\n\n")
    head, rule, *body = (
        [cell.strip() for cell in line[2:-2].split(" | ")] for line in block.split("\n")
    )
    assert set("".join(rule)) <= set("-:")
    return [dict(zip(head, line, strict=True)) for line in body], rest


@pytest.mark.parametrize("rows", [newest(read_rows(RESULTS)), MIXED, [speed_row()]])
def test_every_column_that_differs_is_shown_and_every_other_is_told_once(rows):
    lines, below = parsed(markdown(make_table(rows)))
    assert len(lines) == len(rows)
    for column in DEFAULT.values():
        texts = {column.text(row) or "" for row in rows}
        if texts == {""}:
            assert column.heading not in lines[0]
        elif len(texts) == 1 and column.role != "figure":
            assert f"{column.heading} {texts.pop()}" in below
        else:
            assert {line[column.heading] for line in lines} == texts


def test_the_figures_are_those_of_the_rows():
    row = speed_row("int8", 1024, decode_tok_s=217.126, decode_ci_pct=0.44, kv_cache_gb=0.0563)
    (line,), below = parsed(markdown(make_table([row])))
    assert line["decode tok/s, ± 95 %"] == "217.13 ± 0.4 %"
    assert line["KV cache MB"] == "56.3"
    assert "depth 1024; prompt_len 512; weights none, 16061 MB; K, V int8; " in below
    row = speed_row(depth_fill="synthetic", v_format="bf16", decode_ci_pct=None)
    (line,), below = parsed(markdown(make_table([row])))
    assert line["decode tok/s, ± 95 %"] == f"{row.decode_tok_s:.2f}"
    assert "depth 4096 synthetic; " in below
    assert "K, V int8,bf16; " in below


def test_rows_are_sorted_by_their_settings_as_numbers():
    rows = [speed_row(kv, depth) for depth in (16384, 0, 4096, 1024) for kv in ("int8", "bf16")]
    lines, _ = parsed(markdown(make_table(rows)))
    found = [(int(line["depth"]), line["K, V"]) for line in lines]
    assert found == sorted(found)


def test_columns_that_were_asked_for_are_shown_in_that_order(tmp_path, capsys):
    path = tmp_path / "rows.txt"
    for row in sweep():
        append(path, row)
    command = ["table", str(path), "--columns", "peak,kv,ttft_samples_s", "--where", "depth=0"]
    assert run_one_of(COMMANDS, command) == 0
    lines, below = parsed(capsys.readouterr().out)
    assert [list(line) for line in lines] == [["peak GB", "K, V", "ttft_samples_s"]] * 2
    assert lines[0]["ttft_samples_s"] == "0.029800;0.029900;0.030000;0.030100;0.030200"
    assert "device_name NVIDIA H200" in below
    assert run_one_of(COMMANDS, ["table", str(path), "--columns", "speed"]) == 2
    assert "--columns speed: no field of a row, nor one of kind, " in capsys.readouterr().err


@pytest.mark.parametrize("name", COLUMNS)
def test_every_field_of_a_row_can_be_a_column(name):
    lines, _ = parsed(markdown(make_table(sweep((0,)), name)))
    assert [list(line) for line in lines] == [
        [DEFAULT[name].heading if name in DEFAULT else name]
    ] * 2


def test_only_the_newest_row_of_a_setting_is_shown_unless_all_are_wanted(tmp_path, capsys):
    path = tmp_path / "rows.txt"
    for row in (speed_row(commit="old"), speed_row(commit="new")):
        append(path, row)
    for flags, commits in (([], None), (["--all"], ["old", "new"])):
        assert run_one_of(COMMANDS, ["table", str(path), *flags]) == 0
        lines, below = parsed(capsys.readouterr().out)
        assert ([line.get("commit") for line in lines] == commits) == bool(flags)
        assert ("commit new" in below) != bool(flags)


def test_text_of_a_row_cannot_break_the_table():
    rows = [dataclasses.replace(speed_row(), model=text) for text in ("a|b", "a\nb", "50%\x1b[31m")]
    lines = markdown(make_table(rows)).partition("\n\n")[0].split("\n")
    assert len(lines) == 5
    assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")}
    assert r"50%\x1b[31m" in "".join(lines)


def test_the_readme_shows_what_the_command_prints(capsys):
    measured = [row for row in read_rows(RESULTS) if (row.kind, row.status) == ("speed", "ok")]
    machine = [f"{name}={cells(measured[-1])[name]}" for name in SYSTEM]
    where = ",".join(["kind=speed", "status=ok", *machine])
    assert run_one_of(COMMANDS, ["table", str(RESULTS), "--where", where]) == 0
    printed = capsys.readouterr().out
    assert printed == readme.table() + "\n"
    assert printed in (ROOT / "README.md").read_text()
