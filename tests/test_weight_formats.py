"""Every scheme of weights against its definition in fp64, for odd sizes too."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, seeded_model

import weight_formats
from kernels.linear import rms_norm
from model import Linear, RMSNorm
from weight_formats import (
    LAYOUTS,
    WEIGHT_FORMATS,
    QuantizedEmbedding,
    describe_formats,
    encode,
    laid_out_in_tiles,
    parameter_shapes,
    rounded,
    stored_bytes,
)

CPU = torch.device("cpu")
SCHEMES = [(kind, group) for kind, each in WEIGHT_FORMATS.items() for group in each.groups]
SHAPES = [(1, 128), (16, 128), (33, 256), (50, 384)]
STEPS = {8: 127, 4: 15}  # from one end of a group's range to the other, of int8 from 0 on


@pytest.fixture(params=SCHEMES, ids=lambda each: f"{each[0]}-{each[1]}")
def scheme(request):
    kind, group = request.param
    return WEIGHT_FORMATS[kind], group


def layer(shape, *, bias=False, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(11)
    linear = Linear(shape[1], shape[0], bias=bias).requires_grad_(False)
    linear.weight.normal_(0, scale, generator=generator)
    linear.weight[0, 0] = 6 * scale  # an outlier
    if bias:
        linear.bias.normal_(generator=generator)
    return linear.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1.0, 50.0])
def test_no_group_is_further_off_than_plain_rounding_to_its_range(scheme, shape, scale):
    cls, group = scheme
    weight = layer(shape, scale=scale).weight
    dense = cls.from_linear(layer(shape, scale=scale), group).weight.dequantize().double()
    groups = weight.double().unflatten(1, (-1, group or shape[1]))
    if LAYOUTS[cls.name_of(group)].bits == 8:
        low, step = torch.zeros(()), groups.abs().amax(-1, keepdim=True) / 127
        step = step.to(LAYOUTS[cls.name_of(group)].scale_dtype).double()
    else:  # the fp16 numbers that are stored
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step, low = ((high - low) / 15).half().double(), low.half().double()
    plain = ((groups - low) / step).round().clamp(-127, 127) * step + low
    errors = (dense.unflatten(1, (-1, group or shape[1])) - groups).square().sum(-1)
    plain_errors = (plain - groups).square().sum(-1)
    assert (errors <= plain_errors * 1.02 + 1e-9 * scale**2).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_the_product_with_the_weight_it_stands_for(scheme, shape):
    cls, group = scheme
    linear = layer(shape, bias=True)
    quantized = cls.from_linear(linear, group)
    norm = RMSNorm(shape[1], 1e-5).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 10, shape[1], generator=torch.Generator().manual_seed(2))
    residual = torch.ones(2, 10, shape[0])
    h = rms_norm(x.double(), norm.weight.double(), norm.eps)
    expected = F.linear(h, quantized.weight.dequantize().double()) + 1 + linear.bias.double()
    y = quantized(x, norm, residual)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)


def test_swiglu_is_that_of_the_two_halves(scheme):
    cls, group = scheme
    quantized = cls.from_linear(layer((64, 128)), group)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)) / 11
    gate, up = F.linear(x.double(), quantized.weight.dequantize().double()).chunk(2, -1)
    torch.testing.assert_close(
        quantized(x, swiglu=True).double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_its_bytes_are_those_of_its_parts_and_of_its_layout(scheme, shape):
    cls, group = scheme
    quantized = cls.from_linear(layer(shape), group)
    held = sum(buffer.nbytes for buffer in quantized.buffers())
    in_tiles = laid_out_in_tiles(CPU, shape[1])
    assert quantized.nbytes == held
    assert held == LAYOUTS[cls.name_of(group)].nbytes(shape, in_tiles=in_tiles)
    layout, scales = LAYOUTS[cls.name_of(group)], math.prod(shape) // (group or shape[1])
    per_group = layout.scale_dtype.itemsize * (1 + layout.has_mins)
    expected = math.prod(shape) * layout.bits // 8 + scales * per_group
    assert layout.nbytes(shape) == expected


@pytest.mark.parametrize("values", [0.0, 0.25, -3.0])
def test_a_constant_weight_is_kept(scheme, values):
    cls, group = scheme
    linear = Linear(128, 4).requires_grad_(False)
    linear.weight.fill_(values)
    dense = cls.from_linear(linear, group).weight.dequantize()
    layout = LAYOUTS[cls.name_of(group)]
    # Symmetric scales are a 127th of the constant, as their dtype has it.
    rtol = torch.finfo(layout.scale_dtype).eps if layout.bits == 8 else 1e-6
    torch.testing.assert_close(dense, linear.weight.data, rtol=rtol, atol=0)


def test_int4_keeps_what_is_on_a_grid_of_sixteen_fp16_numbers():
    codes = torch.randint(16, (8, 4, 32), generator=torch.Generator().manual_seed(3))
    codes[..., :2] = torch.tensor([0, 15])
    weight = (codes * 0.125 - 0.5).flatten(1)
    found = encode(weight, WEIGHT_FORMATS["int4"], 32)
    assert torch.equal(found.dequantize(), weight)


def test_int4_is_better_than_plain_rounding_on_bell_shaped_weights():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    groups = weight.unflatten(1, (-1, 64))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    plain = rounded(groups, (high - low) / 15, low, torch.float16).errors.sum().item()
    found = encode(weight, WEIGHT_FORMATS["int4"], 64).dequantize()
    assert (found - weight).square().sum().item() < 0.93 * plain


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_rows_are_quantised_one_by_one(scheme, rows, monkeypatch):
    cls, group = scheme
    weight = layer((50, 384)).weight
    expected = encode(weight, cls, group)
    monkeypatch.setattr(weight_formats, "ENCODED_ELEMENTS", rows * 384)
    assert all(map(torch.equal, encode(weight, cls, group).parts, expected.parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(scheme, value, dtype):
    weight = layer((4, 128), dtype=dtype).weight
    weight[2, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(weight, *scheme)


def test_what_scales_in_fp16_cannot_hold_is_refused(scheme):
    weight = layer((4, 128), scale=1e5).weight
    if LAYOUTS[scheme[0].name_of(scheme[1])].scale_dtype == torch.float32:
        assert encode(weight, *scheme).dequantize().isfinite().all()
        return
    with pytest.raises(ValueError, match="float16"):
        encode(weight, *scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_up_is_rows_of_the_dense_weight(scheme, dtype):
    cls, group = scheme
    linear = cls.from_linear(layer((50, 256)), group)
    tokens = torch.tensor([[0, 49, 3], [17, 17, 16]])
    expected = linear.weight.dequantize(dtype)[tokens]
    found = QuantizedEmbedding(linear, dtype)(tokens)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("layers", "ends", "text"),
    [
        (["bf16"], ["bf16"], "bf16"),
        (["int8"], ["int8", "int8"], "int8"),
        (["int4:32"], ["int8"], "int4:32,int8"),
        (["q4_1", "bf16"], ["q8_0"], "bf16+q4_1,q8_0"),
        ([], ["bf16"], "bf16"),
    ],
)
def test_the_name_shows_layers_and_head(layers, ends, text):
    formats = {f"layers.{i}.mlp.down_proj.weight": each for i, each in enumerate(layers)}
    formats |= dict(zip(("embed_tokens.weight", "lm_head.weight"), ends, strict=False))
    assert describe_formats(formats) == text


def test_dense_parameters_take_their_dtype_and_codes_their_layout():
    model = seeded_model()
    shapes = parameter_shapes(TINY)
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    sizes = stored_bytes(TINY, {"lm_head.weight": "int8"}, torch.bfloat16, CPU)
    in_tiles = laid_out_in_tiles(CPU, TINY.hidden_size)
    head = LAYOUTS["int8"].nbytes(shapes["lm_head.weight"], in_tiles=in_tiles)
    assert sizes.pop("lm_head.weight") == head
    assert sizes == {name: 2 * math.prod(shapes[name]) for name in sizes}
