"""The Triton attention, interpreted on the CPU and run on a GPU.

Triton decides once per process, at import, whether it interprets. So the tests on CPU tensors run
in a pytest process of their own, which one test of the ordinary run starts.
"""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from attention_case import (  # noqa: E402
    Case,
    as_rows,
    fill_unread_slots,
    make_case,
    oracle,
    tile_values,
    use_tiles,
)

from kernels import triton_decode  # noqa: E402
from kv_cache import KVCache  # noqa: E402
from kv_formats import FORMATS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

INTERPRETED = triton.knobs.runtime.interpret

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")

on_device = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.cuda)]
)

TOLERANCES = {"fp32": 1e-5, "int8": 2e-4, "fp16": 2e-3, "bf16": 1e-2}
"""Of outputs of about 1, by the types of the products. Their sums are fp32 or exact in all."""


def variant_of(case):
    return triton_decode.choose_variant(case.q, case.k[0], case.v[0], case.k_format, case.v_format)


def as_read(case):
    """The case with its values laid out as the kernel reads them."""
    if case.v_format != "int8":
        return case
    return case._replace(v=[tile_values(case.v[0]), case.v[1]])


def attend(case):
    return triton_decode.stored_attention(*as_read(case))


def assert_same(result, expected, tolerance):
    for actual, wanted, atol in zip(result, expected, (tolerance, 1e-4), strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=atol)


def assert_matches_the_oracle(case):
    variant = variant_of(case)
    tolerance = max(TOLERANCES[dot.name] for dot in (variant.k_dot, variant.v_dot))
    assert_same(attend(case), oracle(case), tolerance)


@not_interpreted
def test_the_kernels_are_right_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@on_device
@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_every_pair_of_formats_matches_the_oracle(device, k_format, v_format):
    formats = k_format, v_format
    assert_matches_the_oracle(make_case(device, [0, 131], formats, q_dtype="bf16"))


@on_device
@pytest.mark.parametrize("q_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_queries_of_every_type_match_the_oracle(device, q_dtype, kv_format):
    assert_matches_the_oracle(make_case(device, [130], (kv_format, kv_format), q_dtype=q_dtype))


@on_device
@pytest.mark.parametrize("formats", [("bf16", "int8"), ("int8", "int8"), ("int8", "int4")])
@pytest.mark.parametrize(
    ("shape", "q_dtype"),
    [
        ((1, 1, 1, 64), "fp32"),
        ((3, 3, 1, 64), "bf16"),
        ((1, 6, 2, 16), "fp32"),
        ((1, 7, 5, 80), "bf16"),
        ((1, 2, 16, 96), "fp32"),
        ((1, 4, 5, 128), "bf16"),
        ((1, 16, 2, 128), "fp32"),
        ((1, 8, 1, 256), "bf16"),
        ((1, 3, 1, 8), "fp32"),
    ],
)
def test_every_shape_matches_the_oracle(device, shape, q_dtype, formats):
    case = make_case(device, [64, 101], formats, shape=shape, slots=128, q_dtype=q_dtype)
    assert_matches_the_oracle(case)


@on_device
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("filled", [0, 1, 2, 127, 128, 129, 255, 256, 257, 383, 384, 385, 509, 510])
def test_every_length_matches_the_oracle(device, num_queries, filled):
    case = make_case(device, [filled], shape=(1, 2, num_queries, 16), slots=512)
    assert variant_of(case).tile == 128  # so 4 splits of one tile, on any device
    assert_matches_the_oracle(case)


@on_device
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_a_bad_value_that_a_query_sees_stays_visible(device, kv_format, place):
    case = make_case(device, [300], (kv_format, kv_format), shape=(2, 1, 1, 32), slots=384)
    if place == "q":
        case.q[:, 0] = torch.nan
    else:
        {"k": case.k, "v": case.v}[place][-1][:, 0, 1] = torch.nan  # a scale, or a vector
    out, _ = attend(case)
    finite = out.isfinite().all(-1)
    assert not finite[:, 0].any() and finite[:, 1].all()


@on_device
@pytest.mark.parametrize("kv_format", FORMATS)
def test_slots_that_no_query_sees_change_no_bit(device, kv_format):
    case = make_case(device, [0, 70], (kv_format, kv_format), shape=(1, 2, 3, 32))
    results = attend(case)
    fill_unread_slots(case, 1.0, 3)
    for before, after in zip(results, attend(case), strict=True):
        assert torch.equal(before, after)


@on_device
def test_one_program_reads_any_number_of_tiles(device):
    # 32 pairs of a sequence and a KV head: one share each in the interpreter.
    case = make_case(device, [500, 129, 384, 0], shape=(8, 2, 2, 16), slots=512)
    assert_matches_the_oracle(case)


@on_device
@pytest.mark.parametrize("q_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["plain", "wide values", "outlier channels", "attention sink"])
def test_int8_is_within_a_thousandth_of_exact_arithmetic(device, kind, q_dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 512, 64, generator=generator) for heads in (8, 2, 2))
    q = q[:, :, :1] * 2
    if kind == "wide values":
        v *= torch.exp2(torch.randint(-12, 8, (512, 1), generator=generator))
    elif kind == "outlier channels":
        k[..., :4] *= 10
    elif kind == "attention sink":
        k[:, :, 0], v[:, :, 0], q = 3, v[:, :, 0] / 100, q + 1
    k, v = ([part.to(device) for part in FORMATS["int8"].encode(x)] for x in (k, v))
    q = q.to(device, FORMATS[q_dtype].dtype)
    case = Case(q, k, v, torch.tensor([500], device=device), "int8", "int8", 1 / 8)
    (out, lse), (exact_out, exact_lse) = attend(case), oracle(case)
    error = (out - exact_out).norm(dim=-1) / exact_out.norm(dim=-1)
    assert error.max() < 1e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)


@on_device
@pytest.mark.parametrize("head_dim", [512, 1024])
def test_the_largest_int8_products_do_not_overflow(device, head_dim):
    case = make_case(device, [128], shape=(1, 1, 1, head_dim), slots=128)
    for side in (case.k, case.v):
        side[0].fill_(127)
        side[1].fill_(1 / 128)
    case = case._replace(q=torch.ones_like(case.q))
    assert_same(attend(case), oracle(case), 1e-4)


@on_device
def test_vectors_of_scale_zero_count_as_zeros(device):
    case = make_case(device, [200], slots=256)
    for part in (*case.k, *case.v):
        part.zero_()
    assert_same(attend(case), oracle(case), 0)


@on_device
@pytest.mark.parametrize("formats", [("int8", "int8"), ("bf16", "int8"), ("int8", "bf16")])
def test_a_cache_is_laid_out_as_the_kernel_reads_it(device, formats, monkeypatch):
    if INTERPRETED:
        use_tiles(monkeypatch)
    cache = KVCache(*formats, (1, 2, 256, 32), device)
    cache.fill_synthetic_(200, torch.Generator(device).manual_seed(0))
    q = make_case(device, [200], formats, shape=(2, 3, 2, 32)).q
    start_pos = torch.tensor([199], device=device)
    case = Case(q, cache.k_parts, cache.v_parts, start_pos, *formats, 32**-0.5)
    expected = oracle(case._replace(v=[as_rows(part) for part in cache.v_parts]))
    tolerance = max(TOLERANCES[name] for name in formats)
    assert_same(triton_decode.stored_attention(*case), expected, tolerance)


@pytest.fixture
def addresses_read(monkeypatch):
    """First and last byte of everything that the interpreter loads, as it goes on."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")._interpreter
    load, addresses = interpreter.load, []

    def recorded_load(pointers, mask, other, dtype):
        first = pointers[mask]
        addresses.extend(
            [*first.tolist(), *(first + first.dtype.type(dtype.itemsize - 1)).tolist()]
        )
        return load(pointers, mask, other, dtype)

    monkeypatch.setattr(interpreter, "load", recorded_load)
    return addresses


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone can tell what was read")
@pytest.mark.parametrize("filled", [1, 128, 200])
def test_every_filled_slot_is_read_and_no_other(addresses_read, filled):
    case = as_read(make_case("cpu", [filled], slots=256))
    triton_decode.stored_attention(*case)

    def slots_read(part, slot_of_byte):
        offsets = (address - part.data_ptr() for address in addresses_read)
        return {slot_of_byte(offset) for offset in offsets if 0 <= offset < part.nbytes}

    keys, values = case.k[0], case.v[0]
    assert slots_read(keys, lambda byte: byte // 32) == set(range(filled))
    for scale in (case.k[1], case.v[1]):
        assert slots_read(scale, lambda byte: byte // 2) == set(range(filled))
    # Values in words of 16 slots.
    words = slots_read(values, lambda byte: byte // (32 * 128) * 128 + byte % 128)
    assert words == set(range(-(-filled // 16) * 16))


@on_device
def test_every_query_equals_the_same_query_alone(device):
    case = make_case(device, [0, 62], shape=(1, 2, 4, 32), slots=128)
    out, lse = attend(case)
    for t in range(4):
        alone = case._replace(q=case.q[:, :, t : t + 1], start_pos=case.start_pos + t)
        together = out[:, :, t : t + 1], lse[:, :, t : t + 1]
        assert_same(together, attend(alone), 1e-5)


@on_device
def test_queries_and_positions_may_have_any_strides_and_width(device):
    case = make_case(device, [100, 100], shape=(1, 4, 2, 32))
    strided_q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.tensor(100, dtype=torch.int32, device=device).expand(2)
    strided = case._replace(q=strided_q, start_pos=positions)
    for actual, wanted in zip(attend(strided), attend(case), strict=True):
        assert torch.equal(actual, wanted)


def test_a_cache_with_gaps_is_refused():
    case = make_case("cpu", [10])
    gaps = [part[:, :, ::2] for part in case.k]
    with pytest.raises(ValueError, match="contiguous"):
        triton_decode.stored_attention(*as_read(case)._replace(k=gaps))


def test_int8_values_that_are_not_tiled_are_refused():
    with pytest.raises(ValueError, match="are not tiled"):
        triton_decode.stored_attention(*make_case("cpu", [10]))


@pytest.mark.cuda
@not_interpreted
def test_one_captured_graph_serves_every_length():
    case = make_case("cuda", [1024, 1024], slots=1024)
    read = as_read(case)
    triton_decode.stored_attention(*read)  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_decode.stored_attention(*read)
    for lengths in ([0, 1], [63, 64], [500, 1024]):
        case.start_pos.copy_(torch.tensor(lengths))
        graph.replay()
        assert_same(captured, oracle(case), TOLERANCES["int8"])


@pytest.mark.cuda
@not_interpreted
def test_addresses_beyond_2_to_the_31_are_right():
    small = make_case("cuda", [200], shape=(2, 4, 1, 128))
    slots = 2**24 + 128  # the second head starts at code 2**31 + 2**14

    def enlarge(part, *shape):
        large = torch.empty(1, 2, *shape, dtype=part.dtype, device="cuda")
        large[:, :, : part.shape[2]] = part
        return large

    tiled = as_read(small).v[0]
    k = [enlarge(small.k[0], slots, 128), enlarge(small.k[1], slots, 1)]
    v = [enlarge(tiled, slots // 128, 128, 128), enlarge(small.v[1], slots, 1)]
    result = triton_decode.stored_attention(*small._replace(k=k, v=v))
    assert_same(result, oracle(small), TOLERANCES["int8"])
