"""How long a case will take where no row tells it: by bandwidth and arithmetic of this machine."""

import functools
from collections.abc import Mapping

import torch

import machine
from eval_config import EvalConfig
from eval_plan import EvalPlan, longest
from generate_config import GenerateConfig
from kernels.linear import linear
from model_config import ModelConfig
from preflight import Plan
from scripts.sweep_time import COMPILE_S, LOAD_GB_S, START_S, Work
from weight_formats import stored_bytes

BANDWIDTH_SHARE, FLOPS_SHARE = 0.6, 0.5
"""Of what the probes find, reached by a decode step and by a prefill."""


def speed_s(work: Work, plan: Plan, config: GenerateConfig) -> float:
    """Of a case of generate.py."""
    sizes = plan.expected_bytes
    cache = sizes["KV cache data"] + sizes["KV cache scales"]
    read = sizes["weights"] + cache * work.mean_filled / plan.request.cache_len
    step_s = read / (BANDWIDTH_SHARE * 1e9 * bandwidth_gb_s(plan.device))
    flops = flops_per_token(plan.checkpoint.config, work.depth + work.prompt_len / 2)
    prefill_tok_s = FLOPS_SHARE * flops_per_s(plan.device, config.dtype) / flops
    return work.seconds(prefill_tok_s, step_s, COMPILE_S)


def quality_s(config: EvalConfig, plan: EvalPlan, sizes: Mapping[str, int]) -> float:
    """Of a case of eval.py: all tokens by the reference, its floor and what is tested."""
    texts = config.windows if config.command == "kl" else config.trials * 4
    flops = flops_per_token(plan.checkpoint.config, longest(config) / 2)
    rate = FLOPS_SHARE * flops_per_s(plan.device, config.dtype)
    load_s = sizes["weights"] / 1e9 / LOAD_GB_S
    return START_S + load_s + 3 * texts * longest(config) * flops / rate


def flops_per_token(config: ModelConfig, mean_filled: float) -> float:
    """Of a prefilled token that sees so many: two per weight, four per channel of what it sees."""
    weights = sum(stored_bytes(config, {}, torch.bfloat16, torch.device("cpu")).values()) / 2
    attention = 4 * mean_filled * config.num_layers * config.num_heads * config.head_dim
    return 2 * weights + attention


@functools.cache
def bandwidth_gb_s(device: torch.device) -> float:
    return machine.bandwidth_gb_s(device)


@functools.cache
def flops_per_s(device: torch.device, dtype: str) -> float:
    """Of the product that a prefill is made of."""
    size = 1024
    a = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    return 2 * size**3 / machine.best_time_s(lambda: linear(a, a), device)
