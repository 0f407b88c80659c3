"""A sweep: what runs, what is done already, what becomes of failures. Cases are shell commands."""

import shlex

import pytest
from sweep_case import COLUMNS, install, planned

from command import run
from config import UserError, parse
from results import RowError, read_rows, scan
from scripts import sweep, sweep_cases, sweep_process, sweep_run
from scripts.sweep_cases import Plan
from scripts.sweep_config import RunConfig
from scripts.sweep_lock import device_lock


@pytest.fixture
def results(tmp_path):
    return tmp_path / "rows.txt"


@pytest.fixture
def run_sweep(tmp_path, results, monkeypatch):
    """Runs a sweep of cases with these behaviours; gives its exit code."""

    def start(behaviours, *flags, **changes) -> int:
        cases = [(name, planned(depth, **changes)) for depth, name in enumerate(behaviours)]
        install(monkeypatch, tmp_path, cases)
        words = ["kv", "--results", str(results), *map(str, flags)]
        return sweep_run.run_sweep(parse(RunConfig, words))

    return start


def outcomes(results) -> list[tuple]:
    """Depth and status of every row, in the order of the file; all are whole."""
    rows = list(scan(results))
    assert not [row for row in rows if isinstance(row, RowError)]
    return [(row.depth, row.status) for row in rows]


def test_each_case_leaves_one_row_that_says_where_it_belongs(run_sweep, results, tmp_path):
    assert run_sweep(["ok", "ok"]) == 0
    assert outcomes(results) == [(0, "ok"), (1, "ok")]
    [folder] = (tmp_path / "runs").iterdir()
    for row in read_rows(results):
        assert (row.section, row.run, row.round, row.arm) == ("kv", folder.name, 1, None)
        assert row.decode_tok_s == 10
    assert {path.name for path in folder.glob("*.log")} == {"001.log", "002.log"}


def test_a_sweep_begun_again_runs_only_what_has_no_row(run_sweep, results):
    assert run_sweep(["ok", "crash", "ok"]) == 1
    assert run_sweep(["crash", "ok", "crash"]) == 0
    assert outcomes(results) == [(0, "ok"), (1, "error"), (2, "ok"), (1, "ok")]
    before = results.read_bytes()
    assert run_sweep(["crash", "crash", "crash"]) == 0
    assert results.read_bytes() == before


@pytest.mark.parametrize(
    "column", ["commit", "device_name", "torch", "threads"], ids=lambda name: f"of another {name}"
)
def test_a_row_of_another_system_or_code_is_no_row_of_the_case(column, run_sweep, results):
    run_sweep(["ok"])
    other = 3 if column == "threads" else "another"
    run_sweep(["ok"], columns={column: other})
    assert [getattr(row, column) for row in read_rows(results)] == [COLUMNS[column], other]


def test_rows_of_uncommitted_code_count_in_their_own_run_alone(run_sweep, results, tmp_path):
    dirty = {"columns": {"commit": "abcdef0-dirty"}}
    run_sweep(["ok"], **dirty)
    [folder] = (tmp_path / "runs").iterdir()
    assert run_sweep(["crash"], "--resume", folder.name, **dirty) == 0
    assert run_sweep(["crash"], **dirty) == 1
    assert outcomes(results) == [(0, "ok"), (0, "error")]


def test_rerun_measures_anew_and_goes_on_with_what_it_has(run_sweep, results):
    run_sweep(["ok", "ok"])
    assert run_sweep(["ok", "crash"], "--rerun", "--resume", "again") == 1
    assert run_sweep(["crash", "ok"], "--rerun", "--resume", "again") == 0
    assert outcomes(results)[2:] == [(0, "ok"), (1, "error"), (1, "ok")]


def test_only_failed_leaves_out_what_never_ran(run_sweep, results):
    run_sweep(["crash"])
    assert run_sweep(["ok", "ok"], "--only_failed") == 0
    assert outcomes(results) == [(0, "error"), (0, "ok")]


def test_every_second_round_goes_backwards(run_sweep, results):
    run_sweep(["ok", "ok", "ok"], "--rounds", 3)
    assert [(row.round, row.depth) for row in read_rows(results)] == [
        *[(1, 0), (1, 1), (1, 2)],
        *[(2, 2), (2, 1), (2, 0)],
        *[(3, 0), (3, 1), (3, 2)],
    ]


@pytest.mark.parametrize(
    ("behaviour", "status", "error"),
    [
        ("crash", "error", "ended by SIGSEGV: so far"),
        ("empty", "error", "exit code 0: no word"),
        ("refused", "error", "--depth 9: no room"),
        ("oom", "oom", "OutOfMemoryError: CUDA"),
        ("other", "error", "row: ValueError: asked for 'python generate.py', got 'python gen"),
        ("hang", "timeout", "run: TimeoutExpired: ended after 1 s"),
    ],
)
def test_a_failing_case_is_a_row_and_the_others_run(
    behaviour, status, error, run_sweep, results, monkeypatch
):
    monkeypatch.setattr(sweep_process, "GRACE_S", 0.2)
    smaller = [(behaviour, planned(0)), ("ok", planned(1, columns={"k_format": "bf16"}))]
    monkeypatch.setattr(sweep_run, "alike", lambda one, other: False)
    assert run_sweep([name for name, _ in smaller], "--timeout_s", 1) == 1
    assert outcomes(results) == [(0, status), (1, "ok")]
    row = read_rows(results)[0]
    assert row.error.startswith(error)
    assert (row.model, row.k_format, row.cache_len) == ("a model", "int8", 128)


def test_a_row_whose_process_failed_is_kept_and_the_sweep_fails(run_sweep, results):
    assert run_sweep(["doubtful", "ok"]) == 1
    assert outcomes(results) == [(0, "ok"), (1, "ok")]


def test_fail_fast_stops_at_the_first_failure(run_sweep, results):
    assert run_sweep(["ok", "crash", "ok"], "--fail_fast") == 1
    assert outcomes(results) == [(0, "ok"), (1, "error")]


def test_after_an_out_of_memory_larger_caches_of_these_formats_are_skipped(run_sweep, results):
    assert run_sweep(["ok", "oom", "ok", "ok"]) == 1
    assert outcomes(results) == [(0, "ok"), (1, "oom"), (2, "skipped"), (3, "skipped")]
    assert read_rows(results)[2].error == "256 slots of these formats ran out of memory before"


def test_what_cannot_fit_is_skipped_once_and_is_no_failure(run_sweep, results):
    case = {"refused": "needs 9 GB, 1 GB free"}
    for _ in range(2):
        assert run_sweep(["crash"], **case) == 0
        assert outcomes(results) == [(0, "skipped")]
    assert read_rows(results)[0].error == "needs 9 GB, 1 GB free"


def test_a_wrong_request_starts_nothing(tmp_path, results, monkeypatch, run_sweep):
    cases = (planned(0), planned(1, refused="--depth 1: wrong", columns={}, sizes={}))
    install(monkeypatch, tmp_path, [("ok", cases[0])])
    wrong = sweep_cases.Planned(**vars(cases[1]) | {"columns": {}})
    monkeypatch.setattr(sweep_cases, "ask_plan", lambda order: Plan(cases=(cases[0], wrong)))
    with pytest.raises(UserError, match="--depth 1: wrong"):
        sweep_run.run_sweep(parse(RunConfig, ["--results", str(results)]))
    assert results.read_text() == ""


def test_a_checkpoint_without_a_case_in_the_sections_is_refused(results, monkeypatch):
    nothing = Plan(cases=(), left_out=("left out of kv: more than 64 tokens",))
    monkeypatch.setattr(sweep_cases, "ask_plan", lambda order: nothing)
    with pytest.raises(UserError, match="left out of kv: more than 64 tokens"):
        sweep_run.run_sweep(parse(RunConfig, ["--results", str(results)]))


def test_a_dry_run_prints_each_case_and_its_state_and_touches_nothing(
    run_sweep, results, tmp_path, capsys
):
    assert run_sweep(["crash", "crash"], "--dry_run") == 0
    assert not list(tmp_path.iterdir())
    run_sweep(["ok"])
    run_sweep(["ok", "ok"], "--dry_run")
    capsys.readouterr()
    assert run_sweep(["ok", "ok"], "--dry_run") == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["#", "section", "round", "weights"]
    assert first.endswith("generate.py  [done]")
    assert second.endswith("generate.py --depth 1  [run]")
    assert "~1 s" in second
    results.unlink()
    run_sweep(["ok"], "--dry_run", refused="needs 9 GB", free_bytes=0)
    assert "  no  ~1 s  generate.py  [skip: needs 9 GB]" in capsys.readouterr().out


def test_a_device_has_one_sweep_at_a_time(run_sweep, results, tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.sweep_lock.WAIT_S", 0.1)
    install(monkeypatch, tmp_path, [])
    with device_lock("a-device-of-tests"), pytest.raises(UserError, match="another sweep measures"):
        run_sweep(["ok"])
    assert outcomes(results) == []
    assert run_sweep(["ok"]) == 0


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_cases, "ask_plan", lambda order: pytest.fail("planned"))
    with pytest.raises(UserError, match="not a regular file"):
        sweep_run.run_sweep(parse(RunConfig, ["--results", str(tmp_path)]))


def test_the_command_that_goes_on_asks_for_the_same_sweep():
    config = parse(RunConfig, ["kv,long", "--results", "a file.txt", "--rounds", "2", "--rerun"])
    command = sweep_run.Sweep(config, ["--threads", "1"], 0)._command("a-run")
    python, script, *argv = shlex.split(command)
    assert (python, script) == ("python", "scripts/sweep.py")
    words, extra = sweep.split(argv)
    again = parse(RunConfig, sweep.joined(words[1:]))
    assert (again.names, again.results) == (("kv", "long"), "a file.txt")
    assert (again.rounds, again.rerun, again.resume) == (2, True, "a-run")
    assert extra == ["--threads", "1"]


def test_an_error_of_the_file_ends_the_sweep_with_1(run_sweep, monkeypatch, capsys):
    def full(*_):
        raise OSError("rows.txt: disk full")

    monkeypatch.setattr(sweep_run, "append", full)
    assert run(lambda _: run_sweep(["ok"]), RunConfig, []) == 1
    assert capsys.readouterr().err.endswith("error: OSError: rows.txt: disk full\n")
