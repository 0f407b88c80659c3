"""What each attention op means, in plain PyTorch on any device: also the oracle of the tests."""

import functools

import torch
from torch import Tensor

from kernels.merge import merge_partials
from kernels.slots import layout_of, read_slots
from kv_formats import FORMATS, KVFormat

Sides = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The parts of K and of V."""

BLOCK = 4096
"""Slots decoded at a time, so that the workspace does not grow with the context."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence in fp32, without repeating K and V for the query heads of a group.

    Args:
        q: [Hq, T, D].
        k, v: [Hkv, n, D], n > 0.
        sm_scale: factor of q . k.
        visible: [T, n] bool, None: every query sees every slot.

    Returns:
        out [Hq, T, D] fp32, lse [Hq, T] fp32; -inf where a query sees nothing (its out is NaN).
    """
    num_heads, length, head_dim = q.shape
    q = q.float().reshape(k.shape[0], -1, head_dim) * sm_scale  # [Hkv, G * T, D]
    scores = q @ k.float().mT
    if visible is not None:
        scores = scores.unflatten(1, (-1, length)).masked_fill(~visible, -torch.inf).flatten(1, 2)
    out = torch.softmax(scores, -1) @ v.float()
    lse = torch.logsumexp(scores, -1)
    return out.view(num_heads, length, head_dim), lse.view(num_heads, length)


def stored_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    start_pos: Tensor,
    k_format: str,
    v_format: str,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """See kernels.ops.stored_attention. Reads the lengths on the host, so it cannot be captured."""
    formats = FORMATS[k_format], FORMATS[v_format]
    rows = []
    num_slots = k[0].shape[2] * layout_of(k[0]).num_slots
    for row, filled in enumerate(start_pos.tolist()):
        if not 0 <= filled <= num_slots - (q.shape[2] - 1):
            raise ValueError(
                f"start_pos {filled} and {q.shape[2]} queries in a cache of {num_slots} slots"
            )
        k_row, v_row = (tuple(part[row : row + 1] for part in side) for side in (k, v))
        rows.append(_row_attention(q[row], (k_row, v_row), formats, filled, sm_scale))
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def _row_attention(
    q: Tensor, parts: Sides, formats: tuple[KVFormat, KVFormat], filled: int, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """One sequence, its slots in blocks: q [Hq, T, D], parts of batch size 1."""
    end = filled + q.shape[1] - 1
    partials = [
        _block_attention(q, parts, formats, (lo, min(lo + BLOCK, end), filled), sm_scale)
        for lo in range(0, end, BLOCK)
    ]
    if not partials:
        return torch.zeros_like(q, dtype=torch.float32), q.new_full(
            q.shape[:-1], -torch.inf, dtype=torch.float32
        )
    out, lse = functools.reduce(merge_partials, partials)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse


def _block_attention(
    q: Tensor,
    parts: Sides,
    formats: tuple[KVFormat, KVFormat],
    bounds: tuple[int, int, int],
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Slots lo .. hi - 1 of one sequence; query t sees those below filled + t."""
    lo, hi, filled = bounds
    k, v = (
        kv_format.decode(tuple(read_slots(part, lo, hi)[0] for part in side), torch.float32)
        for kv_format, side in zip(formats, parts, strict=True)
    )
    if hi <= filled:
        return attention(q, k, v, sm_scale)
    slots = torch.arange(lo, hi, device=q.device)
    bound = filled + torch.arange(q.shape[1], device=q.device)
    return attention(q, k, v, sm_scale, slots < bound[:, None])
