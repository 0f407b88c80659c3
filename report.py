"""A finished run as a row: what was found, not what was asked for.

Formats are read from the caches, token counts from the samples and bytes from the tensors; the
row's repro says what was asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, stdev
from typing import Any

import accounting
import machine
from checkpoint import Checkpoint
from config import printable, repro_command
from engine import Engine
from generate_config import GenerateConfig
from measure import Recording, Runner
from results import Row
from self_check import Checked, is_quantized
from stats import confidence_pct, median


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run gave.

    Attributes:
        time: UTC of the first sample.
        busy_cores: that others kept busy before it.
        recordings: one per sample, at least one.
        compile_s: None without compilation.
        base_bytes: resident before anything was loaded; 0 on CUDA.
        peak_bytes: of the depth fill, and from the second warm-up on.
        peak_is_sampled: short peaks may be missing.
        is_streamed: text was printed while the clock ran.
        checked: what a quantised cache predicts; None: not asked for.
    """

    time: datetime
    busy_cores: float
    recordings: list[Recording]
    compile_s: float | None
    base_bytes: int
    peak_bytes: int
    peak_is_sampled: bool
    is_streamed: bool
    checked: Checked | None = None

    @property
    def new_tokens(self) -> int:
        """Of the longest sample."""
        return max(len(recording.tokens) for recording in self.recordings)

    @property
    def decode_s(self) -> list[float]:
        """Decode time of each sample that has decode steps."""
        return [recording.decode_s for recording in self.recordings if recording.decode_s]

    @property
    def step_s(self) -> list[float]:
        """Mean decode step of each such sample; samples may end at different lengths."""
        return [r.decode_s / (len(r.tokens) - 1) for r in self.recordings if r.decode_s]


def make_row(
    config: GenerateConfig, checkpoint: Checkpoint, runner: Runner, measured: Measured
) -> Row:
    """The row of a run that went well."""
    values = {
        "time": measured.time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "status": "ok",
        "model": printable(checkpoint.name),
        "model_sha": checkpoint.sha,
        "prompt_sha": runner.request.prompt_sha,
        "repro": repro_command("generate.py", config),
        **_settings(config, runner, measured),
        **_speed(runner, measured),
        **_memory(runner, measured),
        **_check(measured.checked),
        **system_columns(runner.engine),
    }
    return Row(**values, flags=tuple(_flags(values, runner, measured)))


def _settings(config: GenerateConfig, runner: Runner, measured: Measured) -> dict[str, Any]:
    request, caches = runner.request, runner.engine.caches
    return {
        "k_format": caches[0].k_format,
        "v_format": caches[0].v_format,
        "depth": request.depth,
        "weight_format": accounting.weight_format(runner.engine.model),
        "dtype": str(runner.engine.model.norm.weight.dtype).removeprefix("torch."),
        "batch_size": 1,
        "prompt_len": len(request.prompt_ids),
        "new_tokens": measured.new_tokens,
        "cache_len": runner.engine.cache_len,
        "prefill_chunk": request.prefill_chunk,
        "depth_fill": request.depth_fill,
        "ignore_eos": config.ignore_eos,
        "compile": config.compile,
        "num_samples": len(measured.recordings),
    }


def _speed(runner: Runner, measured: Measured) -> dict[str, Any]:
    ttft_s = [recording.ttft_s for recording in measured.recordings]
    speed = {
        "ttft_s": median(ttft_s),
        "ttft_samples_s": tuple(ttft_s),
        "prefill_tok_s": len(runner.request.prompt_ids) / median(ttft_s),
        "compile_s": measured.compile_s,
    }
    if not measured.step_s:
        return speed
    step_s = median(measured.step_s)
    num_bytes = accounting.step_bytes(runner.engine.model, runner.request, measured.new_tokens)
    bandwidth_gb_s = num_bytes / step_s / 1e9
    return speed | {
        "decode_samples_s": tuple(measured.decode_s),
        "decode_tok_s": 1 / step_s,
        "decode_ci_pct": confidence_pct(measured.step_s),
        "bandwidth_gb_s": bandwidth_gb_s,
        "mbu_pct": 100 * bandwidth_gb_s / machine.bandwidth_gb_s(runner.engine.device),
    }


def _memory(runner: Runner, measured: Measured) -> dict[str, Any]:
    model = runner.engine.model
    model_bytes = accounting.model_size_bytes(model)
    cache_bytes = accounting.kv_cache_bytes(runner.engine.caches)
    scratch = accounting.workspace_bytes(runner.request, model.config, model.norm.weight.dtype)
    expected_bytes = measured.base_bytes + model_bytes + cache_bytes + scratch
    return {
        "peak_mem_gb": measured.peak_bytes / 1e9,
        "model_size_gb": model_bytes / 1e9,
        "kv_cache_gb": cache_bytes / 1e9,
        "expected_gb": expected_bytes / 1e9,
        "unexplained_gb": (measured.peak_bytes - expected_bytes) / 1e9,
    }


def _check(checked: Checked | None) -> dict[str, Any]:
    if checked is None:
        return {}
    return {
        "check": checked.verdict,
        "check_kl": checked.kl,
        "check_top1_pct": checked.top1_pct,
    }


def system_columns(engine: Engine) -> dict[str, Any]:
    """What ran a model: columns of every kind of row."""
    return {"attention": engine.attention, **machine.system_columns(engine.device)}


def _flags(values: dict[str, Any], runner: Runner, measured: Measured) -> Iterator[str]:
    """What makes a row doubtful; the words are in summary.FLAG_WORDS."""
    yield from _timing_flags(runner, measured)
    if len({len(recording.tokens) for recording in measured.recordings}) > 1:
        yield "ragged"
    if measured.is_streamed:
        yield "streamed"
    if runner.request.synthetic_depth:
        yield "synthetic"
    if measured.peak_is_sampled:
        yield "rss_sampled"
    if abs(values["unexplained_gb"]) > max(0.1 * values["expected_gb"], 0.256):
        yield "mem_unexplained"
    if values.get("check") == "fail":
        yield "check_failed"
    quantized = is_quantized((values["k_format"], values["v_format"]))
    if quantized and values.get("check", "skipped") == "skipped":
        yield "unchecked"
    if (values["commit"] or "").endswith("-dirty"):
        yield "dirty"


def _timing_flags(runner: Runner, measured: Measured) -> Iterator[str]:
    """What makes the times of a row doubtful."""
    device, step_s = runner.engine.device, measured.step_s
    noise_limit = 0.03 if device.type == "cuda" else 0.05
    if len(step_s) > 1 and stdev(step_s) > noise_limit * fmean(step_s):
        yield "noisy"
    if len(step_s) > 1 and step_s[0] > 1.05 * median(step_s[1:]):
        yield "first_slow"
    if measured.busy_cores > machine.physical_cores() / 2:
        yield "busy"
    if step_s and median(measured.decode_s) < 0.5:
        yield "short"
    num_bytes = accounting.step_bytes(runner.engine.model, runner.request, measured.new_tokens)
    if device.type == "cpu" and num_bytes < 2 * machine.last_level_cache_bytes():
        yield "in_cache"
