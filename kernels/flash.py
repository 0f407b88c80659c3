"""Attention of a prefill chunk with its log-sum-exp, by the library's flash kernels.

These aten ops are not a stable API, so every call of them is here, and plain PyTorch answers
wherever none fits.
"""

import math

import torch
from torch import Tensor

from kernels import reference

aten = torch.ops.aten


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention without a mask tensor.

    Args:
        q: [B, Hq, T, D].
        k, v: [B, Hkv, N, D], same dtype as q.
        causal: N = T, and query t sees keys 0 .. t.

    Returns:
        out [B, Hq, T, D] in q's dtype, lse [B, Hq, T] fp32, natural log.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    if q.device.type == "cuda" and q.dtype != torch.float32:
        result = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
        return result[0], result[1]
    return _plain_attention(q, k, v, causal)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    visible = None
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scale = 1 / math.sqrt(q.shape[-1])
    rows = [reference.attention(*row, scale, visible) for row in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in rows]).to(q.dtype), torch.stack([lse for _, lse in rows])
