import itertools

import pytest
import torch
import torch.nn.functional as F
from cache_case import INSTRUCTION_SETS
from quantized_case import KINDS, ROUNDING, SHAPES, seeded_weight

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
        # C++ adds a minimum to a product that is not rounded before, PyTorch to one that is.
        torch.testing.assert_close(
            weight.take(ids).dequantize(), expected[ids], rtol=1e-6, atol=1e-7
        )
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


def rounding_of_digits(x, dense):
    """At most, per result [R, N]: two digits carry a row's largest element to 1 in 2 * 127 * 254.

    A short carries it a little better. Only with products of integers.
    """
    if not torch.ops.kv_fast.reads_fours():
        return 0
    return x.double().abs().amax(-1, keepdim=True) * dense.abs().sum(-1) / (2 * 127 * 254)


DTYPES, NUM_ROWS = list(ROUNDING), [1, 3, MAX_ROWS]

CASES = [
    (shape, kind, num_rows, DTYPES[(i + i // len(NUM_ROWS)) % len(DTYPES)])
    for i, (shape, kind, num_rows) in enumerate(itertools.product(SHAPES, KINDS, NUM_ROWS))
]
"""All shapes, kinds and numbers of rows; dtypes, which the inner loops do not see, take turns."""


@pytest.mark.parametrize(("shape", "kind", "num_rows", "dtype"), CASES)
def test_a_product_equals_the_fp64_oracle(prepared, shape, kind, num_rows, dtype):
    weight, dense = seeded_weight(shape[:2], shape[2], *kind)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    y = quantized_linear(x, prepared(weight))
    assert y.dtype == dtype
    error = (y.double() - oracle(x, dense)).abs()
    assert (error <= ROUNDING[dtype] + rounding_of_digits(x, dense)).all()


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
    # Of fp32 sums, and half of the digits' bound, which no sum of random errors comes near.
    atol = 1e-5 + 0.5 * float(torch.as_tensor(rounding_of_digits(x, dense)).max())
    torch.testing.assert_close(y.double(), expected, atol=atol, rtol=0)


def test_a_row_alone_and_among_others_gives_the_same(prepared):
    weight = prepared(seeded_weight((48, 64), 32, 4, True)[0])
    x = torch.randn(MAX_ROWS, 64, generator=torch.Generator().manual_seed(6))
    alone = torch.cat([quantized_linear(row[None], weight) for row in x])
    torch.testing.assert_close(quantized_linear(x, weight), alone, atol=1e-5, rtol=1e-5)


def test_what_is_not_finite_in_a_row_makes_that_row_nan_and_no_other(prepared):
    weight = prepared(seeded_weight((32, 64), 32, 8, False)[0])
    x = torch.ones(3, 64)
    x[0, 5], x[2, 63] = torch.nan, torch.inf
    y = quantized_linear(x, weight)
    assert not y[0].isfinite().any()
    assert not y[2].isfinite().any()
    assert y[1].isfinite().all()


def changed(weight, **parts):
    """The arguments of the op for a weight in tiles, some of them replaced."""
    each = {"codes": weight.codes, "scales": weight.scales, "mins": weight.mins} | parts
    return each["codes"], each["scales"], each["mins"]


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda w: changed(w, codes=w.codes.short()), "codes of Short"),
        (lambda w: changed(w, codes=w.codes[:, :-1].contiguous()), "for rows of 64"),
        (lambda w: changed(w, codes=w.codes[:, :, :8].contiguous()), "for rows of 64"),
        (lambda w: changed(w, codes=w.codes.flatten(1)), "for rows of 64"),
        (lambda w: changed(w, codes=w.codes.transpose(0, 1)), "for rows of 64"),
        (lambda w: changed(w, codes=w.codes[:1]), "features in 1 tiles"),
        (lambda w: changed(w, scales=w.scales[:, :0]), "0 groups"),
        (lambda w: changed(w, scales=w.scales.repeat(1, 4, 1, 1)), "8 groups"),
        (lambda w: changed(w, scales=w.scales.double()), "scales or mins Double"),
        (lambda w: changed(w, scales=w.scales[:1]), "scales or mins"),
        (lambda w: changed(w, mins=w.mins[:, :1]), "scales or mins"),
        (lambda w: changed(w, mins=w.mins.float()), "scales or mins Float"),
    ],
)
def test_parts_that_are_no_weight_are_refused(fault, message):
    weight = seeded_weight((32, 64), 32, 4, True)[0].tiled()
    around = (None, 0.0, None, False)
    with pytest.raises(ValueError, match=message):
        torch.ops.kv_fast.quantized_linear(torch.ones(1, 64), *fault(weight), 32, *around)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
def test_compiled_it_is_the_same_call():
    weight = seeded_weight((64, 128), 32, 4, True)[0].tiled()
    x, residual = torch.randn(1, 128), torch.randn(1, 32)

    def step(x, residual):
        return quantized_linear(x, weight, (torch.ones(128), 1e-5), residual, swiglu=True) * 2

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(x, residual), step(x, residual))
