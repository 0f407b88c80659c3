"""Rotary positions: the frequencies of a model, and the rotation of q and k."""

import math

import torch
from torch import Tensor

from model_config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair: [D / 2], fp64; fp32 is off by 0.005 at 100,000.

    Source of "llama3": Llama 3.1, https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").double() / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.freq_factors, dtype=torch.float64, device="cpu")
    if scaling.kind == "llama3":
        turns = scaling.original_max_seq_len * freqs / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unscaled, 0: divided by factor
    elif scaling.kind == "yarn":
        keep = yarn_kept_share(config, scaling)
    else:
        raise ValueError(f"rope scaling {scaling.kind!r}")
    return freqs * (keep + (1 - keep) / scaling.factor)


def yarn_kept_share(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """How much of each frequency yarn keeps, 1 .. 0; the rest is divided by `factor`: [D / 2].

    Linear in the channel between those that turn `beta_fast` and `beta_slow` times in the original
    context. Pair i turns n times where theta ** (-2i / D) * length = 2 pi n, hence `pair`.

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.2; whole channels as its code has it.
    """

    def pair(num_turns: float) -> float:
        log = math.log(scaling.original_max_seq_len) - math.log(2 * math.pi) - math.log(num_turns)
        return config.head_dim / 2 * log / math.log(config.rope_theta)

    first = max(pair(scaling.beta_fast), 0)
    last = min(pair(scaling.beta_slow), config.head_dim - 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    pairs = torch.arange(config.head_dim // 2, device="cpu").double()
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, D] by cos, sin [B, T, D / 2]; channel i is paired with i + D / 2.

    This is Hugging Face's layout. Meta and GGUF files pair neighbouring channels instead; the
    checkpoint reader permutes their q and k rows, so only one layout exists from here on.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
