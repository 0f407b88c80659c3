"""How long a case will take, told by rows of cases like it."""

import dataclasses

import pytest

from results import Row
from scripts.sweep_time import START_S, Work, from_rows, rows_alike

WORK = Work(
    fill=4000,
    prompt_len=100,
    depth=4000,
    new_tokens=102,
    num_samples=5,
    load_gb=0.0,
    compiles=True,
)
ALIKE = {
    "kind": "speed",
    "model": "a",
    "k_format": "int8",
    "v_format": "int8",
    "weight_format": "bf16",
    "dtype": "bfloat16",
    "compile": True,
    "device_name": "b",
    "torch": "2.11.0",
    "threads": 2,
}


def row(depth: int, step_s: float, **changes) -> Row:
    figures = {
        "depth": depth,
        "prompt_len": 100,
        "new_tokens": 102,
        "decode_tok_s": 1 / step_s,
        "prefill_tok_s": 1000.0,
        "compile_s": 9.0,
    }
    values = {"time": "t", "status": "ok", "repro": "r"} | ALIKE | figures | changes
    return Row(**values)


def test_a_step_takes_what_a_line_over_the_stored_tokens_says():
    # A step of 10 ms and 1 ms for every 1000 stored tokens: 4150 of them here.
    rows = [row(depth, 0.010 + 1e-6 * (depth + 150)) for depth in (0, 1000, 2000)]
    steps = 5 * 102 + 2 * 32
    prefilled = 4000 + 7 * 100
    expected = START_S + 9.0 + prefilled / 1000 + steps * (0.010 + 1e-6 * 4150)
    assert from_rows(WORK, rows) == pytest.approx(expected, rel=0.01)


def test_one_depth_says_nothing_about_a_much_deeper_one():
    assert from_rows(WORK, [row(0, 0.01)]) is None
    near = dataclasses.replace(WORK, depth=0, fill=0)
    assert from_rows(near, [row(0, 0.01)]) == pytest.approx(START_S + 9 + 0.7 + 574 * 0.01)


def test_rows_without_decode_steps_or_no_rows_tell_nothing():
    assert from_rows(WORK, []) is None
    assert from_rows(WORK, [row(0, 1.0, decode_tok_s=None)]) is None


@pytest.mark.parametrize("name", [*ALIKE, "status"])
def test_rows_of_anything_else_do_not_count(name):
    columns = dict(ALIKE)
    assert len(rows_alike([row(0, 0.01)], columns)) == 1
    changed = not ALIKE.get(name) if name == "compile" else 3 if name == "threads" else "error"
    assert rows_alike([row(0, 0.01, **{name: changed})], columns) == []
