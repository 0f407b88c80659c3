"""The Triton attention compiled for GPUs that need not be present: resources and instructions.

Whether a kernel keeps up with the memory is decided by the instructions it issues per byte that it
reads. They are counted in the machine code, in the loop over whole tiles. Run with -rP to see them.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from attention_case import tile_values  # noqa: E402
from compiled_kernel import (  # noqa: E402
    COPY,
    GPUS,
    ISSUED_PER_CLOCK,
    REGISTERS_PER_SM,
    absent_launches,
    cuda_tool,
    loops,
    resource_usage,
)

from kernels import triton_decode  # noqa: E402
from kv_formats import FORMATS  # noqa: E402

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="the interpreter does not compile"
)


class Compiled(NamedTuple):
    variant: triton_decode.Variant
    split: triton.compiler.CompiledKernel
    merge: triton.compiler.CompiledKernel


@pytest.fixture
def compile_for(monkeypatch):
    """A function that compiles the two kernels as a call with these arguments would."""

    def compile_kernels(
        arch, formats, *, group_size=4, num_queries=1, head_dim=128, q_dtype="bf16"
    ):
        names = "_split_kernel", "_merge_kernel"
        stand_ins = absent_launches(monkeypatch, triton_decode, arch, *names)
        vectors = torch.zeros(1, 8, 256, head_dim)
        k, v = (list(FORMATS[name].encode(vectors)) for name in formats)
        if formats[1] == "int8":
            v[0] = tile_values(v[0])
        q = torch.zeros(1, 8 * group_size, num_queries, head_dim, dtype=FORMATS[q_dtype].dtype)
        start_pos = torch.zeros(1, dtype=torch.int64)
        triton_decode.stored_attention(q, k, v, start_pos, *formats, head_dim**-0.5)
        variant = triton_decode.choose_variant(q, k[0], v[0], *formats)
        return Compiled(variant, *(stand_in.compiled for stand_in in stand_ins))

    return compile_kernels


def main_loop(kernel, folder):
    """Instruction names of the loop over whole tiles: the shorter, as the other has masks."""
    listing = cuda_tool("nvdisasm", kernel, folder, "-c")
    with_products = [loop for loop in loops(listing) if any("MMA" in name for name in loop)]
    assert len(with_products) == 2
    return Counter(min(with_products, key=len))


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(
    ("formats", "head_dim"),
    [
        (("bf16", "bf16"), 128),
        (("int8", "bf16"), 128),
        (("bf16", "int8"), 128),
        (("int8", "int8"), 64),
        (("int8", "int8"), 96),
        (("int8", "int8"), 128),
        (("int8", "int8"), 256),
    ],
)
def test_the_instructions_leave_half_of_the_issue_slots_free(
    compile_for, tmp_path, arch, formats, head_dim
):
    compiled = compile_for(arch, formats, head_dim=head_dim)
    variant, loop = compiled.variant, main_loop(compiled.split, tmp_path)
    itemsizes = [FORMATS[name].parts(head_dim)[0].dtype.itemsize for name in formats]
    # So the loop is one tile, and none of it is read in smaller words.
    copied = loop[COPY] * 16 * 32 * variant.num_warps
    assert copied == variant.tile * variant.block_dim * sum(itemsizes)
    instructions = loop.total() * variant.num_warps
    per_byte = instructions / (variant.tile * head_dim * sum(itemsizes))
    usage = resource_usage(compiled.split, tmp_path)
    print(
        f"sm_{arch} K,V {','.join(formats)} D {head_dim}: {per_byte:.4f} warp instructions per byte"
        f" ({variant.tile} slots, {variant.num_warps} warps, {usage['REG']} registers,"
        f" {compiled.split.metadata.shared} B shared)"
    )
    assert per_byte <= 0.5 * ISSUED_PER_CLOCK / GPUS[arch].bytes_per_clock


@pytest.mark.parametrize("arch", GPUS)
def test_no_int8_code_is_converted(compile_for, tmp_path, arch):
    compiled = compile_for(arch, ("int8", "int8"))
    variant, loop = compiled.variant, main_loop(compiled.split, tmp_path)
    threads = 32 * variant.num_warps
    scores = variant.block_rows * variant.tile / threads
    sums = variant.block_rows * variant.block_dim / threads
    to_float, to_int = (
        sum(count for name, count in loop.items() if name.startswith(prefix))
        for prefix in ("I2F", "F2I")
    )
    # A score, its value's scale for the logarithm, and a sum of weighted values.
    assert to_float <= 2 * scores + sums
    assert to_int <= scores


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(
    ("formats", "options"),
    [
        (("bf16", "bf16"), {}),
        (("fp16", "fp16"), {"q_dtype": "fp16"}),
        (("fp32", "fp32"), {"q_dtype": "fp32"}),
        (("int8", "int8"), {}),
        (("int8", "int8"), {"q_dtype": "fp32"}),
        (("int8", "int8"), {"num_queries": 5}),
        (("int8", "int8"), {"head_dim": 64}),
        (("int8", "int8"), {"head_dim": 256}),
        (("int8", "bf16"), {}),
        (("bf16", "int8"), {"num_queries": 5}),
        (("int8", "int4"), {}),
        (("int4", "int8"), {"num_queries": 5}),
        (("int4", "int4"), {}),
        (("int4", "int4"), {"head_dim": 64}),
        (("int4", "int4"), {"head_dim": 256}),
        (("fp8", "fp8"), {}),
        (("fp8", "fp8"), {"q_dtype": "fp16", "num_queries": 5}),
    ],
)
def test_two_programs_fit_on_an_sm_without_spills(compile_for, tmp_path, arch, formats, options):
    compiled = compile_for(arch, formats, **options)
    for kernel in (compiled.split, compiled.merge):
        usage = resource_usage(kernel, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0
        assert 2 * usage["REG"] * 32 * kernel.metadata.num_warps <= REGISTERS_PER_SM
        assert 2 * (kernel.metadata.shared + 1024) <= GPUS[arch].shared_bytes_per_sm


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_fp32_queries_over_small_codes_fit_on_an_sm_without_spills(
    compile_for, tmp_path, arch, name
):
    # Runs that judge accuracy: codes are widened to fp32, and one program fills the registers.
    split = compile_for(arch, (name, name), q_dtype="fp32").split
    usage = resource_usage(split, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] * 32 * split.metadata.num_warps <= REGISTERS_PER_SM
    assert split.metadata.shared + 1024 <= GPUS[arch].shared_bytes_per_sm
