"""Where the slots of a cache part lie in memory, row by row or in tiles, and access to them.

Products of bytes take several slots or channels at a time, which a layout keeps side by side. A
part is [B, Hkv, *layout]; its number of dimensions tells which layout it has.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_TILE = 128
"""Caches are a multiple of this many slots, which every layout divides."""


@dataclass(frozen=True)
class Layout:
    """How the elements [S, width] of one head are ordered.

    S is split, by powers of two, into [S / .., *slots] and width into [width / .., *channels]; the
    part holds these dimensions in `order`. Those of slots keep their order among each other, those
    of channels too.
    """

    slots: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    order: tuple[int, ...] = (0, 1)

    @property
    def num_slots(self) -> int:
        """Of a tile."""
        return math.prod(self.slots)

    def sizes(self, num_slots: int, width: int) -> tuple[int, ...]:
        """Of the part, without B and Hkv.

        Raises:
            ValueError: they are not whole tiles.
        """
        num_channels = math.prod(self.channels)
        if num_slots % self.num_slots or width % num_channels:
            raise ValueError(f"{num_slots} slots of {width} are no tiles of {self}")
        split = (
            *(num_slots // self.num_slots, *self.slots),
            *(width // num_channels, *self.channels),
        )
        return tuple(split[i] for i in self.order)

    def is_slot_dim(self, dim: int) -> bool:
        """Whether dimension `dim` of the part, without B and Hkv, is one of slots."""
        return self.order[dim] <= len(self.slots)


ROWS = Layout()
"""[S, width]"""

SLOTS_INNERMOST = Layout(slots=(128,), order=(0, 2, 1))
"""[S / 128, width, 128]: what one product of weights and values sums over is contiguous."""

KEY_FOURS = Layout(slots=(16,), channels=(4,), order=(0, 2, 1, 3))
"""[S / 16, width / 4, 16, 4]: four channels of 16 slots are one register of products."""

VALUE_FOURS = Layout(slots=(16, 4), channels=(16,), order=(0, 3, 1, 4, 2))
"""[S / 64, width / 16, 16, 16, 4]: four slots of 16 channels are one register of products."""

LAYOUTS = {len(layout.order): layout for layout in (ROWS, SLOTS_INNERMOST, KEY_FOURS, VALUE_FOURS)}


def layout_of(part: Tensor) -> Layout:
    return LAYOUTS[part.ndim - 2]


def write_slots_(part: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store new [B, Hkv, T, width] at slots [B, T], integers on the part's device."""
    layout = layout_of(part)
    batch = torch.arange(part.shape[0], device=part.device)[:, None]
    places = _places(slots, layout)
    index = (
        next(places) if layout.is_slot_dim(dim) else slice(None) for dim in range(part.ndim - 2)
    )
    new = new.transpose(1, 2).unflatten(-1, (-1, *layout.channels))
    part[batch, :, *index] = new


def _places(slots: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Of slots along each dimension of slots, from the outermost on.

    By shifts: compiled code divides anew for each element, which took longer than all the rest.
    """
    step = layout.num_slots
    for size in (*layout.slots, 1):
        yield slots >> step.bit_length() - 1
        slots, step = slots & step - 1, step // size


def read_slots(part: Tensor, lo: int, hi: int) -> Tensor:
    """Slots lo .. hi - 1: [B, Hkv, hi - lo, width], a view of the part, or a copy if tiled."""
    layout = layout_of(part)
    first, end = lo // layout.num_slots, -(-hi // layout.num_slots)
    tiles = part[:, :, first:end]
    if layout is not ROWS:
        dims = [2 + layout.order.index(i) for i in range(len(layout.order))]
        # Made contiguous first: a single tile would otherwise be flattened to a transposed view.
        tiles = tiles.permute(0, 1, *dims).contiguous()
        num_slot_dims = 1 + len(layout.slots)
        tiles = tiles.flatten(2, 1 + num_slot_dims).flatten(3)
    return tiles[:, :, lo - first * layout.num_slots : hi - first * layout.num_slots]
