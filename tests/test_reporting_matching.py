"""Rows are set against rows of equal settings on one machine; the rest is refused by name."""

import dataclasses

import pytest
from result_rows import in_turns, speed_row
from test_reporting_origin import CLEAN, GLUED

from config import UserError
from reporting.matching import by_arm, by_file, by_setting, usable, varied
from reporting.origin import parse_origin
from results import COLUMNS, KEY, KINDS

BF16 = {"k_format": "bf16", "v_format": "bf16"}
OTHER = {str: "other", int: 7, bool: False, float: 0.5}


def other_value(name):
    value = OTHER[KINDS[name]]
    return (value,) if COLUMNS[name].default == () else value


@pytest.mark.parametrize("name", [name for name in KEY if name != "schema"])
def test_rows_that_differ_in_one_setting_are_not_compared_unless_it_is_varied(name):
    a, b = [speed_row()], [dataclasses.replace(speed_row(), **{name: other_value(name)})]
    found, (cause,) = by_file(a, b, (), across=False)
    assert not found
    assert f"{name} {getattr(a[0], name)} and {getattr(b[0], name)}" in cause
    (comparison,), refused = by_file(a, b, (name,), across=False)
    assert not refused
    assert list(comparison.differs) == [name]


@pytest.mark.parametrize("name", ["device_name", "torch", "threads"])
def test_rows_of_other_machines_are_compared_only_where_asked(name):
    a, b = [speed_row()], [dataclasses.replace(speed_row(), **{name: other_value(name)})]
    found, (cause,) = by_file(a, b, (), across=False)
    assert not found
    assert name in cause
    (comparison,), _ = by_file(a, b, (), across=True)
    assert comparison.is_across_systems


@pytest.mark.parametrize("name", ["commit", "attention", "time", "num_samples"])
def test_what_is_no_setting_may_differ(name):
    b = dataclasses.replace(speed_row(), **{name: other_value(name)})
    (comparison,), refused = by_file([speed_row()], [b], (), across=False)
    assert not refused
    assert not comparison.is_across_systems


def test_rows_of_a_file_are_grouped_by_what_is_not_varied():
    rows = [speed_row(depth=depth, **cache) for depth in (0, 4096) for cache in ({}, BF16)]
    found = by_setting(rows, varied("kv"), None, across=False)
    assert [(each.a, each.b) for each in found] == [(rows[:1], rows[1:2]), (rows[2:3], rows[3:])]
    assert set(found[0].differs) == {"k_format", "v_format"}
    from_bf16 = by_setting(rows, varied("kv"), "bf16,bf16", across=False)
    assert [(each.a, each.b) for each in from_bf16] == [
        (rows[1:2], rows[:1]), (rows[3:], rows[2:3])
    ]  # fmt: skip
    assert by_setting(rows, varied("depth"), "0", across=False)[0].b == [rows[2]]


def test_of_each_side_the_newest_commit_counts():
    rows = [speed_row(90, commit="old"), speed_row(commit="new"), speed_row(commit="new", **BF16)]
    (comparison,) = by_setting(rows, varied("kv"), None, across=False)
    assert (comparison.a, comparison.b) == (rows[1:2], rows[2:])
    (comparison,) = by_setting(rows[:2], varied("commit"), None, across=False)
    assert (comparison.a, comparison.b) == (rows[:1], rows[1:2])


def test_arms_of_each_run_are_compared_whatever_they_are():
    rows = in_turns(3, 1.0)
    odd = [dataclasses.replace(row, run="s", depth=7 * (row.arm == "B")) for row in rows]
    alone = [speed_row(run="t", round=1, arm="A"), speed_row(run="u", round=1)]
    first, second = by_arm([*rows, *odd, *alone])
    assert [row.arm for row in (*first.a, *first.b)] == ["A"] * 3 + ["B"] * 3
    assert (first.differs, list(second.differs)) == ({}, ["depth"])


def test_rows_of_torchao_are_matched_by_model_and_formats():
    theirs = [parse_origin(CLEAN), parse_origin(GLUED)]
    ours = [speed_row(model="Meta-Llama-3.1-8B"), speed_row(model="Meta-Llama-3.1-8B", **BF16)]
    (comparison,), refused = by_file(theirs, ours, (), across=False)
    assert (comparison.a, comparison.b) == (theirs[1:], ours[:1])
    assert comparison.has_origin
    assert len(refused) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"status": "oom"},
        *({"flags": flags} for flags in (("check_failed",), ("streamed",), ("noisy", "ragged"))),
    ],
)
def test_rows_that_measured_nothing_that_counts_are_left_out(change):
    good = speed_row(flags=("noisy",))
    assert usable([dataclasses.replace(good, **change), good]) == [good]


def test_a_column_that_does_not_exist_cannot_be_varied():
    assert varied("kv,depth") == ("k_format", "v_format", "depth")
    with pytest.raises(UserError, match="--vary dept: no column; known: kv, schema, kind"):
        varied("depth,dept")
