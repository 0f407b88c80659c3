"""sweep.py and benchmarks.sh as commands: their words, signals, kills, and all of it for real."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import UserError, parse
from results import read_rows
from scripts import sweep
from scripts.sweep_config import AbConfig, RunConfig, with_environment

ROOT = Path(sweep.__file__).parent.parent
PROGRAM = ROOT / "tests" / "sweep_program.py"
BENCHMARKS = ROOT / "benchmarks.sh"
TINY = ["--device", "cpu", "--checkpoint_path", "random:tiny"]
EAGER = ["--no-compile", "--threads", "1"]


def finished(command, **variables) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_sections_come_first_and_flags_of_every_case_last():
    head, extra = sweep.split(["run", "kv", "long", "--rounds", "2", "--", "--threads", "1"])
    assert sweep.joined(head[1:]) == ["kv,long", "--rounds", "2"]
    assert extra == ["--threads", "1"]
    assert sweep.split(["ab", "--", "--", "-x"]) == [["ab"], [], ["-x"]]
    assert parse(RunConfig, sweep.joined(["--dry_run"])).names == ("kv",)
    assert parse(RunConfig, sweep.joined(["kv,long", "kv"])).names == ("kv", "long")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("run speed", "speed: no such section; known: quick, kv,"),
        ("run --rerun --only_failed", "--rerun and --only_failed: exclude each other"),
        ("run kv -- --threads 1 -- --seed 1", 'run: one "--" alone'),
        ("run --rounds 0", "--rounds 0: must be at least 1"),
        ("run --resume ../x", "--resume ../x: is no name of a run"),
        ("run --dry_run long kv", "unknown flag"),
        ("ab --pairs 2", "ab: give the flags of two commands"),
        ("ab --resume .hidden -- --", "--resume .hidden: is no name of a run"),
        ("speed", "speed: no such command; known: run, ab"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(words, cause):
    done = finished([sys.executable, "scripts/sweep.py", *words.split()])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert cause in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_environment_stands_for_flags_that_are_not_given():
    said = {"CHECKPOINT_PATH": "a", "DEVICE": "cpu", "RESULTS": "b"}
    config = with_environment(parse(RunConfig, ["--results", "c"]), said)
    assert (config.checkpoint_path, config.device, str(config.path)) == ("a", "cpu", "c")
    assert str(with_environment(parse(AbConfig, []), said).path) == "b"
    none = with_environment(parse(RunConfig, []), {"DEVICE": ""})
    assert (none.device, str(none.path)) == (None, "benchmark_results.txt")


def test_the_shell_command_hands_over_every_word_and_its_exit_code(tmp_path):
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\nexit 7\n')
    shown.chmod(0o755)
    words = ["kv", "--results", "a file", "--", "--prompt", ""]
    done = finished(["sh", BENCHMARKS, *words], PYTHON=str(shown))
    assert done.returncode == 7
    assert done.stdout.split("\n")[:-1] == [str(ROOT), "scripts/sweep.py", "run", *words]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_case_and_tells_what_it_did_and_how_to_go_on(number, code, tmp_path):
    command = [sys.executable, str(PROGRAM), "run", str(tmp_path), "ok,interrupted,ok", "run"]
    if number != signal.SIGINT:  # of which the case sends one itself
        command[4] = "ok,hang,ok"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if number != signal.SIGINT:
        log = "runs/*/002.log"
        while not any(path.stat().st_size for path in tmp_path.glob(log)):
            time.sleep(0.01)
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "\033" not in err
    assert ("sample 2: 30 tokens" if number == signal.SIGINT else "begun") in err
    [hint] = [line for line in err.splitlines() if line.startswith("to go on: ")]
    assert err.endswith(f"interrupted: {number.name}\n")
    assert [row.depth for row in read_rows(tmp_path / "rows.txt")] == [0]
    words = shlex.split(hint.removeprefix("to go on: "))[2:]
    again = finished([sys.executable, PROGRAM, "run", tmp_path, "crash,ok,ok", *words])
    assert again.returncode == 0, again.stderr
    assert [row.depth for row in read_rows(tmp_path / "rows.txt")] == [0, 1, 2]
    assert len({row.run for row in read_rows(tmp_path / "rows.txt")}) == 1


def test_a_sweep_tells_each_case_on_a_line_and_counts_them_at_the_end(tmp_path):
    done = finished([sys.executable, PROGRAM, "run", tmp_path, "ok,crash,ok", "run"])
    assert (done.returncode, done.stdout) == (1, "")
    head, *lines, last = done.stderr.splitlines()
    assert head == "3 cases, 3 to run: ~3 s"
    assert lines[0].startswith("[1/3] generate.py: ok, 10.00 tok/s, ")
    assert lines[1].startswith("[2/3] generate.py --depth 1: error, ended by SIGSEGV: so far, ")
    assert [line.split("  ")[-1].strip() for line in lines[3:]] == [
        "10.00 tok/s", "x error: ended by SIGSEGV: so far", "10.00 tok/s"
    ]  # fmt: skip
    assert last == f"2 ok, 1 error; rows in {tmp_path / 'rows.txt'}"


@pytest.mark.skipif(sys.platform != "linux", reason="script(1) has other flags elsewhere")
def test_a_terminal_sees_a_bar_with_the_failures_above_it(tmp_path):
    inner = [sys.executable, str(PROGRAM), "run", str(tmp_path), "ok,crash,ok", "run"]
    wide = f"stty rows 40 cols 140; {shlex.join(inner)}"
    done = finished(["script", "-qec", wide, "/dev/null"])
    assert done.returncode == 1
    assert "kv: 100%" in done.stdout
    assert "3/3" in done.stdout
    assert "failed=1" in done.stdout
    assert "\n[2/3] generate.py --depth 1: error, ended by SIGSEGV: so far" in done.stdout
    assert "[1/3]" not in done.stdout


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_sweeps_killed_at_any_moment_lose_no_row_and_measure_each_case_once(count, tmp_path):
    done = finished([sys.executable, PROGRAM, "kill", tmp_path, count])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= count


def test_a_dry_run_of_real_cases_reads_headers_and_writes_nothing(tmp_path):
    path = tmp_path / "rows.txt"
    words = ["quick", "--results", path, *TINY, "--dry_run", "--", *EAGER]
    done = finished(["sh", BENCHMARKS, *words])
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split()[0] == "#"
    assert len(lines) == 4
    assert all("--no-compile" in line and line.endswith("  [run]") for line in lines)
    assert not path.exists()


def test_a_checkpoint_that_is_not_there_starts_nothing(tmp_path):
    words = ["quick", "--results", tmp_path / "rows.txt", "--checkpoint_path", tmp_path / "none"]
    done = finished(["sh", BENCHMARKS, *words])
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/none: no such file or folder; check the path\n"


@pytest.mark.slow
def test_a_section_and_pairs_are_measured_for_real_on_a_tiny_model(tmp_path):
    path = tmp_path / "rows.txt"
    words = ["quick", "--results", path, *TINY, "--", *EAGER]
    for _ in range(2):
        done = finished(["sh", BENCHMARKS, *words])
        assert done.returncode == 0, done.stderr
    measured = {(row.depth, row.k_format) for row in read_rows(path)}
    assert measured == {(depth, kv) for depth in (0, 256) for kv in ("bf16", "int8")}
    side = [*TINY, *EAGER, "--max_new_tokens", "4"]
    command = [sys.executable, "scripts/sweep.py", "ab", "--results", path, "--pairs", "2"]
    done = finished([*command, "--", *side, "--", *side, "--kv_cache_quantization"])
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_rows(path) if row.arm]
    assert [(row.round, row.arm) for row in rows] == [(1, "A"), (1, "B"), (2, "B"), (2, "A")]
    assert [row.k_format for row in rows] == ["bf16", "int8", "int8", "bf16"]


@pytest.mark.slow
def test_quick_ends_within_a_minute_with_the_default_checkpoint(tmp_path):
    began = time.monotonic()
    done = finished(["sh", BENCHMARKS, "quick", "--results", tmp_path / "rows.txt"])
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert [row.status for row in read_rows(tmp_path / "rows.txt")] == ["ok"] * 4


def test_a_light_command_does_not_import_torch():
    code = "import sys; from scripts import sweep; sys.exit('torch' in sys.modules)"
    assert finished([sys.executable, "-c", code]).returncode == 0


def test_help_names_sections_and_flags():
    done = finished([sys.executable, "scripts/sweep.py", "run", "--help"])
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("million: ", "--dry_run", "--only_failed"))
    with pytest.raises(UserError, match="no such section"):
        RunConfig(sections="none")
