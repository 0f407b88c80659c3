import pytest
import torch

from kv_formats import FORMATS, Int8, round_up_to_bf16

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
# int8: half of 1/127, and its bf16 scale is up to 2^-7 larger than needed.
STEP = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 0.0, "int8": 0.5 / 127 * (1 + 2**-7)}


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
def test_int8_codes_use_the_range_and_never_wrap(vectors):
    x = VECTORS[vectors]
    codes, _ = Int8().encode(x)
    assert bool((codes.abs() <= 127).all())
    assert torch.equal(codes.sign().float(), torch.where(codes == 0, 0.0, x.sign()))
    if vectors not in ("zeros", "tiny"):
        assert bool((codes.abs().amax(-1) >= 126).all())


def test_a_zero_vector_comes_back_as_zeros():
    codes, scale = Int8().encode(VECTORS["zeros"])
    assert torch.equal(Int8().decode((codes, scale), torch.float32), VECTORS["zeros"])


def test_rounding_up_to_bf16_gives_the_next_value_not_below():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 100
    up = round_up_to_bf16(x)
    below = torch.nextafter(up, torch.tensor(0.0, dtype=torch.bfloat16))
    assert bool((up.float() >= x).all())
    assert bool((below.float() < x).all())
    assert torch.equal(round_up_to_bf16(up), up)


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
