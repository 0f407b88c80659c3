"""Rotary positions: the frequencies of a model, and the rotation of q and k."""

import math

import torch
from torch import Tensor

from model_config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair: [D / 2] fp32, every step rounded to fp32 on its way.

    So do transformers, Meta's code and gpt-fast, and so they do the angles, products of these and a
    position, which are off by up to 0.008 after 100,000 tokens. Checkpoints are trained and served
    with just that: a more exact angle is further from what their weights have seen. Positions are
    whole numbers, which fp32 holds up to 2 ** 24. Each kind is computed in the order of
    transformers' modeling_rope_utils.py, which gives its bits.

    Source of "llama3": Llama 3.1, https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    periods = config.rope_theta**exponents  # positions per radian
    freqs = 1.0 / periods
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.freq_factors, dtype=torch.float32, device="cpu")
    if scaling.kind == "llama3":
        keep = llama3_kept_share(freqs, scaling)
        return (1 - keep) * freqs / scaling.factor + keep * freqs
    if scaling.kind == "yarn":
        keep = yarn_kept_share(config, scaling)
        return 1.0 / (scaling.factor * periods) * (1 - keep) + freqs * keep
    raise ValueError(f"rope scaling {scaling.kind!r}")


def llama3_kept_share(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    """How much of each frequency stays, 1 .. 0; the rest is divided by `factor`: [D / 2].

    Linear in the number of turns in the original context, between those of low and high factor.
    """
    turns = scaling.original_max_seq_len / (2 * math.pi / freqs)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def yarn_kept_share(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """How much of each frequency stays, 1 .. 0; the rest is divided by `factor`: [D / 2].

    Linear in the channel between those that turn `beta_fast` and `beta_slow` times in the original
    context. Pair i turns n times where theta ** (-2i / D) * length = 2 pi n, hence `pair`.

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.2; whole channels as its code has it.
    """

    def pair(num_turns: float) -> float:
        log = math.log(scaling.original_max_seq_len / (num_turns * 2 * math.pi))
        return config.head_dim * log / (2 * math.log(config.rope_theta))

    first = max(pair(scaling.beta_fast), 0)
    last = min(pair(scaling.beta_slow), config.head_dim - 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    pairs = torch.arange(config.head_dim // 2, device="cpu").float()
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, D] by cos, sin [B, T, D / 2]; channel i is paired with i + D / 2.

    This is Hugging Face's layout. Meta and GGUF files pair neighbouring channels instead; the
    checkpoint reader permutes their q and k rows, so only one layout exists from here on.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
