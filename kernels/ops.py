"""The attention op of decode: one schema, and what answers it on each device.

Registered with torch.library, so that torch.compile keeps it as one call and never looks inside.
On the CPU the C++ kernel registers itself for this schema when it is loaded (kernels/native.py).
"""

from typing import Any

import torch
from torch import Tensor

from kernels import native, reference
from kernels.slots import KEY_FOURS, ROWS, SLOTS_INNERMOST, VALUE_FOURS, Layout
from kv_formats import Part

MAX_QUERIES = 16
"""New tokens per call: decode has 1, verification of a draft up to 16."""

NAME = "kv_fast::stored_attention"

torch.library.define(
    NAME,
    "(Tensor q, Tensor[] k, Tensor[] v, Tensor start_pos, str k_format, str v_format,"
    " float sm_scale) -> (Tensor, Tensor)",
)


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
        k, v: the parts of `FORMATS[k_format]` and `FORMATS[v_format]`, each [B, Hkv, S, width] or
            in the `layout` that this device reads.
        start_pos: [B]; query t of row b reads slots 0 .. start_pos[b] + t - 1 and no others.
        k_format, v_format: names in FORMATS.
        sm_scale: factor of q . k, 1 / sqrt(D).

    Returns:
        out [B, Hq, T, D] fp32, lse [B, Hq, T] fp32 (natural log); 0 and -inf where nothing is read.

    Raises:
        ValueError: Hq is not a multiple of Hkv, or T > 16.

    Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
    """
    num_heads, num_kv_heads = q.shape[1], k[0].shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(f"{q.shape[2]} queries per call, at most {MAX_QUERIES}")
    return torch.ops.kv_fast.stored_attention(q, k, v, start_pos, k_format, v_format, sm_scale)


@torch.library.register_fake(NAME)
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:-1], dtype=torch.float32)


torch.library.impl(NAME, "CompositeExplicitAutograd", reference.stored_attention)


@torch.library.impl(NAME, "CUDA")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    from kernels import triton_decode  # noqa: PLC0415  (Triton exists only where CUDA does)

    return triton_decode.stored_attention(*args)


def layout(side: str, part: Part, device: torch.device) -> Layout:
    """How stored_attention reads a part of K or V (side "k" or "v") on this device."""
    if part.dtype == torch.int8 and device.type == "cuda" and side == "v":
        return SLOTS_INNERMOST
    are_codes = part.dtype in (torch.int8, torch.uint8)
    fits = are_codes and device.type == "cpu" and part.width % 16 == 0
    if fits and native.load() and native.reads_fours():
        return KEY_FOURS if side == "k" else VALUE_FOURS
    return ROWS


def implementation(device: torch.device) -> str:
    """Name of what answers on this device, for the row; loads it, and builds it if need be."""
    if device.type == "cuda":
        return "triton"
    if device.type == "cpu" and native.load():
        return f"cpp-{native.instruction_sets()[0]}"
    return "reference"
