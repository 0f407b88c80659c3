"""Where the slots of a cache part lie in memory, row by row or in tiles, and access to them.

A part is [B, Hkv, S, width], or tiled: [B, Hkv, S / SLOT_TILE, width, SLOT_TILE], which keeps those
slots contiguous that one product of weights and values sums over.
"""

import torch
from torch import Tensor

SLOT_TILE = 128
"""Caches are a multiple of this many slots: one tile of the attention kernels."""


def tiled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a part [B, Hkv, S, width] is allocated as when tiled.

    Raises:
        ValueError: S is not a multiple of SLOT_TILE.
    """
    batch_size, num_kv_heads, num_slots, width = shape
    if num_slots % SLOT_TILE:
        raise ValueError(f"{num_slots} slots are not a multiple of {SLOT_TILE}")
    return batch_size, num_kv_heads, num_slots // SLOT_TILE, width, SLOT_TILE


def is_tiled(part: Tensor) -> bool:
    return part.ndim == 5


def write_slots_(part: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store new [B, Hkv, T, width] at slots [B, T], integers on the part's device."""
    batch = torch.arange(part.shape[0], device=part.device)[:, None]
    new = new.transpose(1, 2)
    if is_tiled(part):
        part[batch, :, slots // SLOT_TILE, :, slots % SLOT_TILE] = new
    else:
        part[batch, :, slots] = new


def read_slots(part: Tensor, lo: int, hi: int) -> Tensor:
    """Slots lo .. hi - 1: [B, Hkv, hi - lo, width], a view of the part, or a copy if tiled."""
    if not is_tiled(part):
        return part[:, :, lo:hi]
    first, end = lo // SLOT_TILE, -(-hi // SLOT_TILE)
    # Made contiguous first: a single tile would otherwise be flattened to a transposed view.
    rows = part[:, :, first:end].mT.contiguous().flatten(2, 3)
    return rows[:, :, lo - first * SLOT_TILE : hi - first * SLOT_TILE]
