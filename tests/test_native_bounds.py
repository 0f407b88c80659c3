"""Decode attention beside memory that ends the process when it is touched."""

import ctypes
import mmap
import sys

import pytest
import torch
from cache_case import INSTRUCTION_SETS, filled_cache, oracle, reads_fours_here, tolerance

from kernels import ops
from kernels.slots import ROWS, layout_of
from kv_formats import FORMATS

PROT_NONE = 0

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect is used"),
    pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here"),
]


def before_a_protected_page(part: torch.Tensor, filled: int) -> torch.Tensor:
    """A part [1, 1, ..] whose slots from `filled` on lie in pages that cannot be read.

    Of a tiled part 64 slots at a time are read whole, as far as there are so many.
    """
    layout = layout_of(part)
    if layout is not ROWS:
        filled = -(-filled // 64) * 64 // layout.num_slots
    filled_bytes = part[:, :, :filled].nbytes
    start = -filled_bytes % mmap.PAGESIZE
    readable = start + filled_bytes
    region = mmap.mmap(-1, start + part.nbytes + mmap.PAGESIZE)
    guarded = torch.frombuffer(region, dtype=torch.uint8, count=part.nbytes, offset=start)
    guarded = guarded.view(part.dtype).view(part.shape)
    guarded[:, :, :filled] = part[:, :, :filled]
    address = ctypes.addressof(ctypes.c_char.from_buffer(region)) + readable
    length = (len(region) - readable) // mmap.PAGESIZE * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), length, PROT_NONE) == 0
    return guarded


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 100, 256])
@pytest.mark.parametrize("filled", [1, 5, 63, 64, 65, 200])
def test_the_last_filled_slot_is_the_last_that_is_read(instruction_set, name, head_dim, filled):
    torch.ops.kv_fast.use_instruction_set(instruction_set)
    try:
        cache, k, v = filled_cache(name, name, (1, 1, 256, head_dim))
        k_parts, v_parts = (
            [before_a_protected_page(part, filled) for part in parts]
            for parts in (cache.k_parts, cache.v_parts)
        )
        q = torch.randn(1, 3, 1, head_dim, generator=torch.Generator().manual_seed(0))
        out, _ = ops.stored_attention(
            q, k_parts, v_parts, torch.tensor([filled]), name, name, head_dim**-0.5
        )
    finally:
        torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])
    expected, _ = oracle(q, k, v, [torch.tensor([filled])])
    atol = tolerance(instruction_set, name)
    torch.testing.assert_close(out, expected.float(), atol=atol, rtol=1e-4)


@reads_fours_here
@pytest.mark.parametrize("slots", [16, 48, 80])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_keys_alone_in_fours_are_read_by_their_tiles_of_16_slots(name, slots, length):
    cache, k, v = filled_cache(name, "bf16", (1, 1, slots, 64))
    k_parts = [before_a_protected_page(part, slots) for part in cache.k_parts]
    q = torch.randn(1, 4, length, 64, generator=torch.Generator().manual_seed(0))
    start = torch.tensor([slots - length])
    out, _ = ops.stored_attention(q, k_parts, cache.v_parts, start, name, "bf16", 0.125)
    expected, _ = oracle(q, k, v, [start + torch.arange(length)])
    atol = tolerance(INSTRUCTION_SETS[0], name)
    torch.testing.assert_close(out, expected.float(), atol=atol, rtol=1e-4)
