"""The check of a GPU machine: its order of events, its commands, and all of it in miniature."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import UserError, parse
from generate_config import GenerateConfig
from results import read_rows
from scripts import gpu_check
from scripts.bench_attention import BenchAttentionConfig
from scripts.bench_linear import BenchLinearConfig
from scripts.gpu_check import GPU, SMOKE, GpuCheckConfig, new_folder

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")
OK, FAILING = "print('fine')", "import sys; print('so far'); sys.exit('the cause')"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the check with steps of Python code; gives its exit code and its summary."""
    monkeypatch.setattr(gpu_check.machine, "device_name", lambda device: "a device")

    def run(**codes):
        made = [gpu_check.python(name, "-c", code) for name, code in codes.items()]
        monkeypatch.setattr(gpu_check, "steps", lambda plan, out: made)
        code = gpu_check.main(GpuCheckConfig(out=tmp_path / "out", smoke=True))
        return code, (tmp_path / "out" / "summary.txt").read_text().splitlines()

    return run


def test_a_failing_step_is_named_with_its_cause_and_the_others_run(check, tmp_path):
    code, [head, first, second, third, last] = check(first=OK, second=FAILING, third=OK)
    assert code == 1
    assert head.startswith("CPU smoke test, nothing below is about a GPU: a device, torch ")
    assert (first.split()[0], third.split()[0]) == ("ok", "ok")
    assert second.startswith("FAILED")
    assert second.endswith("second  exit code 1: the cause")
    assert last == "1 failed"
    log = (tmp_path / "out" / "logs" / "second.log").read_text()
    assert "so far" in log
    assert "the cause" in log


def test_without_a_failure_the_exit_code_is_0(check):
    code, summary = check(first=OK)
    assert (code, summary[-1]) == (0, "0 failed")


def test_a_step_ends_with_the_time_of_all(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "BUDGET_S", 1)
    code, summary = check(first="import time; time.sleep(60)", second=OK)
    assert code == 1
    assert "first  ended after 1 s: all steps together have 1 s" in summary[1]


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "rows.txt").write_text("a row")
    with pytest.raises(UserError, match="is not empty; name a new folder"):
        new_folder(tmp_path)
    with pytest.raises(UserError, match="rows.txt: File exists"):
        new_folder(tmp_path / "rows.txt")


@pytest.mark.parametrize("plan", [GPU, SMOKE])
def test_every_step_is_a_command_that_its_script_takes(plan, tmp_path):
    configs = {
        "generate.py": GenerateConfig,
        "scripts/bench_attention.py": BenchAttentionConfig,
        "scripts/bench_linear.py": BenchLinearConfig,
    }
    steps = list(gpu_check.steps(plan, tmp_path))
    assert len({step.name for step in steps}) == len(steps)
    taken = [
        parse(configs[script], words)
        for _, script, *words in (step.command for step in steps)
        if script in configs
    ]
    assert len(taken) == len(plan.rows) + 2


def test_the_rows_of_a_gpu_are_an_8b_model_in_both_formats_up_to_a_million_tokens():
    depths = {kv: [d for f, d, _ in GPU.rows if f == kv] for kv in ("bf16", "int8")}
    assert set(depths["bf16"]) == {0, 8192, 131072}
    assert set(depths["int8"]) == {0, 8192, 131072, 1 << 20}
    assert "random:llama-3.1-8b" in GPU.generate


def test_all_steps_pass_in_miniature_on_the_cpu(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        ["sh", SCRIPT, out, "--smoke"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = (out / "summary.txt").read_text()
    assert (done.returncode, done.stdout) == (0, summary), summary
    names = [step.name for step in gpu_check.steps(SMOKE, out)]
    assert [line.split()[3] for line in summary.splitlines()[1:-1]] == names
    assert {log.stem for log in (out / "logs").iterdir()} == set(names)
    rows = read_rows(out / "rows.txt")
    assert [(row.k_format, row.depth, row.depth_fill) for row in rows] == [
        ("bf16", 0, "none"),
        ("int8", 300, "prefill"),
        ("int8", 5000, "synthetic"),
    ]
    assert {row.model for row in rows} == {"random:tiny"}
    linears = (out / "linears.md").read_text()
    assert all(f"| 96x64 | {rows} | int4:32 |" in linears for rows in (1, 3))
    cells = json.loads((out / "bench.json").read_text())["cells"]
    assert {(cell["k_format"], cell["filled"]) for cell in cells} == {
        (kv_format, filled) for kv_format in ("bf16", "int8") for filled in (128, 256)
    }


def test_without_pytest_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -r requirements-test\.txt"):
        gpu_check.main(gpu_check.GpuCheckConfig(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
