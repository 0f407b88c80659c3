import pytest
import torch

from kernels.slots import (
    KEY_FOURS,
    LAYOUTS,
    ROWS,
    SLOT_TILE,
    SLOTS_INNERMOST,
    VALUE_FOURS,
    layout_of,
    read_slots,
    write_slots_,
)

PLACES = {  # of slot s and channel c
    ROWS: lambda s, c: (s, c),
    SLOTS_INNERMOST: lambda s, c: (s // 128, c, s % 128),
    KEY_FOURS: lambda s, c: (s // 16, c // 4, s % 16, c % 4),
    VALUE_FOURS: lambda s, c: (s // 64, c // 16, s % 64 // 4, c % 16, s % 4),
}


def empty_part(layout, batch_size=2, num_slots=256, width=48):
    return torch.zeros(batch_size, 3, *layout.sizes(num_slots, width), dtype=torch.int16)


def numbered(batch_size=2, num_slots=256, width=48):
    """[B, 3, S, width] of values that all differ."""
    return torch.arange(batch_size * 3 * num_slots * width, dtype=torch.int16).view(
        batch_size, 3, num_slots, width
    )


def all_slots(part, num_slots=256):
    return torch.arange(num_slots).expand(part.shape[0], -1)


@pytest.mark.parametrize("layout", PLACES)
def test_each_element_lies_where_the_layout_says(layout):
    part, rows = empty_part(layout, 1), numbered(1)
    write_slots_(part, all_slots(part), rows)
    for slot in range(0, 256, 7):
        for channel in range(48):
            place = part[0, :, *PLACES[layout](slot, channel)]
            assert torch.equal(place, rows[0, :, slot, channel])


@pytest.mark.parametrize("layout", PLACES)
def test_a_part_tells_its_layout_and_every_layout_divides_a_cache(layout):
    assert layout_of(empty_part(layout)) is layout
    assert SLOT_TILE % layout.num_slots == 0
    assert set(LAYOUTS.values()) == set(PLACES)


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize(("lo", "hi"), [(0, 256), (0, 1), (60, 70), (128, 256), (255, 256), (9, 9)])
def test_slots_are_read_as_they_were_written(layout, lo, hi):
    part, rows = empty_part(layout), numbered()
    write_slots_(part, all_slots(part), rows)
    assert torch.equal(read_slots(part, lo, hi), rows[:, :, lo:hi])


@pytest.mark.parametrize("layout", PLACES)
def test_each_sequence_is_written_at_its_own_slots_and_nowhere_else(layout):
    part = empty_part(layout)
    new = numbered(num_slots=3) + 1
    write_slots_(part, torch.tensor([[62, 63, 64], [0, 255, 17]]), new)
    rows = read_slots(part, 0, 256)
    assert torch.equal(rows[0, :, 62:65], new[0])
    assert torch.equal(rows[1, :, [0, 255, 17]], new[1])
    assert torch.count_nonzero(part) == new.numel()


@pytest.mark.parametrize("layout", [layout for layout in PLACES if layout is not ROWS])
def test_broken_tiles_are_refused(layout):
    with pytest.raises(ValueError, match="130 slots of 48 are no tiles of"):
        layout.sizes(130, 48)
    for number in layout.channels:
        with pytest.raises(ValueError, match=f"128 slots of {number + 1} are no tiles of"):
            layout.sizes(128, number + 1)
