"""A command line names rows of a file by line or by column, and hears what is wrong with it."""

import dataclasses

import pytest
from result_rows import speed_row, written
from sweep_rows import failed_row
from sweep_rows import speed_row as sweep_row
from test_reporting_origin import CLEAN
from test_results import ROW

from config import UserError
from reporting.select import newest, select, select_newest

ROWS = [
    speed_row(100, depth=0, run="a,b"),
    speed_row(90, depth=4096, flags=("noisy", "busy")),
    speed_row(80, depth=4096, k_format="bf16"),
]


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "rows.txt", ROWS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ROWS),
        (":2", ROWS[1:2]),
        (":depth=4096", ROWS[1:]),
        (":depth=4096,k_format=bf16", ROWS[2:]),
        (":decode_tok_s=90.00", ROWS[1:2]),
        (":flags=noisy;busy", ROWS[1:2]),
        (":flags=,depth=4096", ROWS[2:]),
        (":flags=busy", ROWS[1:2]),
        (":depth=0,k_format=bf16,depth=4096", ROWS[2:]),
        (":run=a%2Cb", ROWS[:1]),
    ],
)
def test_rows_are_taken_by_line_and_by_column(text, wanted, path):
    assert select(f"{path}{text}") == wanted


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (":9", ":9: no such line"),
        (":0", ":0: no such line"),
        (":depth=7", ":depth=7: no such rows"),
        (":deep=7", "deep=7: not column=value"),
        (":depth", "depth: not column=value"),
        ("x", "x: No such file or directory"),
        ("x:1", "x:1: no such line"),
    ],
)
def test_what_is_not_there_is_named(text, cause, path):
    with pytest.raises(UserError) as error:
        select(f"{path}{text}")
    assert str(error.value).endswith(cause)


def test_a_line_that_is_no_row_is_named(path):
    path.write_text(f"heading\n{path.read_text()}")
    with pytest.raises(UserError, match=r"rows.txt:1: repro: missing"):
        select(f"{path}:1")


def test_a_file_with_a_colon_in_its_name_is_a_file(tmp_path):
    assert select(str(written(tmp_path / "a:1", ROWS))) == ROWS


def test_rows_of_torchao_come_behind_ours(path):
    path.write_text(f"{CLEAN}\n{path.read_text()}")
    assert [row.flags for row in select(str(path))][-1] == ("origin",)
    assert select(str(path))[:-1] == ROWS


def test_further_conditions_must_hold_too(path):
    assert select(str(path), "depth=4096") == ROWS[1:]
    assert select(f"{path}:depth=4096", "k_format=bf16") == ROWS[2:]
    with pytest.raises(UserError, match=":depth=0: no such rows with k_format=bf16"):
        select(f"{path}:depth=0", "k_format=bf16")


def test_a_file_without_rows_has_none_to_show(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert select(str(empty)) == []
    with pytest.raises(UserError, match="empty.txt: no rows"):
        select_newest(str(empty), "", keep_all=True)


def test_the_newest_of_each_setting_on_each_machine_counts():
    again = dataclasses.replace(ROW, time="2026-12-01T00:00:00Z", commit="other")
    elsewhere = dataclasses.replace(ROW, device_name="NVIDIA A100")
    published = dataclasses.replace(ROW, flags=("origin",))
    rows = [ROW, elsewhere, published, published, again]
    assert newest(rows) == [again, elsewhere, published]
    assert newest([ROW, dataclasses.replace(ROW, model="b")])[1].model == "b"


def test_a_failure_stays_until_the_same_command_goes_well_on_that_machine():
    failed, well = failed_row(), sweep_row("bf16", 1 << 20)
    assert failed.key == well.key
    early = dataclasses.replace(failed, new_tokens=None)
    assert newest([early]) == [early]
    assert newest([early, well]) == [well]
    assert newest([well, early]) == [well, early]
    assert newest([failed, well]) == [well]
    elsewhere = dataclasses.replace(well, threads=2)
    assert newest([early, elsewhere]) == [early, elsewhere]
