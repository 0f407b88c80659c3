"""Check the tool on a machine with an NVIDIA GPU: kernels, CUDA graphs, speed, memory, rows.

    sh scripts/gpu_check.sh OUT        OUT is a new folder

Each step is a process of its own with a log in OUT/logs; a failing one does not stop the others.
OUT/summary.txt has a line per step, OUT/rows.txt the rows, OUT/bench.json the microbenchmark of
attention and OUT/linears.md the table of products with weights of 16, 8 and 4 bits.
The exit code is 1 if any step failed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import importlib.util
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import machine
from config import MISSING, UserError, flag, printable

ROOT = Path(__file__).resolve().parent.parent

BUDGET_S = 470
"""Of all steps; what does not get its turn in this time has failed."""


@dataclass(frozen=True, kw_only=True)
class GpuCheckConfig:
    """Check kernels, CUDA graphs, speed and memory on a machine with an NVIDIA GPU."""

    out: Path = flag(MISSING, help="new folder for logs, rows and the summary")
    smoke: bool = flag(False, help="all steps in miniature on the CPU, as without a GPU")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the steps run on one kind of machine; flags as in a shell.

    Attributes:
        kernels, graphs: of pytest: attention against the oracle, the compiled step against eager.
        bench, linears: of bench_attention.py and bench_linear.py.
        generate: of every row.
        rows: K and V format, depth and depth fill of each row, the most important first.
    """

    kernels: str
    graphs: str
    bench: str
    linears: str
    generate: str
    rows: tuple[tuple[str, int, str], ...]


GPU = Plan(
    kernels="-m cuda tests --ignore tests/test_engine.py",
    graphs="-m cuda tests/test_engine.py",
    bench="--device cuda --heads 32/8/128 --filled 4096,16384,65536,262144,1048576",
    linears="--device cuda",
    generate="--checkpoint_path random:llama-3.1-8b --device cuda --prompt_tokens 512"
    " --max_new_tokens 128 --num_samples 3",
    rows=(
        ("bf16", 0, "prefill"),
        ("int8", 0, "prefill"),
        ("int8", 1 << 20, "synthetic"),
        ("bf16", 8192, "prefill"),
        ("int8", 8192, "prefill"),
        ("bf16", 131072, "synthetic"),  # a real prefill of both would take a minute
        ("int8", 131072, "synthetic"),
    ),
)
SMOKE = Plan(
    kernels="tests/test_merge.py tests/test_kv_cache.py -k 'two_halves or own_token'",
    graphs="tests/test_engine.py -k 'compiled_ids_equal_eager_ids and int8'",
    bench="--device cpu --heads 4/2/64 --filled 128,256 --repeats 2",
    linears="--device cpu --shapes 96x64 --rows 1,3 --repeats 2",
    generate="--checkpoint_path random:tiny --device cpu --no-compile --prompt_tokens 16"
    " --max_new_tokens 4 --num_samples 2",
    rows=(("bf16", 0, "prefill"), ("int8", 300, "prefill"), ("int8", 5000, "synthetic")),
)


@dataclass(frozen=True)
class Step:
    """One command; its stdout goes to the file `output`, or into its log."""

    name: str
    command: list[str]
    output: Path | None = None


def steps(plan: Plan, out: Path) -> Iterator[Step]:
    """All steps, in their order."""
    pytest = ["-m", "pytest", "-p", "no:cacheprovider"]
    yield python("kernels", *pytest, *shlex.split(plan.kernels))
    yield python("graphs", *pytest, *shlex.split(plan.graphs))
    bench = ["scripts/bench_attention.py", "--json", "--formats", "bf16,int8"]
    yield python("bench", *bench, *shlex.split(plan.bench), output=out / "bench.json")
    linears = ["scripts/bench_linear.py", *shlex.split(plan.linears)]
    yield python("linears", *linears, output=out / "linears.md")
    rows = str(out / "rows.txt")
    for kv_format, depth, depth_fill in plan.rows:
        words = [*shlex.split(plan.generate), "--kv_cache_quantization", kv_format]
        words += ["--temperature", "0", "--ignore_eos", "--write_result", rows]
        if depth:
            words += ["--depth", str(depth), "--depth_fill", depth_fill]
        yield python(f"row-{kv_format}-{depth}", "generate.py", *words)
    yield python("validate", "results.py", "validate", rows)


def python(name: str, *words: str, output: Path | None = None) -> Step:
    return Step(name, [sys.executable, *words], output)


def run_step(step: Step, out: Path, budget_s: float) -> str:
    """Run one step within its time; why it failed, or '' when it went well."""
    log_file = out / "logs" / f"{step.name}.log"
    with log_file.open("w") as log, (step.output or log_file).open("a") as stdout:
        print(shlex.join(step.command), file=log, flush=True)
        try:
            done = subprocess.run(
                step.command, cwd=ROOT, stdout=stdout, stderr=log, timeout=budget_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"ended after {budget_s:.0f} s: all steps together have {BUDGET_S} s"
    lines = log_file.read_text(errors="replace").split("\n")
    last = next(line for line in reversed(lines) if line.strip())
    return f"exit code {done.returncode}: {printable(last)}" if done.returncode else ""


def new_folder(path: Path) -> Path:
    """The absolute path of `path` with an empty logs/ in it.

    Raises:
        UserError: it holds something, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(f"{path}: is not empty; name a new folder")
        (path / "logs").mkdir()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a new folder") from None
    return path.resolve()


def main(config: GpuCheckConfig) -> int:
    """Run all steps; 1 if any failed.

    Raises:
        UserError: the folder cannot be used, or pytest, which two steps need, is missing.
    """
    if not importlib.util.find_spec("pytest"):
        raise UserError(
            "no pytest, which checks the kernels: pip install -r requirements-test.txt, then again"
        )
    out = new_folder(config.out)
    is_smoke = config.smoke or not torch.cuda.is_available()
    device = machine.pick_device("cpu" if is_smoke else "cuda")
    kind = "CPU smoke test, nothing below is about a GPU" if is_smoke else "GPU check"
    system = f"{machine.device_name(device)}, torch {torch.__version__}"
    report(out, f"{kind}: {system}, commit {machine.source_commit()}")
    end_s, failed = time.monotonic() + BUDGET_S, 0
    for step in steps(SMOKE if is_smoke else GPU, out):
        start_s = time.monotonic()
        cause = run_step(step, out, max(1.0, end_s - start_s))
        failed += bool(cause)
        state = "FAILED" if cause else "ok"
        report(
            out, f"{state:6}  {time.monotonic() - start_s:6.1f} s  {step.name}  {cause}".rstrip()
        )
    report(out, f"{failed} failed")
    return int(failed > 0)


def report(out: Path, line: str) -> None:
    """Print a line of the summary, and keep it at once, whatever comes next."""
    print(line, flush=True)
    with (out / "summary.txt").open("a") as summary:
        print(line, file=summary)


if __name__ == "__main__":
    sys.exit(run(main, GpuCheckConfig))
