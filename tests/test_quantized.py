import pytest
import torch
import torch.nn.functional as F
from cache_case import INSTRUCTION_SETS
from quantized_case import KINDS, SHAPES, seeded_weight

from kernels import quantized
from kernels.linear import MAX_ROWS
from kernels.quantized import pack_nibbles, quantized_linear

CPU = torch.device("cpu")


@pytest.fixture(params=["rows", "tiles"])
def layout(request):
    """What a weight in rows is turned into."""
    return {"rows": lambda weight: weight, "tiles": lambda weight: weight.tiled()}[request.param]


@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
class TestLayouts:
    def test_a_code_times_its_scale_plus_its_minimum_is_the_weight(
        self, layout, shape, bits, with_mins
    ):
        weight, dense = seeded_weight(shape[:2], shape[2], bits, with_mins)
        weight = layout(weight)
        assert (weight.bits, weight.group) == (bits, shape[2])
        torch.testing.assert_close(weight.dequantize().double(), dense, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize().bfloat16())

    def test_tiles_and_back_gives_the_same_bytes(self, shape, bits, with_mins):
        weight, _ = seeded_weight(shape[:2], shape[2], bits, with_mins)
        back = weight.tiled().row_major()
        assert all(map(torch.equal, back.parts, weight.parts))
        assert back.nbytes == weight.nbytes

    def test_taken_rows_and_blocks_are_those_of_the_weight(self, layout, shape, bits, with_mins):
        weight, dense = seeded_weight(shape[:2], shape[2], bits, with_mins)
        weight, ids = layout(weight), torch.tensor([4, 0, 3, 4])
        expected = weight.dequantize()
        assert torch.equal(weight.take(ids).dequantize(), expected[ids])
        first = 16 if len(dense) > 16 else 0
        block = weight.block(first, len(dense) - 1)
        assert torch.equal(block.dequantize(), expected[first:-1])


def test_eight_channels_are_the_low_and_then_the_high_nibbles_of_a_word():
    channels = torch.arange(8, dtype=torch.uint8)[None]
    assert pack_nibbles(channels).tolist() == [[0x40, 0x51, 0x62, 0x73]]


def oracle(x, dense, norm=None, residual=None, swiglu=False):
    """In fp64, without any rounding in between."""
    h = x.double()
    if norm:
        h = h / (h.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    y = h @ dense.T
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual.double() + y


@pytest.fixture(params=["plain", *INSTRUCTION_SETS])
def prepared(request):
    """A weight in rows as plain PyTorch reads it, then as every instruction set here does."""
    if request.param == "plain":
        yield lambda weight: weight
        return
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield lambda weight: weight.laid_out_for(CPU)
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17])
def test_a_product_equals_the_fp64_oracle(prepared, dtype, bits, with_mins, shape, num_rows):
    weight, dense = seeded_weight(shape[:2], shape[2], bits, with_mins)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    y = quantized_linear(x, prepared(weight))
    assert y.dtype == dtype
    # Results of about 1. Dense blocks are rounded to the dtype, as x and y are; two digits of x
    # carry its largest element to 1 part in 64,516.
    atol = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y.double(), oracle(x, dense), atol=atol, rtol=0)


@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize(
    "around",
    [{"norm"}, {"residual"}, {"norm", "swiglu"}, {"norm", "residual", "swiglu"}],
    ids=lambda around: "+".join(sorted(around)),
)
@pytest.mark.parametrize("out_features", [16, 20, 48])
def test_what_surrounds_a_product_is_part_of_it(prepared, bits, with_mins, around, out_features):
    swiglu = "swiglu" in around
    shape = (out_features * (1 + swiglu), 128)
    weight, dense = seeded_weight(shape, 32, bits, with_mins)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 3, 128, generator=generator)
    norm = (torch.rand(128, generator=generator), 1e-5) if "norm" in around else None
    added = torch.randn(2, 3, out_features, generator=generator)
    residual = added if "residual" in around else None
    y = quantized_linear(x, prepared(weight), norm, residual, swiglu=swiglu)
    expected = oracle(x, dense, norm, residual, swiglu)
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=0)


def test_a_row_alone_and_among_others_gives_the_same(prepared):
    weight = prepared(seeded_weight((48, 64), 32, 4, True)[0])
    x = torch.randn(MAX_ROWS, 64, generator=torch.Generator().manual_seed(6))
    alone = torch.cat([quantized_linear(row[None], weight) for row in x])
    torch.testing.assert_close(quantized_linear(x, weight), alone, atol=1e-5, rtol=1e-5)


def test_many_rows_are_multiplied_block_by_block(monkeypatch, layout):
    weight, dense = seeded_weight((100, 64), 32, 4, True)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(6))
    monkeypatch.setattr(quantized, "DENSE_BYTES", 32 * 64 * 4)
    y = quantized_linear(x, layout(weight))
    torch.testing.assert_close(y.double(), oracle(x, dense), atol=1e-5, rtol=0)


def test_what_is_not_finite_in_a_row_makes_that_row_nan_and_no_other(prepared):
    weight = prepared(seeded_weight((32, 64), 32, 8, False)[0])
    x = torch.ones(3, 64)
    x[0, 5], x[2, 63] = torch.nan, torch.inf
    y = quantized_linear(x, weight)
    assert not y[0].isfinite().any()
    assert not y[2].isfinite().any()
    assert y[1].isfinite().all()
