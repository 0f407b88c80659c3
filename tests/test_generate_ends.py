"""How a run of generate.py ends that is refused, interrupted, unheard or broken."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import TOKENIZER

import fetch
import generate
from engine import Engine
from generate_config import GenerateConfig
from results import read_rows
from scripts.tiny_checkpoint import TINY, random_weights, write_hf

pytest_plugins = ["generate_process"]

STOP_SIGNALS = {"SIGINT": (signal.SIGINT, 130), "SIGTERM": (signal.SIGTERM, 143)}


def weights_are_not_read() -> None:
    generate.load_model = None


# The flags, and what the line says. {} stands for a folder that exists and is empty.
BAD_REQUESTS = [
    ("--max_new_tokens 0", "--max_new_tokens 0: must be at least 1"),
    ("--max_new_tokens -3", "--max_new_tokens -3: must be at least 1"),
    ("--temperature nan", "--temperature nan: must be a finite number"),
    ("--cache_size 64 --max_new_tokens 60", "--cache_size 64: the run needs 78 slots"),
    ("--prompt_tokens 2048", "--prompt_tokens 2048: 2048 tokens leave no room in the checkpoint"),
    (
        "--depth 200000",
        "--depth 200000: 200000 tokens leave no room in the checkpoint's context of",
    ),
    ("--chat", "--chat: the checkpoint has no chat template; leave the flag out"),
    ("--system x", "--system: has no effect without --chat"),
    ("--chat --prompt_tokens 5", "--chat and --prompt_tokens: exclude each other"),
    ("--kv_cache_quantization int3", "--kv_cache_quantization int3: "),
    ("--kv_cache_quantization ''", "--kv_cache_quantization : "),
    ("--checkpoint_path {}/none", "{}/none: no such file or folder"),
    ("--checkpoint_path {}", "{}: holds no config.json"),
    ("--checkpoint_path random:none", "random:none: no such shape; take one of random:llama-3"),
    ("--prompt_file {}/none", "--prompt_file {}/none: No such file"),
    ("--write_result {}/none/rows.txt", "{}/none/rows.txt: cannot be written"),
    ("--write_result {}", "{}: cannot be written"),
    ("--prompt a --prompt_tokens 5", "--prompt and --prompt_tokens: exclude each other"),
    ("--depth_fill synthetic", "--depth_fill synthetic: has no effect without --depth"),
    ("--depth 9 --depth_fill none", "--depth_fill none: must be one of prefill, synthetic"),
    ("--device mps", "--device mps: there is none here"),
    ("--cache_size 100000000000", "needs 51200.00 GB (weights 0.5 MB, KV cache data 51200.00 GB"),
]


@pytest.mark.parametrize(("flags", "cause"), BAD_REQUESTS)
def test_a_bad_request_is_one_line_and_exit_code_2_before_weights_are_read(
    flags, cause, run_generate, tmp_path
):
    if flags == "--device mps" and torch.backends.mps.is_available():
        pytest.skip("there is an mps device here")
    words = shlex.split(flags.replace("{}", str(tmp_path)))
    run = run_generate(*words, prepare=weights_are_not_read)
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr == run.error + "\n"
    assert cause.replace("{}", str(tmp_path)) in run.error
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_wrong_is_told_together_before_weights_are_read(
    run_generate, checkpoint, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{")
    words = [
        "--kv_cache_quantization",
        "int3",
        "--threads",
        10**5,
        "--prompt_file",
        tmp_path / "no",
    ]
    words += ["--write_result", tmp_path / "none" / "rows.txt"]
    run = run_generate(*words, path=folder, prepare=weights_are_not_read)
    assert (run.code, run.stdout) == (2, "")
    named = [line.removeprefix("error: ") for line in run.stderr.splitlines()]
    starts = [
        f"{tmp_path}/none/rows.txt: cannot be written",
        "--threads 100000: ",
        "--kv_cache_quantization int3: ",
        f"--prompt_file {tmp_path}/no: No such file",
        f"{folder}: holds no safetensors file",
        f"{folder}/tokenizer.json: is not JSON",
    ]
    assert len(named) == len(starts)
    assert all(map(str.startswith, named, starts)), named


def test_notes_stand_in_front_of_no_refusal(run_generate, checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "stray.safetensors").write_bytes(b"")
    words = ["--max_new_tokens", 10**5, "--cache_size", 20]
    run = run_generate(*words, path=folder, prepare=weights_are_not_read)
    assert (run.code, run.stderr) == (2, run.error + "\n")
    run = run_generate("--max_new_tokens", 1, path=folder)
    assert "reads model.safetensors, not stray.safetensors\n" in run.stderr


def test_memory_that_is_not_there_is_told_beside_other_faults(run_generate, checkpoint):
    words = ["--cache_size", 100_000_000_000, "--write_result", checkpoint / "config.json"]
    run = run_generate(*words)
    assert run.code == 2
    first, second = run.stderr.splitlines()
    assert "is part of the checkpoint" in first
    assert "needs 51200.00 GB" in second


def nothing_is_fetched() -> None:
    fetch.resolve = None


def test_nothing_is_fetched_for_a_request_that_is_wrong_anyway(run_generate):
    run = run_generate("--threads", 10**5, path="owner/name", prepare=nothing_is_fetched)
    assert (run.code, run.stderr.count("\n")) == (2, 1)
    assert run.error.startswith("error: --threads 100000: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_cuda_device_is_refused_in_the_document_too(run_generate):
    run = run_generate("--device", "cuda", "--json", prepare=weights_are_not_read)
    assert run.code == 2
    assert run.document["status"] == "error"
    assert run.document["error"].startswith("--device cuda: there is none here")


def interrupt_decode(number: signal.Signals, step: int) -> None:
    """Send the signal at one decode step of the process; the warm-ups have 19 of them each."""
    decode, steps = Engine.decode, iter(range(1, step + 1))

    def interrupted(self, *args):
        if next(steps, None) == step:
            os.kill(os.getpid(), number)
        return decode(self, *args)

    Engine.decode = interrupted


@pytest.mark.parametrize(("number", "code"), STOP_SIGNALS.values(), ids=STOP_SIGNALS)
@pytest.mark.parametrize("output", ["text", "json", "row"])
def test_a_signal_while_decoding_ends_with_statistics_and_no_row(
    number, code, output, run_generate, tmp_path
):
    file = tmp_path / "results.txt"
    file.write_text("A heading\n")
    flags = {"text": [], "json": ["--json"], "row": ["--write_result", file]}[output]
    common = ["--max_new_tokens", 20, "--ignore_eos"]
    run = run_generate(*common, *flags, prepare=partial(interrupt_decode, number, 2 * 19 + 7))
    assert run.code == code
    assert "sample 1: 7 tokens, TTFT 0." in run.stderr
    assert run.stderr.endswith(f"interrupted: {number.name}\n")
    assert "Traceback" not in run.stderr
    assert file.read_text() == "A heading\n"
    if output == "json":
        assert run.document == {"status": "interrupted", "error": number.name}
    else:
        assert run.stdout.startswith(GenerateConfig.prompt) == (output == "text")


@pytest.mark.parametrize("step", [1, 2 * 19])
def test_a_signal_while_warming_up_ends_too(step, run_generate):
    prepare = partial(interrupt_decode, signal.SIGINT, step)
    run = run_generate("--max_new_tokens", 20, prepare=prepare)
    assert (run.code, run.stdout) == (130, "")
    assert run.stderr.endswith("interrupted: SIGINT\n")


def close_stdout() -> None:
    """Let stdout be a pipe that nobody reads, as in `python generate.py | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout.reconfigure(line_buffering=True)


def test_a_closed_stdout_costs_no_row_and_gives_no_traceback(run_generate, tmp_path):
    file = tmp_path / "results.txt"
    run = run_generate("--max_new_tokens", 5, "--write_result", file, prepare=close_stdout)
    assert len(read_rows(file)) == 1
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr


def test_a_stdout_closed_while_text_is_streamed_ends_the_run(run_generate):
    run = run_generate("--max_new_tokens", 5, prepare=close_stdout)
    assert run.code == 1
    assert "Traceback" not in run.stderr
    assert "schema=" not in run.stderr


@pytest.mark.parametrize("flags", [[], ["--ignore_eos", "--prompt_tokens", 5], ["--json"]])
def test_non_finite_logits_are_an_error_with_the_token_named(flags, run_generate, tmp_path):
    weights = random_weights(TINY)
    weights["model.norm.weight"][3] = float("nan")
    path = write_hf(tmp_path / "broken", TINY, weights, files=TOKENIZER.hf_files)
    run = run_generate("--max_new_tokens", 5, *flags, path=path)
    assert run.code == 1
    assert run.error == "error: FloatingPointError: non-finite logits at new token 1"
    if "--json" in flags:
        assert run.document["status"] == "error"
    else:
        assert run.stdout == ""


@pytest.mark.parametrize(("flags", "code"), [(["--help"], 0), (["--top_k", "-1"], 2)])
def test_the_script_is_a_command_from_any_folder(flags, code, tmp_path):
    command = [sys.executable, Path(generate.__file__), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == code


def test_a_row_is_not_appended_to_the_checkpoint_it_measures(run_generate, checkpoint):
    run = run_generate("--write_result", checkpoint / "config.json")
    assert run.code == 2
    assert "is part of the checkpoint" in run.error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt_tokens", 10**15], "leave no room in the checkpoint's context"),
        (["--depth", 10**15], "leave no room in the checkpoint's context"),
        (["--threads", 10**5], "--threads 100000: there are"),
        (["--prefill_chunk", 10**20], "must be at most"),
        (["--cache_size", "9" * 330], "must be at most"),
    ],
    ids=str,
)
def test_absurd_counts_are_refused_before_anything_is_made(flags, message, run_generate):
    run = run_generate(*flags)
    assert run.code == 2
    assert message in run.error


def test_a_prompt_of_two_lines_runs_when_no_row_is_kept(run_generate):
    run = run_generate("--prompt", "two\nlines", "--max_new_tokens", 3)
    assert run.code == 0
    assert run.stdout.startswith("two\nlines")
    assert r"--prompt 'two\nlines'" in run.row.repro


def full_disk() -> None:
    def append(*_: object) -> None:
        raise OSError("disk full, nothing was written")

    generate.append = append


def test_the_row_is_shown_when_it_cannot_be_written(run_generate, tmp_path):
    run = run_generate(
        "--max_new_tokens", 3, "--write_result", tmp_path / "rows.txt", prepare=full_disk
    )
    assert run.code == 1
    assert run.row.status == "ok"
    assert run.stdout.startswith(GenerateConfig.prompt)
