"""The Triton products of codes, interpreted on the CPU and run on a GPU.

Triton decides once per process, at import, whether it interprets. So the tests on CPU tensors run
in a pytest process of their own, which one test of the ordinary run starts.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from quantized_case import KINDS, SHAPES, seeded_weight  # noqa: E402

from kernels import triton_linear  # noqa: E402
from kernels.quantized import quantized_linear  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")

on_device = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.cuda)]
)

WIDER = [(70, 640, 32), (131, 576, 64), (3, 1024, 128), (65, 256, 256), (7, 24, 24)]
"""(N, C, group): several tiles, tiles that are not whole, many and few groups in a tile."""


def multiply(x, weight, norm=None, residual=None, swiglu=False):
    out_features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    parts = weight.codes, weight.scales, weight.mins
    around = *(norm or (None, 0.0)), residual, swiglu
    return triton_linear.quantized_linear(x, *parts, out_features, *around)


def bounded_product(x, off, weight, dense):
    """X [R, C] times the weight in fp64, and how far fp32 sums of fp16 weights may be from it.

    Of groups, code times scale and what its minimum makes of it are rounded to fp16 (11 bits, and
    2^-24 where they are subnormal). Any order of an fp32 sum is within C roundings of 24 bits, and
    two digits of x keep 21. `off`: of x itself, in relation to its elements.
    """
    sizes = dense.abs()
    if weight.mins is not None:
        sizes = sizes + 2 * weight.mins.double().abs().repeat_interleave(weight.group, dim=1)
    fp16_weights = weight.scales.shape[1] > 1
    relative = fp16_weights * 2.0**-10 + 2.0**-21 + x.shape[1] * 2.0**-24 + off
    tolerance = x.abs() @ (sizes * relative + fp16_weights * 2.0**-24).T
    return x @ dense.T, tolerance


def assert_matches_the_oracle(x, weight, dense, function=multiply, **around):
    y = function(x, weight, **around)
    assert y.dtype == x.dtype
    rounding = torch.finfo(x.dtype).eps / 2
    h, off = x.double().flatten(0, -2), 0
    if norm := around.get("norm"):
        h = h / (h.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
        off = 2.1 * rounding  # before the weight of the norm and after it
    expected, tolerance = bounded_product(h, off, weight, dense.to(x.device))
    if around.get("swiglu"):
        (gate, up), (gate_off, up_off) = expected.chunk(2, -1), tolerance.chunk(2, -1)
        expected = F.silu(gate) * up
        gate_off = 1.1 * gate_off  # the steepest slope of silu
        tolerance = gate_off * up.abs() + F.silu(gate).abs() * up_off + gate_off * up_off
        tolerance += 1e-6 * expected.abs()  # its exponential in fp32
    if (residual := around.get("residual")) is not None:
        expected = expected + residual.double().flatten(0, -2)
    tolerance += (tolerance + expected.abs()) * rounding + 1e-7
    error = (y.double().flatten(0, -2) - expected).abs()
    assert error.isfinite().all()
    assert (error <= tolerance).all(), f"{(error / tolerance).max():.2f} times the tolerance"


def random(device, *shape, dtype=torch.float32, seed=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def weight_on(device, *case):
    weight, dense = seeded_weight(*case)
    return weight.laid_out_for(torch.device(device)) if device != "cpu" else weight, dense


@not_interpreted
def test_the_kernel_is_right_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDER])
def test_every_scheme_and_shape_matches_the_oracle(device, shape, bits, with_mins, dtype):
    weight, dense = weight_on(device, shape[:2], shape[2], bits, with_mins)
    assert_matches_the_oracle(random(device, 3, shape[1], dtype=dtype), weight, dense)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize(("bits", "group"), [(8, 576), (8, 32), (4, 32)])
def test_every_number_of_rows_matches_the_oracle(device, bits, group, num_rows, dtype):
    weight, dense = weight_on(device, (33, 576), group, bits, bits == 4)
    assert_matches_the_oracle(random(device, num_rows, 576, dtype=dtype), weight, dense)


@on_device
@pytest.mark.parametrize("width", [1, 2, 9, 30, 255, 257])
def test_a_scale_per_row_goes_with_any_number_of_channels(device, width):
    weight, dense = weight_on(device, (5, width), width, 8, True)
    assert_matches_the_oracle(random(device, 2, width), weight, dense)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    "around",
    [{"norm"}, {"residual"}, {"norm", "swiglu"}, {"norm", "residual", "swiglu"}],
    ids=lambda around: "+".join(sorted(around)),
)
def test_what_surrounds_a_product_is_part_of_it(device, bits, with_mins, group, dtype, around):
    swiglu = "swiglu" in around
    weight, dense = weight_on(device, (20 * (1 + swiglu), 128), group, bits, with_mins)
    x = random(device, 2, 3, 128, dtype=dtype)
    norm = (random(device, 128, dtype=dtype, seed=7), 1e-5) if "norm" in around else None
    added = random(device, 2, 3, 20, dtype=dtype, seed=8)
    residual = added if "residual" in around else None
    assert_matches_the_oracle(x, weight, dense, norm=norm, residual=residual, swiglu=swiglu)


@on_device
@pytest.mark.parametrize("exponent", [-90, -20, 20, 60])
def test_the_size_of_a_row_changes_no_bit_but_its_exponent(device, exponent):
    weight, _ = weight_on(device, (33, 256), 32, 8, False)
    x = random(device, 3, 256, dtype=torch.bfloat16)
    large = x * torch.tensor([[1.0], [2.0**exponent], [1.0]], device=device)
    expected = multiply(x, weight)
    expected[1] *= 2.0**exponent
    assert torch.equal(multiply(large.bfloat16(), weight), expected)


@on_device
def test_small_elements_beside_a_large_one_keep_their_bits(device):
    weight, dense = weight_on(device, (33, 256), 256, 8, False)
    x = random(device, 1, 256, dtype=torch.bfloat16)
    x[0, 0] = 2.0**16
    without = dense.clone()
    without[:, 0] = weight.codes[:, 0] = 0
    small = x.double().clone()
    small[0, 0] = 0
    y = multiply(x, weight, residual=torch.zeros(1, 33, device=device, dtype=torch.bfloat16))
    torch.testing.assert_close(y.double(), small @ without.to(device).T, rtol=2**-8, atol=1e-4)


@on_device
def test_a_row_of_zeros_gives_zeros(device):
    weight, _ = weight_on(device, (20, 64), 32, 4, True)
    assert torch.equal(
        multiply(torch.zeros(2, 64, device=device), weight), torch.zeros(2, 20).to(device)
    )


@on_device
@pytest.mark.parametrize("group", [32, 64])
def test_what_is_not_finite_in_a_row_makes_that_row_nan_and_no_other(device, group):
    weight, _ = weight_on(device, (32, 64), group, 8, True)
    x = torch.ones(3, 64, device=device)
    x[0, 5], x[2, 63] = torch.nan, torch.inf
    finite = multiply(x, weight).isfinite()
    assert not finite[0].any() and not finite[2].any() and finite[1].all()


@on_device
def test_rows_may_be_strided(device):
    weight, dense = weight_on(device, (20, 64), 32, 4, False)
    assert_matches_the_oracle(random(device, 2, 3, 2, 64)[:, :, 1], weight, dense)
    assert_matches_the_oracle(random(device, 64, 3).T, weight, dense)


@on_device
def test_many_channels_of_few_rows_are_shared_among_programs(device):
    weight, dense = weight_on(device, (5, 2048), 32, 4, True)
    assert triton_linear.choose_num_shares(torch.device(device), 5, 2048) == 8
    assert_matches_the_oracle(random(device, 1, 2048), weight, dense)


@pytest.mark.parametrize("group", [48, 512])
def test_groups_that_do_not_fill_a_tile_are_refused(group):
    weight, _ = seeded_weight((4, 2 * group), group, 8, False)
    with pytest.raises(ValueError, match=f"groups of {group} channels"):
        multiply(torch.ones(1, 2 * group), weight)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_compiled_without_a_break_it_still_matches_the_oracle(device, with_norm, dtype):
    weight, dense = weight_on(device, (40, 64), 64, 8, True)
    norm = (random(device, 64, dtype=dtype, seed=7), 1e-5) if with_norm else None
    x, residual = random(device, 1, 64, dtype=dtype), random(device, 1, 20, dtype=dtype, seed=8)

    function = torch.compile(multiply, fullgraph=True)
    around = {"norm": norm, "residual": residual, "swiglu": True}
    assert_matches_the_oracle(x, weight, dense, function, **around)


@pytest.fixture
def bytes_read(monkeypatch):
    """How often each address is loaded, as the interpreter goes on."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")._interpreter
    load, addresses = interpreter.load, []

    def recorded_load(pointers, mask, other, dtype):
        first = pointers[mask]
        addresses.extend(
            address + offset for address in first.tolist() for offset in range(dtype.itemsize)
        )
        return load(pointers, mask, other, dtype)

    monkeypatch.setattr(interpreter, "load", recorded_load)
    return addresses


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone can tell what was read")
@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("num_rows", [1, 16])
def test_each_byte_of_a_weight_is_read_once(bytes_read, bits, with_mins, num_rows):
    weight, _ = seeded_weight((70, 320), 32, bits, with_mins)
    multiply(torch.ones(num_rows, 320), weight)
    for part in weight.parts:
        offsets = [address - part.data_ptr() for address in bytes_read]
        inside = sorted(offset for offset in offsets if 0 <= offset < part.nbytes)
        assert inside == list(range(part.nbytes))


@pytest.mark.cuda
@not_interpreted
@pytest.mark.parametrize("num_rows", [16, 17])
def test_many_rows_on_a_gpu_are_multiplied_by_the_library(num_rows):
    weight, dense = weight_on("cuda", (40, 256), 256, 8, False)
    x = random("cuda", num_rows, 256)
    with torch.profiler.profile() as profile:
        y = quantized_linear(x, weight)
    names = {event.name for event in profile.events()}
    assert (triton_linear.NAME in names) == (num_rows <= 16)
    torch.testing.assert_close(y.double(), x.double() @ dense.cuda().T, atol=1e-4, rtol=0)


@pytest.mark.cuda
@not_interpreted
def test_a_captured_graph_gives_the_same_bits():
    weight, _ = weight_on("cuda", (40, 2048), 32, 4, True)
    x, residual = random("cuda", 1, 2048), random("cuda", 1, 20, seed=8)
    expected = multiply(x, weight, None, residual, True)  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = multiply(x, weight, None, residual, True)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.cuda
@not_interpreted
def test_addresses_beyond_2_to_the_31_are_right():
    num_rows, width = 2**20 + 3, 2112
    codes = torch.zeros(num_rows, width, dtype=torch.int8, device="cuda")
    codes[-1], codes[0] = 1, 2
    scales = torch.ones(num_rows, 1, device="cuda")
    x = torch.ones(1, width, device="cuda")
    around = (None, num_rows, None, 0.0, None, False)
    y = triton_linear.quantized_linear(x, codes, scales, *around)
    assert y[0, [0, 1, -2, -1]].tolist() == [2 * width, 0, 0, width]
