"""compare says what is equal once, what differs in a line each, and ends with the right code."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from result_rows import in_blocks, in_turns, speed_row, written
from test_reporting_origin import GLUED

import results
from command import run_one_of
from reporting.commands import COMMANDS

ROOT = Path(results.__file__).parent
BF16 = {"k_format": "bf16", "v_format": "bf16"}


@pytest.fixture
def compare(tmp_path, capsys):
    """Runs compare on rows of two files and gives code, stdout, stderr."""

    def run(rows, others=None, *flags):
        words = [str(written(tmp_path / "a.txt", rows))]
        if others is not None:
            words.append(str(written(tmp_path / "b.txt", others)))
        code = run_one_of(COMMANDS, ["compare", *words, *flags])
        return code, *capsys.readouterr()

    return run


def test_cache_formats_of_one_file_are_set_side_by_side(compare):
    rows = [
        speed_row(rate, depth=depth, kv_cache_gb=size, **cache)
        for depth in (0, 4096)
        for rate, size, cache in ((50, 0.6, BF16), (100, 0.3, {}))
    ]
    code, out, err = compare(rows, None, "--vary", "kv")
    assert (code, err) == (0, "")
    assert "model=Meta-Llama-3.1-8B" in out
    assert "A: k_format=bf16, v_format=bf16" in out
    assert "| depth | figure | A | B | B / A | n | verdict |" in out
    assert (
        "| 4096 | decode_tok_s, tok/s | 50.00 | 100.00 | 2.000x | 1"
        " | FASTER? (too few processes) |" in out
    )
    assert "| 0 | kv_cache_gb, GB | 0.6000 | 0.3000 | 0.500x | 1 | SMALLER |" in out
    assert "geometric mean of 2: 2.000x" in out


@pytest.mark.parametrize(
    ("ratio", "flags", "code"),
    [
        (0.95, (), 0),
        (0.95, ("--gate",), 1),
        (1.05, ("--gate",), 0),
        (1.0, ("--gate", "--strict"), 0),
        (0.95, ("--gate", "--min_effect", "10"), 0),
    ],
)
def test_a_gate_is_closed_by_what_got_worse(ratio, flags, code, compare):
    found, out, err = compare(in_turns(10, ratio, noise=0.004), None, *flags)
    assert (found, err) == (code, "")
    assert "A: the same settings" in out


def test_a_strict_gate_is_closed_by_what_is_unclear(compare):
    rows = in_turns(10, 1.0, noise=0.1)
    assert compare(rows, None, "--gate")[0] == 0
    assert compare(rows, None, "--gate", "--strict")[0] == 1


def test_one_document_holds_the_same(compare):
    code, out, err = compare(in_turns(10, 0.9, noise=0.004), None, "--json")
    (comparison,) = json.loads(out)["comparisons"]
    (decode,) = [f for f in comparison["figures"] if f["metric"] == "decode_tok_s"]
    assert (code, err, decode["verdict"], decode["n"]) == (0, "", "SLOWER", 10)
    assert decode["interval"][0] < decode["ratio"] < decode["interval"][1] < 1
    assert len(comparison["rows"]["a"]) == 10


def test_a_row_without_partner_is_refused_by_name_beside_the_others(compare):
    a, b = in_blocks(6, 1.0)
    code, out, _ = compare(a, [*b, speed_row(depth=1)])
    assert code == 0
    assert "REFUSED: Meta-Llama-3.1-8B, none weights, int8 cache, depth 1: depth 4096 and 1" in out
    assert "not in turns" in out


@pytest.mark.parametrize(
    ("rows", "others", "flags", "cause"),
    [
        ([speed_row()], [speed_row(depth=1)], (), "depth 4096 and 1"),
        ([speed_row()], [speed_row(threads=1)], (), "threads 16 and 1"),
        ([speed_row()], None, ("--vary", "kv"), "no rows that differ in kv alone"),
        ([speed_row()], None, (), "no run with two arms; give a second file, or --vary kv"),
        ([speed_row(status="oom")], [speed_row()], (), "there is no row to compare it with"),
        ([speed_row()], [speed_row(status="oom")], (), "no rows that count in one of them"),
        ([speed_row()], None, ("--vary", "nope"), "--vary nope: no column"),
        ([speed_row()], None, ("--metric", "speed"), "--metric speed: unknown; known: decode"),
        ([speed_row()], None, ("--base", "bf16"), "--base bf16: needs --vary and one file"),
        ([speed_row()], None, ("--strict",), "--strict: has no effect without --gate"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(rows, others, flags, cause, compare):
    code, out, err = compare(rows, others, *flags)
    assert (code, out) == (2, "")
    assert cause in err
    assert err.count("\n") == 1


def test_rows_of_other_machines_give_ratios_without_a_word(compare):
    other = [speed_row(300, device_name="NVIDIA H200")]
    code, out, _ = compare([speed_row()], other, "--across_systems", "--gate")
    assert code == 0
    assert "| 3.000x | 1 | (different machines) |" in out


def test_rows_of_torchao_stand_beside_ours_without_a_word(tmp_path, capsys):
    theirs = tmp_path / "origin.txt"
    theirs.write_text(GLUED)
    ours = written(tmp_path / "ours.txt", [speed_row(peak_mem_gb=8.76)])
    assert run_one_of(COMMANDS, ["compare", str(theirs), str(ours)]) == 0
    out = capsys.readouterr().out
    assert "| 17.5200 | 8.7600 | 0.500x | 1 | (system and prompt unknown) |" in out
    total_s = 0.036195 + 127 / 100
    assert f"| 13.52 | {128 / total_s:.2f} |" in out


def test_words_are_explained_on_request(compare):
    assert "Welch's interval" in compare(in_turns(6, 1.0), None, "--explain")[1]


def test_a_row_that_failed_its_check_is_never_compared(compare):
    bad = dataclasses.replace(speed_row(500), flags=("check_failed",))
    assert compare([speed_row()], [bad])[0] == 2


def test_compare_runs_as_a_program_and_imports_no_torch(tmp_path):
    path = written(tmp_path / "rows.txt", in_turns(6, 0.9))
    program = (
        "import sys, command, reporting.commands as r; code = command.run_one_of(r.COMMANDS);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    for words in (["-c", program], ["results.py"]):
        command = [sys.executable, *words, "compare", f"{path}:run=r"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "SLOWER" in done.stdout
