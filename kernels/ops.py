"""The attention op of decode: one schema, and the choice of what answers.

Registered with torch.library, so that torch.compile keeps it as one call and never looks inside.
"""

import torch
from torch import Tensor

from kernels import reference

MAX_QUERIES = 16
"""New tokens per call of stored_attention: decode has 1, verification of a draft up to 16."""


@torch.library.custom_op("kv_fast::stored_attention", mutates_args=())
def stored_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    start_pos: Tensor,
    k_format: str,
    v_format: str,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of a few new queries over earlier tokens as stored, without their own token.

    Args:
        q: [B, Hq, T, D], T <= 16, after rope.
        k, v: the parts of `FORMATS[k_format]` and `FORMATS[v_format]`, each [B, Hkv, S, width].
        start_pos: [B]; query t of row b reads slots 0 .. start_pos[b] + t - 1 and no others.
        k_format, v_format: names in FORMATS.
        sm_scale: factor of q . k, 1 / sqrt(D).

    Returns:
        out [B, Hq, T, D] fp32, lse [B, Hq, T] fp32 (natural log); 0 and -inf where nothing is read.

    Raises:
        ValueError: Hq is not a multiple of Hkv, or T > 16.

    Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
    """
    _check(q, k[0])
    return reference.stored_attention(q, k, v, start_pos, k_format, v_format, sm_scale)


@stored_attention.register_kernel("cuda")
def _(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    start_pos: Tensor,
    k_format: str,
    v_format: str,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    from kernels import triton_decode  # noqa: PLC0415  (Triton exists only where CUDA does)

    _check(q, k[0])
    return triton_decode.stored_attention(q, k, v, start_pos, k_format, v_format, sm_scale)


@stored_attention.register_fake
def _(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    start_pos: Tensor,
    k_format: str,
    v_format: str,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    _check(q, k[0])
    return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _check(q: Tensor, payload: Tensor) -> None:
    num_heads, num_kv_heads = q.shape[1], payload.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(f"{q.shape[2]} queries per call, at most {MAX_QUERIES}")


def implementation(device: torch.device) -> str:
    """Name of what answers stored_attention on this device, for the row."""
    return "triton" if device.type == "cuda" else "reference"
