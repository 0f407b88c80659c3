"""Llama without a cache, written for the tests alone: every layer sees the whole text each time.

It shares no code with model.py, so that the two can disagree.
"""

import math

import torch
from torch import Tensor

from model import ModelConfig, Transformer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Half-split rope by complex numbers: x [H, N, D]."""
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    turn = torch.exp(1j * torch.outer(torch.arange(x.shape[1], dtype=x.dtype), freqs))
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def full_forward(model: Transformer, ids: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits [N, V] at every position of ids."""
    config: ModelConfig = model.config
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    x = weights["embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(config.num_layers):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items() if f"layers.{i}." in n}
        h = rms_norm(x, w["attention_norm.weight"], config.norm_eps)
        qkv = (h @ w["attention.qkv_proj.weight"].T).view(len(ids), -1, dim).transpose(0, 1)
        q = rotate(qkv[:heads], config.rope_theta)
        k = rotate(qkv[heads : heads + kv_heads], config.rope_theta)
        k = k.repeat_interleave(heads // kv_heads, 0)
        v = qkv[heads + kv_heads :].repeat_interleave(heads // kv_heads, 0)
        scores = (q @ k.mT / math.sqrt(dim)).masked_fill(future, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
        x = x + y @ w["attention.o_proj.weight"].T
        h = rms_norm(x, w["mlp_norm.weight"], config.norm_eps)
        gate, up = (h @ w["mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"], config.norm_eps) @ weights["lm_head.weight"].T


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The next `count` ids by argmax."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_forward(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
