"""Two commands in turns: their order, their rows, how they go on. Cases are shell commands."""

import shlex

import pytest
from sweep_case import install, planned

from config import UserError, parse
from results import read_rows
from scripts import sweep, sweep_ab
from scripts.sweep_ab import run_pairs
from scripts.sweep_config import AbConfig

SIDES = [["--depth", "0"], ["--depth", "1"]]


@pytest.fixture
def results(tmp_path):
    return tmp_path / "rows.txt"


@pytest.fixture
def ab(tmp_path, results, monkeypatch):
    """Runs pairs of cases with these behaviours; gives the exit code."""

    def start(first, second, *flags, cases=None, **changes) -> int:
        cases = cases or (planned(0, section=None, **changes), planned(1, section=None, **changes))
        install(monkeypatch, tmp_path, list(zip((first, second), cases, strict=True)))
        config = parse(AbConfig, ["--results", str(results), *map(str, flags)])
        return run_pairs(config, SIDES)

    return start


def turns(results) -> str:
    return " ".join(f"{row.arm}{row.round}" for row in read_rows(results))


def test_pairs_take_turns_so_that_drift_meets_both_alike(ab, results, tmp_path, capsys):
    assert ab("ok", "ok", "--pairs", 4) == 0
    assert turns(results) == "A1 B1 B2 A2 A3 B3 B4 A4"
    rows, [folder] = read_rows(results), (tmp_path / "runs").iterdir()
    assert {(row.run, row.section, row.status) for row in rows} == {(folder.name, None, "ok")}
    assert {(row.arm, row.depth) for row in rows} == {("A", 0), ("B", 1)}
    assert len(list(folder.glob("*.log"))) == 8
    expected = ["python", "results.py", "compare", f"{results}:run={folder.name}"]
    assert shlex.split(capsys.readouterr().out) == expected


def test_there_are_six_pairs_on_a_gpu_and_ten_elsewhere(ab, results):
    ab("ok", "ok", device="cuda")
    assert len(read_rows(results)) == 12
    ab("ok", "ok", device="cpu")
    assert len(read_rows(results)) == 12 + 20


def test_a_command_may_be_paired_with_itself(ab, results):
    case = planned(0, section=None)
    assert ab("ok", "ok", "--pairs", 2, cases=(case, case)) == 0
    assert turns(results) == "A1 B1 B2 A2"
    assert len({row.repro for row in read_rows(results)}) == 1


def test_a_failure_ends_the_pairs_and_resume_goes_on_after_the_last_whole_one(
    ab, results, tmp_path, caplog
):
    caplog.set_level("INFO", "kv_fast")
    assert ab("ok", "crash", "--pairs", 3) == 1
    assert turns(results) == "A1 B1"
    [folder] = (tmp_path / "runs").iterdir()
    [hint] = [line for line in caplog.messages if line.startswith("to go on: ")]
    words, *sides = sweep.split(shlex.split(hint.removeprefix("to go on: "))[3:])
    assert parse(AbConfig, words).resume == folder.name
    assert sides == SIDES
    assert ab("ok", "ok", *words) == 0
    assert turns(results) == "A1 B1 A2 B2 B3 A3 A4 B4"
    assert ab("crash", "crash", *words) == 0


def test_resume_goes_on_with_the_same_commands_on_the_same_code_alone(ab, results, tmp_path):
    ab("ok", "ok", "--pairs", 1)
    [folder] = (tmp_path / "runs").iterdir()
    flags = ("--pairs", 2, "--resume", folder.name)
    with pytest.raises(UserError, match=r"its A is python generate.py of commit abcdef0"):
        ab("ok", "ok", *flags, columns={"commit": "another"})
    with pytest.raises(UserError, match="its A is python generate.py of commit"):
        ab("ok", "ok", *flags, cases=(planned(3), planned(1)))
    with pytest.raises(UserError, match="has no pairs of that name"):
        ab("ok", "ok", "--resume", "another")
    assert turns(results) == "A1 B1"


def test_a_side_that_cannot_run_is_named_before_anything_runs(ab, results):
    cases = (planned(0), planned(1, refused="needs 9 GB, 1 GB free"))
    with pytest.raises(UserError, match="B: needs 9 GB, 1 GB free"):
        ab("ok", "ok", cases=cases)
    assert results.read_text() == ""


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_flags_of_two_commands_are_wanted(count, results):
    with pytest.raises(UserError, match="ab -- FLAGS_A -- FLAGS_B"):
        run_pairs(parse(AbConfig, []), [["--depth", "1"]] * count)


@pytest.mark.parametrize(
    ("words", "program", "flags"),
    [
        ([], "generate.py", ()),
        (["--depth", "1"], "generate.py", ("--depth", "1")),
        (["eval.py", "kl"], "eval.py", ("kl",)),
    ],
)
def test_a_side_may_name_its_program(words, program, flags):
    case = sweep_ab.case_of(words)
    assert (case.section, case.program, case.flags) == (None, program, flags)
