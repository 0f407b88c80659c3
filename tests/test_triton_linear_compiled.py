"""The Triton products of codes compiled for GPUs that need not be present.

Whether a kernel keeps up with the memory is decided by the instructions it issues per byte that it
reads. They are counted in the machine code, in the loop over tiles. Run with -rP to see them.
"""

import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from compiled_kernel import (  # noqa: E402
    GPUS,
    ISSUED_PER_CLOCK,
    REGISTERS_PER_SM,
    absent_launches,
    cuda_tool,
    loops,
    resource_usage,
)

from kernels import triton_linear  # noqa: E402

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="the interpreter does not compile"
)

WIDTH = 4096


class Scheme(NamedTuple):
    """group: channels per scale; 0: one scale per row."""

    codes: str
    group: int
    with_mins: bool = False

    def tile_bytes(self):
        elements = triton_linear.BLOCK_ROWS * triton_linear.TILE
        return elements if self.codes == "int8" else elements // 2

    def __str__(self):
        return f"{self.codes}:{self.group or 'row'}{' mins' * self.with_mins}"


SCHEMES = [
    Scheme("int8", 0),
    Scheme("int8", 32),
    Scheme("int4", 32),
    Scheme("int4", 32, with_mins=True),
    Scheme("int4", 128),
    Scheme("int4", 128, with_mins=True),
]

BOUNDS = {("int8", 0): 0.07, ("int8", 32): 0.09, ("int4", 32): 0.16, ("int4", 128): 0.16}
"""Warp instructions per byte of codes, for up to 16 columns."""

COPIES = {
    "LDGSTS.E.BYPASS.128": 16,
    "LDGSTS.E.128": 16,
    "LDGSTS.E.64": 8,
    "LDGSTS.E": 4,
}
"""Bytes that a thread copies from global to shared memory with one instruction."""


@pytest.fixture
def compile_for(monkeypatch):
    """A function that compiles the kernel as a call with these arguments would."""

    def compile_kernel(arch, scheme, columns):
        codes, group, with_mins = scheme
        [stand_in] = absent_launches(monkeypatch, triton_linear, arch, "product_kernel")
        x = torch.zeros(columns, WIDTH, dtype=torch.float16)
        shapes = {"int8": ((4096, WIDTH), torch.int8), "int4": ((4096, WIDTH // 2), torch.uint8)}
        shape, dtype = shapes[codes]
        scales = torch.zeros(4096, WIDTH // (group or WIDTH), dtype=torch.float16)
        parts = torch.zeros(shape, dtype=dtype), scales, scales if with_mins else None
        triton_linear.quantized_product(x, *parts, 2)
        return stand_in.compiled

    return compile_kernel


def main_loop(kernel, folder):
    """Instruction names of the loop over tiles."""
    listing = cuda_tool("nvdisasm", kernel, folder, "-c")
    [loop] = [loop for loop in loops(listing) if any("MMA" in name for name in loop)]
    return Counter(loop)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("columns", [1, 16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_made_in_pairs_and_read_in_whole_words(
    compile_for, tmp_path, arch, scheme, columns
):
    kernel = compile_for(arch, scheme, columns)
    loop, num_warps = main_loop(kernel, tmp_path), kernel.metadata.num_warps
    per_byte = loop.total() * num_warps / scheme.tile_bytes()
    issued = per_byte * GPUS[arch].bytes_per_clock / ISSUED_PER_CLOCK
    usage = resource_usage(kernel, tmp_path)
    print(
        f"sm_{arch} {scheme}, {columns} columns:"
        f" {per_byte:.4f} warp instructions per byte, {issued:.0%} of the issue slots at full"
        f" bandwidth ({usage['REG']} registers, {kernel.metadata.shared} B shared)"
    )
    assert per_byte <= BOUNDS[scheme[:2]]
    # Everything is copied ahead of its use, and no code is converted alone.
    assert not any(name.startswith(("LDG.", "I2F", "F2F", "F2I")) for name in loop)
    copied = sum(count * COPIES[name] for name, count in loop.items() if name in COPIES)
    groups = triton_linear.TILE // scheme.group if scheme.group else 0
    scale_bytes = triton_linear.BLOCK_ROWS * groups * 2 * (1 + scheme.with_mins)
    x_bytes = max(8, columns) * triton_linear.TILE * 2
    wanted = scheme.tile_bytes() + x_bytes + scale_bytes
    assert copied * 32 * num_warps == wanted


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("columns", [1, 16, 32])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_programs_that_fit_on_an_sm_fill_the_memory_without_spills(
    compile_for, tmp_path, arch, scheme, columns
):
    kernel = compile_for(arch, scheme, columns)
    usage, metadata = resource_usage(kernel, tmp_path), kernel.metadata
    assert usage["STACK"] == usage["LOCAL"] == 0
    by_registers = REGISTERS_PER_SM // (usage["REG"] * 32 * metadata.num_warps)
    by_shared = GPUS[arch].shared_bytes_per_sm // (metadata.shared + 1024)
    in_flight = min(by_registers, by_shared) * scheme.tile_bytes() * (triton_linear.NUM_STAGES - 1)
    # What memory delivers to an SM in the 700 clocks of one load, and as much again.
    assert in_flight >= 2 * 700 * GPUS[arch].bytes_per_clock


def lop3(a, b, c, table):
    """The instruction by its definition: bit i of the table answers for bits i = 4a + 2b + c."""
    result = torch.zeros_like(a)
    for bit in range(16):
        index = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        result |= (table >> index & 1) << bit
    return result


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_the_instructions_make_every_code_of_a_word(compile_for, scheme):
    ptx = compile_for(90, scheme, 1).asm["ptx"]
    made = {
        tuple(int(number, 0) for number in found)
        for found in re.findall(r"lop3\.b32 %\w+, %\w+, (\w+), (\w+), (\w+);", ptx)
    }
    assert set(re.findall(r"shr\.b32 %\w+, %\w+, (\w+);", ptx)) >= {"8"}
    word = torch.arange(2**16)
    halves = set()
    for mask, flip, table in made:
        assert mask >> 16 == mask & 0xFFFF and flip >> 16 == flip & 0xFFFF
        bits = lop3(word, torch.tensor(mask & 0xFFFF), torch.tensor(flip & 0xFFFF), table)
        values = bits.to(torch.int16).view(torch.float16).float()
        shown = word & 0xFF if scheme.codes == "int8" else word & 15 if mask & 1 else word >> 4 & 15
        wanted = (shown ^ 128) if scheme.codes == "int8" else shown
        offset = 64 if mask & 0xF == 0 else 1024
        assert torch.equal(values, (wanted + offset).float())
        halves.add(mask & 0xFFFF)
    assert halves == ({0xFF} if scheme.codes == "int8" else {0xF, 0xF0})
