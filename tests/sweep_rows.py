"""Made-up rows for tests of what is printed and drawn of rows: a sweep over depths and formats."""

import dataclasses
import random

from test_results import ROW

from config import repro_command
from eval_config import EvalConfig
from generate_config import GenerateConfig
from results import Row

BYTES_PER_TOKEN = {"bf16": 131072, "int8": 66560}


def speed_row(kv_format: str = "int8", depth: int = 4096, **values: object) -> Row:
    """A row whose figures follow from its depth and format; seeded noise in its samples."""
    new_tokens, prompt_len = 128, 512
    filled = depth + prompt_len + (new_tokens - 2) / 2
    step_s = (15.0e9 + filled * BYTES_PER_TOKEN[kv_format]) / 3.3e12
    rng = random.Random(f"{kv_format} {depth}")
    samples = tuple((new_tokens - 1) * step_s * rng.uniform(0.99, 1.01) for _ in range(5))
    cache_len = -(-(depth + prompt_len + new_tokens) // 128) * 128
    kv_cache_gb = cache_len * BYTES_PER_TOKEN[kv_format] / 1e9
    config = GenerateConfig(
        prompt_tokens=prompt_len, depth=depth, kv_cache_quantization=kv_format, temperature=0.0
    )
    made = {
        "k_format": kv_format,
        "v_format": kv_format,
        "depth": depth,
        "decode_tok_s": (new_tokens - 1) / sorted(samples)[2],
        "decode_samples_s": samples,
        "ttft_s": 0.03 + depth / 1e6,
        "ttft_samples_s": tuple(0.03 + depth / 1e6 + 0.0001 * i for i in range(-2, 3)),
        "prefill_tok_s": prompt_len / (0.03 + depth / 1e6),
        "cache_len": cache_len,
        "kv_cache_gb": kv_cache_gb,
        "expected_gb": 16.2 + kv_cache_gb,
        "peak_mem_gb": 16.3 + kv_cache_gb,
        "depth_fill": "prefill" if depth else "none",
        "prompt_sha": f"{depth:012x}",
        "repro": repro_command("generate.py", config),
    }
    return dataclasses.replace(ROW, **made | values)


def sweep(depths: tuple[int, ...] = (0, 1024, 4096, 16384)) -> list[Row]:
    """Each depth with both formats."""
    return [speed_row(kv_format, depth) for depth in depths for kv_format in ("bf16", "int8")]


def failed_row(kv_format: str = "bf16", depth: int = 1 << 20, **values: object) -> Row:
    """A row of a run that found no memory."""
    names = ["decode_tok_s", "decode_ci_pct", "ttft_s", "prefill_tok_s", "peak_mem_gb"]
    names += ["bandwidth_gb_s", "mbu_pct", "unexplained_gb", "compile_s"]
    absent = dict.fromkeys(names) | {"decode_samples_s": (), "ttft_samples_s": ()}
    failure = {"status": "oom", "error": "decode: OutOfMemoryError: CUDA out of memory"}
    return speed_row(kv_format, depth, **absent | failure | values)


def quality_row(kv_format: str = "int8", context: int = 512, **values: object) -> Row:
    """A row of `eval.py kl`."""
    config = EvalConfig(command="kl", context=context, kv_cache_quantization=kv_format)
    kl = {"bf16": 2e-5, "int8": 5e-4}[kv_format] * (1 + context / 10_000)
    made = {
        "time": "2026-11-30T10:00:00Z",
        "kind": "quality",
        "status": "ok",
        "model": ROW.model,
        "k_format": kv_format,
        "v_format": kv_format,
        "reference": "cache",
        "text": "sotu",
        "context": context,
        "kl_mean": kl,
        "kl_se": kl / 10,
        "kl_floor": 2e-5,
        "top1_pct": 98.4,
        "top1_floor_pct": 99.5,
        "windows": 16,
        "scored": 256,
        "score_width": 16,
        "kv_bytes_per_token": BYTES_PER_TOKEN[kv_format],
        "kv_cache_gb": 0.1,
        "model_size_gb": 16.0605,
        "device_name": ROW.device_name,
        "torch": ROW.torch,
        "threads": 16,
        "commit": "3c1f2ab",
        "dtype": "float32",
        "weight_format": "none",
        "repro": repro_command("eval.py", config),
    }
    return Row(**made | values)
