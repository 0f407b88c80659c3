"""Llama without a cache, written for the tests alone: every layer sees the whole text each time.

It shares no code with model.py, so that the two can disagree, and takes weights under Hugging
Face's names. Qwen2's biases and Qwen3's norms of q and k are applied where there are such weights.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model import Transformer
from model_config import ModelConfig, RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


# Rope: one frequency at a time, each kind as its paper or first code has it, every step in fp32 as
# there. A period is 1 / frequency: positions per radian, a tensor without dimensions.

Scaled = Callable[[Tensor, int, RopeScaling, ModelConfig], Tensor]


def linear_frequency(period: Tensor, _: int, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    return 1 / period / scaling.factor


def listed_frequency(
    period: Tensor, pair: int, scaling: RopeScaling, config: ModelConfig
) -> Tensor:
    return 1 / period / scaling.freq_factors[pair]


def llama3_frequency(period: Tensor, _: int, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """The branches of Llama 3.1's apply_scaling."""
    low, high, original = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_seq_len,
    )
    freq = 1 / period
    wavelength = 2 * math.pi / freq
    if wavelength < original / high:
        return freq
    if wavelength > original / low:
        return freq / scaling.factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def yarn_frequency(period: Tensor, pair: int, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """NTK-by-parts of YaRN's authors: a ramp over the channels between two numbers of turns."""

    def channel_of(turns: float) -> float:
        original, dim = scaling.original_max_seq_len, config.head_dim
        return (dim * math.log(original / (turns * 2 * math.pi))) / (
            2 * math.log(config.rope_theta)
        )

    start, end = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, config.head_dim - 1)
    if start == end:
        end += 0.001
    kept = 1 - ((torch.tensor(float(pair)) - start) / (end - start)).clamp(0, 1)
    return 1 / (scaling.factor * period) * (1 - kept) + 1 / period * kept


FREQUENCIES: dict[str, Scaled] = {
    "linear": linear_frequency,
    "factors": listed_frequency,
    "llama3": llama3_frequency,
    "yarn": yarn_frequency,
}


def frequencies(config: ModelConfig) -> Tensor:
    """Of the D / 2 pairs of a head."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    periods = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return 1 / periods
    scaled = FREQUENCIES[scaling.kind]
    return torch.stack(
        [scaled(period, pair, scaling, config) for pair, period in enumerate(periods)]
    )


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Half-split rope by complex numbers, of angles in fp32: x [H, N, D]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies(config))
    turn = torch.exp(1j * angles.to(x.dtype))
    if config.rope_scaling:
        turn = turn * config.rope_scaling.attention_factor
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def attention(x: Tensor, w: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """x [N, C], already normed -> [N, C]; w under the names after `self_attn.`."""
    group = config.num_heads // config.num_kv_heads
    q, k, v = (
        linear(x, w, f"{side}_proj").view(len(x), -1, config.head_dim).transpose(0, 1)
        for side in "qkv"
    )
    if "q_norm.weight" in w:
        q = rms_norm(q, w["q_norm.weight"], config.norm_eps)
        k = rms_norm(k, w["k_norm.weight"], config.norm_eps)
    q, k = rotate(q, config), rotate(k, config).repeat_interleave(group, 0)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(config.head_dim)).masked_fill(future, -math.inf)
    y = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    return linear(y.transpose(0, 1).reshape(len(x), -1), w, "o_proj")


def plain_logits(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ids: list[int] | Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits [N, V] at every position of ids, from weights under Hugging Face's names."""
    weights = {name.removeprefix("model."): value.to(dtype) for name, value in weights.items()}
    x = weights["embed_tokens.weight"][ids]
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        w = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        h = rms_norm(x, w["input_layernorm.weight"], config.norm_eps)
        own = {n.removeprefix("self_attn."): t for n, t in w.items()}
        x = x + attention(h, own, config)
        h = rms_norm(x, w["post_attention_layernorm.weight"], config.norm_eps)
        gate, up = linear(h, w, "mlp.gate_proj"), linear(h, w, "mlp.up_proj")
        x = x + linear(gate * torch.sigmoid(gate) * up, w, "mlp.down_proj")
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return rms_norm(x, weights["norm.weight"], config.norm_eps) @ head.T


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, its stacked rows taken apart."""
    config = model.config
    dim = config.head_dim
    rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    weights = {}
    for name, value in model.state_dict().items():
        hf_name = name
        for ours, theirs in {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            ".attention.": ".self_attn.",
        }.items():
            hf_name = hf_name.replace(ours, theirs)
        parts = {hf_name: value}
        if "qkv_proj" in name:
            sides = zip("qkv", value.split(rows), strict=True)
            parts = {hf_name.replace("qkv", side): part for side, part in sides}
        if "gate_up_proj" in name:
            sides = zip(("gate", "up"), value.chunk(2), strict=True)
            parts = {hf_name.replace("gate_up", side): part for side, part in sides}
        weights.update(parts)
    return weights


def full_forward(model: Transformer, ids: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits [N, V] at every position of ids."""
    return plain_logits(model.config, hf_weights(model), ids, dtype)


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The next `count` ids by argmax."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_forward(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
