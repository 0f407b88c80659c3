"""A row's figures by hand, and each of its flags alone."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, seeded_model

import machine
from checkpoint import model_sha
from engine import Engine, Sampling
from generate_config import GenerateConfig
from kv_cache import make_caches
from measure import Recording, Runner
from report import Measured, make_row
from request import Request
from results import format_row, parse_row
from self_check import Checked
from summary import FLAG_WORDS

DEPTH, PROMPT = 20, 5
WEIGHTS_GB = 4 * (320 * 80 * 2 + 3 * (80 * 16 * 16 + 3 * 80 * 112 + 2 * 80) + 80) / 1e9
READ_GB = WEIGHTS_GB - 4 * 320 * 80 / 1e9
KV_BYTES_PER_TOKEN = 3 * 2 * (18 + 18)
CACHE_GB = 128 * KV_BYTES_PER_TOKEN / 1e9


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Eight cores, no cache to speak of, 100 GB/s, everything committed."""
    monkeypatch.setattr(machine, "physical_cores", lambda: 8)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine, "bandwidth_gb_s", lambda device: 100.0)
    monkeypatch.setattr(machine, "source_commit", lambda: "3c1f2ab")


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return SimpleNamespace(name="tiny", sha=model_sha([file]))


def recorded(tokens=101, *, ttft_s=0.25, decode_s=2.0):
    recording = Recording()
    recording.tokens = [torch.tensor([[7]])] * tokens
    recording.start_s, recording.first_s = 50.0, 50.0 + ttft_s
    recording.last_s = recording.first_s + decode_s
    return recording


def make_runner(model, formats=("int8", "int8")):
    request = Request(
        depth_ids=(1,) * DEPTH,
        prompt_ids=(2,) * PROMPT,
        new_tokens=101,
        cache_len=128,
        formats=("int8", "int8"),
        prefill_chunk=2048,
    )
    caches = make_caches(TINY, formats, 1, request.cache_len)
    engine = Engine(model, caches, compile=False)
    return Runner(engine=engine, request=request, sampling=Sampling(320), stop_ids=())


def measured(*recordings, **changes):
    values = {
        "time": datetime(2026, 11, 30, 9, 14, 2, tzinfo=UTC),
        "busy_cores": 0.5,
        "recordings": list(recordings or [recorded()]),
        "compile_s": None,
        "base_bytes": 400_000_000,
        "peak_bytes": 401_000_000,
        "peak_is_sampled": False,
        "is_streamed": False,
        "checked": Checked(verdict="ok", kl=1e-3, top1_pct=98.4375),
    }
    return Measured(**values | changes)


@pytest.fixture
def row_of(checkpoint, tiny_model):
    """Makes a row from what was measured."""
    runner = make_runner(tiny_model)
    config = GenerateConfig(depth=DEPTH, kv_cache_quantization="int8", write_result=Path("r.txt"))
    return lambda result: make_row(config, checkpoint, runner, result)


def test_rate_times_time_is_the_number_of_timed_tokens(row_of):
    times_s = [2.0, 2.02, 1.98, 2.01, 1.99]
    row = row_of(measured(*(recorded(decode_s=s) for s in times_s)))
    assert row.decode_tok_s == pytest.approx(100 / 2.0)  # of the median, N - 1 tokens
    assert row.decode_samples_s == tuple(times_s)
    assert row.new_tokens - 1 == pytest.approx(row.decode_tok_s * 2.0)
    # 100 * 2.7764 * sd / (mean * sqrt(5))
    assert row.decode_ci_pct == pytest.approx(100 * 2.7764 * 0.0158114 / (2 * 5**0.5), abs=0.006)
    assert row.num_samples == 5


def test_ttft_is_the_median_and_prefill_counts_the_timed_prompt_alone(row_of):
    row = row_of(measured(*(recorded(ttft_s=s) for s in (0.5, 0.25, 0.125))))
    assert row.ttft_s == 0.25
    assert row.ttft_samples_s == (0.5, 0.25, 0.125)
    assert row.prefill_tok_s == PROMPT / 0.25


def test_bandwidth_counts_weights_read_and_kv_at_the_mean_filled_length(row_of):
    row = row_of(measured(recorded(decode_s=1e-3)))  # 10 us a step, so that digits remain
    mean_filled = DEPTH + PROMPT + (101 - 2) / 2
    expected = (READ_GB + mean_filled * KV_BYTES_PER_TOKEN / 1e9) / 1e-5
    assert row.bandwidth_gb_s == pytest.approx(expected, abs=0.051)
    assert row.mbu_pct == pytest.approx(expected, abs=0.051)  # of 100 GB/s
    assert row.bandwidth_gb_s > 10


def test_memory_is_explained_by_base_weights_cache_and_workspace(row_of):
    row = row_of(measured(base_bytes=400_000_000, peak_bytes=450_000_000))
    workspace_gb = (DEPTH * (2 * 80 + 3 * 112) * 4 + 320 * 4) / 1e9
    expected = 0.4 + WEIGHTS_GB + CACHE_GB + workspace_gb
    assert row.model_size_gb == pytest.approx(WEIGHTS_GB, abs=5e-5)
    assert row.kv_cache_gb == pytest.approx(CACHE_GB, abs=5e-5)
    assert row.peak_mem_gb == 0.45
    assert row.expected_gb == pytest.approx(expected, abs=6e-5)
    assert row.unexplained_gb == pytest.approx(0.45 - expected, abs=6e-5)


def test_one_token_gives_no_decode_figure_but_a_row(row_of):
    row = row_of(measured(recorded(1, decode_s=0), recorded(1, decode_s=0)))
    absent = [row.decode_tok_s, row.decode_ci_pct, row.bandwidth_gb_s, row.mbu_pct]
    assert absent == [None] * 4
    assert row.decode_samples_s == ()
    assert row.new_tokens == 1
    assert row.ttft_s == 0.25
    assert row.flags == ()
    assert parse_row(format_row(row)) == row


@pytest.mark.parametrize("compile_s", [None, 12.345])
def test_the_row_formats_and_parses_back(compile_s, row_of):
    row = row_of(measured(compile_s=compile_s))
    assert row.compile_s == compile_s
    assert parse_row(format_row(row)) == row


def test_the_row_says_what_was_run(row_of, checkpoint):
    row = row_of(measured())
    assert (row.time, row.status, row.model) == ("2026-11-30T09:14:02Z", "ok", "tiny")
    assert (row.depth, row.prompt_len, row.new_tokens, row.cache_len) == (DEPTH, PROMPT, 101, 128)
    assert (row.dtype, row.weight_format, row.depth_fill) == ("float32", "fp32", "prefill")
    assert row.model_sha == checkpoint.sha
    assert row.repro == "python generate.py --depth 20 --kv_cache_quantization"
    assert (row.commit, row.threads) == ("3c1f2ab", torch.get_num_threads())


def test_formats_dtype_and_cache_bytes_are_those_found_not_those_asked_for(checkpoint):
    runner = make_runner(seeded_model(dtype=torch.bfloat16), formats=("fp32", "int8"))
    config = GenerateConfig(kv_cache_quantization="int8", dtype="float32")
    row = make_row(config, checkpoint, runner, measured())
    assert (row.k_format, row.v_format, row.dtype) == ("fp32", "int8", "bfloat16")
    assert row.kv_cache_gb == pytest.approx(128 * 3 * 2 * (64 + 18) / 1e9, abs=5e-5)
    assert row.model_size_gb == pytest.approx(WEIGHTS_GB / 2, abs=5e-5)


def test_without_depth_nothing_was_filled(checkpoint, tiny_model):
    runner = make_runner(tiny_model)
    runner = dataclasses.replace(runner, request=dataclasses.replace(runner.request, depth_ids=()))
    row = make_row(GenerateConfig(), checkpoint, runner, measured())
    assert (row.depth, row.depth_fill) == (0, "none")


def test_a_synthetic_depth_is_in_the_row_and_flagged(checkpoint, tiny_model):
    runner = make_runner(tiny_model)
    request = dataclasses.replace(runner.request, depth_ids=(), synthetic_depth=DEPTH)
    runner = dataclasses.replace(runner, request=request)
    row = make_row(GenerateConfig(), checkpoint, runner, measured())
    assert (row.depth, row.depth_fill, row.flags) == (DEPTH, "synthetic", ("synthetic",))
    assert "synthetic" in FLAG_WORDS
    assert parse_row(format_row(row)) == row


def test_ragged_samples_are_compared_by_their_mean_step(row_of):
    lengths = (101, 51, 1)
    row = row_of(measured(*(recorded(n, decode_s=0.02 * (n - 1)) for n in lengths)))
    assert row.new_tokens == 101
    assert row.decode_tok_s == pytest.approx(50)
    assert row.decode_samples_s == (2.0, 1.0)
    assert row.decode_ci_pct == 0
    assert row.num_samples == len(row.ttft_samples_s) == 3
    assert row.flags == ("ragged",)
    assert parse_row(format_row(row)) == row


@pytest.mark.parametrize(
    ("checked", "flags"),
    [
        (Checked(verdict="ok", kl=1e-3, top1_pct=100.0), ()),
        (Checked(verdict="warn", kl=0.02, top1_pct=93.75), ()),
        (Checked(verdict="fail", kl=0.2, top1_pct=10.0), ("check_failed",)),
        (Checked(verdict="fail"), ("check_failed",)),
        (Checked(verdict="skipped"), ("unchecked",)),
        (None, ("unchecked",)),
    ],
)
def test_the_check_of_a_quantised_cache_is_in_the_row(checked, flags, row_of):
    row = row_of(measured(checked=checked))
    assert row.flags == flags
    found = (row.check, row.check_kl, row.check_top1_pct)
    assert found == ((checked.verdict, checked.kl, checked.top1_pct) if checked else (None,) * 3)
    assert parse_row(format_row(row)) == row


def test_a_plain_cache_needs_no_check(checkpoint, tiny_model):
    runner = make_runner(tiny_model, formats=("fp32", "fp32"))
    assert make_row(GenerateConfig(), checkpoint, runner, measured(checked=None)).flags == ()


def samples(*decode_s):
    return {"recordings": [recorded(decode_s=s) for s in decode_s]}


# flag, the measurement that has it, and one just below its limit
FLAGS = [
    ("noisy", samples(2.0, 2.3, 2.0, 2.0), samples(2.0, 2.15, 2.0, 2.0)),
    ("first_slow", samples(2.12, 2, 2, 2, 2), samples(2.08, 2, 2, 2, 2)),
    ("busy", {"busy_cores": 4.1}, {"busy_cores": 4.0}),
    ("short", samples(0.49), samples(0.51)),
    ("ragged", {"recordings": [recorded(101), recorded(100)]}, samples(2.0, 2.0)),
    ("streamed", {"is_streamed": True}, {"is_streamed": False}),
    ("rss_sampled", {"peak_is_sampled": True}, {"peak_is_sampled": False}),
    ("mem_unexplained", {"peak_bytes": 660_000_000}, {"peak_bytes": 655_000_000}),
    ("mem_unexplained", {"peak_bytes": 140_000_000}, {"peak_bytes": 150_000_000}),
    (
        "mem_unexplained",
        {"base_bytes": 10**10, "peak_bytes": 11_005_000_000},
        {"base_bytes": 10**10, "peak_bytes": 10_995_000_000},
    ),
]


@pytest.mark.parametrize(("flag", "doubtful", "just_good"), FLAGS)
def test_a_doubtful_measurement_has_its_flag_alone(flag, doubtful, just_good, row_of):
    assert row_of(measured(**doubtful)).flags == (flag,)
    assert row_of(measured(**just_good)).flags == ()
    assert flag in FLAG_WORDS


@pytest.mark.parametrize(("commit", "flags"), [("3c1f2ab-dirty", ("dirty",)), (None, ())])
def test_uncommitted_changes_are_flagged(commit, flags, row_of, monkeypatch):
    monkeypatch.setattr(machine, "source_commit", lambda: commit)
    row = row_of(measured())
    assert (row.commit, row.flags) == (commit, flags)


@pytest.mark.parametrize(("share_of_a_step", "flags"), [(0.55, ("in_cache",)), (0.45, ())])
def test_a_step_that_half_fits_the_cpu_cache_is_flagged(
    share_of_a_step, flags, row_of, monkeypatch
):
    step_bytes = READ_GB * 1e9 + (DEPTH + PROMPT + 49.5) * KV_BYTES_PER_TOKEN
    cache_bytes = int(share_of_a_step * step_bytes)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: cache_bytes)
    assert row_of(measured()).flags == flags


def test_several_flags_stand_side_by_side(row_of):
    row = row_of(measured(recorded(decode_s=0.1), busy_cores=9.0, is_streamed=True))
    assert row.flags == ("busy", "short", "streamed")
    assert parse_row(format_row(row)) == row
