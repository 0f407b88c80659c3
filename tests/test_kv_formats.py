import pytest
import torch

from kv_formats import FORMATS, Int4, round_down_to_bf16, round_up_to_bf16

VECTORS = {
    "normal": torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0)),
    "zeros": torch.zeros(1, 1, 2, 64),
    "outlier": torch.randn(64, generator=torch.Generator().manual_seed(1)).index_fill(
        0, torch.tensor([5]), 400.0
    ),
    "tiny": 1e-12 * torch.randn(4, 64, generator=torch.Generator().manual_seed(2)),
    "huge": 1e30 * torch.randn(4, 64, generator=torch.Generator().manual_seed(3)),
}
# Largest error allowed per vector, relative to its largest element: half the spacing of the format.
# A bf16 scale is up to 2^-7 larger than needed, int4's minimum that much lower. fp8 has steps of 32
# below 448.
STEP = {
    "bf16": 2**-8,
    "fp16": 2**-11,
    "fp32": 0.0,
    "int8": 0.5 / 127 * (1 + 2**-7),
    "fp8": 16 / 448 * (1 + 2**-7),
    "int4": 0.5 * (2 + 2**-7) / 15 * (1 + 2**-7),
}


@pytest.mark.parametrize("name", FORMATS)
def test_parts_have_the_declared_shapes_and_dtypes(name):
    x = VECTORS["normal"]
    for part, stored in zip(FORMATS[name].parts(64), FORMATS[name].encode(x), strict=True):
        assert stored.shape == (*x.shape[:-1], part.width)
        assert stored.dtype == part.dtype


@pytest.mark.parametrize("vectors", ["normal", "zeros", "outlier"])
@pytest.mark.parametrize("name", FORMATS)
def test_decoding_is_within_half_a_step(name, vectors):
    x = VECTORS[vectors]
    decoded = FORMATS[name].decode(FORMATS[name].encode(x), torch.float32)
    limit = STEP[name] * x.abs().amax(-1, keepdim=True)
    assert bool(((decoded - x).abs() <= limit * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_slots_are_encoded_one_by_one(name):
    x = VECTORS["normal"]
    together = FORMATS[name].encode(x)
    alone = FORMATS[name].encode(x[:, :, 3:4])
    for all_slots, one_slot in zip(together, alone, strict=True):
        assert torch.equal(all_slots[:, :, 3:4], one_slot)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize(("name", "largest", "reached"), [("int8", 127, 126), ("fp8", 448, 416)])
def test_symmetric_codes_use_the_range_and_never_wrap(name, largest, reached, vectors):
    x = VECTORS[vectors]
    codes = FORMATS[name].encode(x)[0].float()
    assert bool((codes.abs() <= largest).all())
    assert torch.equal(codes.sign(), torch.where(codes == 0, 0.0, x.sign()))
    if vectors not in ("zeros", "tiny"):
        assert bool((codes.abs().amax(-1) >= reached).all())


@pytest.mark.parametrize("vectors", VECTORS)
def test_int4_codes_rise_with_the_channels_and_use_the_range(vectors):
    x = VECTORS[vectors]
    packed, _, _ = Int4().encode(x)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    in_order = codes.gather(-1, x.argsort(-1)).int()
    assert bool((in_order.diff() >= 0).all())
    if vectors not in ("zeros", "tiny"):
        assert bool((in_order[..., 0] == 0).all())
        assert bool((in_order[..., -1] == 15).all())


@pytest.mark.parametrize("offset", [-3.0, 0.3, 100.0, -100.0])
def test_int4_steps_are_a_15th_of_the_range_above_the_rounded_minimum(offset):
    x = VECTORS["normal"] + offset
    packed, scale, zero = Int4().encode(x)
    lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    assert bool((zero.float() <= lowest).all())
    assert bool((lowest - zero.float() <= 2**-7 * lowest.abs()).all())
    assert bool((scale.float() <= (highest - zero.float()) / 15 * (1 + 2**-7)).all())
    error = Int4().decode((packed, scale, zero), torch.float64) - x.double()
    assert bool((error.abs() <= scale.double() / 2 + 2**-23 * x.double().abs()).all())


def test_int4_of_an_odd_number_of_channels_is_refused():
    with pytest.raises(ValueError, match="int4 packs pairs of channels: head_dim 63 is odd"):
        Int4().parts(63)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_zero_vector_comes_back_as_zeros(name):
    parts = FORMATS[name].encode(VECTORS["zeros"])
    assert torch.equal(FORMATS[name].decode(parts, torch.float32), VECTORS["zeros"])


def test_rounding_up_to_bf16_gives_the_next_value_not_below():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 100
    up = round_up_to_bf16(x)
    below = torch.nextafter(up, torch.tensor(0.0, dtype=torch.bfloat16))
    assert bool((up.float() >= x).all())
    assert bool((below.float() < x).all())
    assert torch.equal(round_up_to_bf16(up), up)


def test_rounding_down_to_bf16_gives_the_next_value_not_above():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    down = round_down_to_bf16(x)
    above = torch.nextafter(down, torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert bool((down.float() <= x).all())
    assert bool((above.float() > x).all())
    assert torch.equal(round_down_to_bf16(down), down)


NOT_FINITE = {  # bits in fp32
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "NaN": 0x7FC00000,
    "NaN of all bits": 0x7FFFFFFF,
    "-NaN of all bits": 0xFFFFFFFF,
    "NaN of the lowest bit": 0x7F800001,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_what_is_not_finite_is_not_when_decoded(name, head_dim, compiled):
    encode = FORMATS[name].encode
    if compiled:
        encode = torch.compile(encode, fullgraph=True, dynamic=False)
    x = torch.randn(1 + len(NOT_FINITE), head_dim, generator=torch.Generator().manual_seed(0))
    bits = torch.tensor(list(NOT_FINITE.values()), dtype=torch.int64).to(torch.int32)
    x.view(torch.int32)[1:, 5] = bits
    decoded = FORMATS[name].decode(tuple(encode(x)), torch.float32)
    assert torch.equal(decoded.isfinite()[:, 5], x.isfinite()[:, 5])
    assert bool(decoded[0].isfinite().all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_bytes_per_vector_is_what_the_parts_take(name, head_dim):
    stored = FORMATS[name].encode(torch.randn(1, head_dim))
    assert FORMATS[name].bytes_per_vector(head_dim) == sum(part.nbytes for part in stored)
