"""The Triton attention: interpreted on the CPU, run on a GPU, and compiled for GPUs not present.

Triton decides once per process, at import, whether it interprets. So the tests on CPU tensors run
in a pytest process of their own, which one test of the ordinary run starts.
"""

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from triton.backends.compiler import GPUTarget  # noqa: E402

from kernels import triton_decode  # noqa: E402
from kv_formats import FORMATS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

INTERPRETED = triton.knobs.runtime.interpret

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")

on_device = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.cuda)]
)

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Of outputs of about 1, by the type of the product p . v. Scores are fp32 in all of them."""


REGISTERS_PER_SM = 65536

SHARED_BYTES_PER_SM = {80: 164 * 1024, 90: 228 * 1024}
"""By architecture; the driver takes 1024 of them for each program."""


class Case(NamedTuple):
    """The arguments of stored_attention."""

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    start_pos: Tensor
    k_format: str
    v_format: str
    sm_scale: float


def make_case(
    device, start_pos, formats=("int8", "int8"), *, shape=(1, 3, 1, 32), slots=256, q_dtype="fp32"
):
    """shape: (Hkv, G, T, D). Slots that no query may read hold NaN, and 127 where codes are."""
    num_kv_heads, group_size, num_queries, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(len(start_pos), *sizes, generator=generator)

    k, v = (
        [part.to(device) for part in FORMATS[name].encode(random(num_kv_heads, slots, head_dim))]
        for name in formats
    )
    q = random(num_kv_heads * group_size, num_queries, head_dim)
    q = q.to(device, FORMATS[q_dtype].dtype)
    case = Case(q, k, v, torch.tensor(start_pos, device=device), *formats, head_dim**-0.5)
    fill_unread_slots(case, float("nan"), 127)
    return case


def fill_unread_slots(case, float_value, code):
    for row, filled in enumerate(case.start_pos.tolist()):
        for part in (*case.k, *case.v):
            value = float_value if part.is_floating_point() else code
            part[row, :, filled + case.q.shape[2] - 1 :] = value


def oracle(case):
    """Out and lse in fp64, from the decoded cache."""
    k = FORMATS[case.k_format].decode(tuple(case.k), torch.float64)
    v = FORMATS[case.v_format].decode(tuple(case.v), torch.float64)
    tokens = torch.arange(case.q.shape[2], device=k.device)[:, None]
    slots = torch.arange(k.shape[2], device=k.device)
    visible = slots < case.start_pos[:, None, None] + tokens  # [B, T, S]
    v = v.masked_fill(~visible.any(1)[:, None, :, None], 0)
    q_groups = case.q.double().unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, T, D]
    scores = torch.einsum("bhgtd,bhsd->bhgts", q_groups, k) * case.sm_scale
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])
    return torch.einsum("bhgts,bhsd->bhgtd", weights, v).flatten(1, 2), lse.flatten(1, 2)


def variant_of(case):
    return triton_decode.choose_variant(case.q, case.k[0], case.v[0], case.k_format, case.v_format)


def assert_same(result, expected, tolerance):
    for actual, wanted, atol in zip(result, expected, (tolerance, 1e-4), strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=atol)


def assert_matches_the_oracle(case):
    tolerance = TOLERANCES[variant_of(case).v_dot.name]
    assert_same(triton_decode.stored_attention(*case), oracle(case), tolerance)


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
def test_every_shape_matches_the_oracle(device, shape, q_dtype):
    case = make_case(device, [64, 101], ("bf16", "int8"), shape=shape, slots=128, q_dtype=q_dtype)
    assert_matches_the_oracle(case)


@on_device
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("filled", [0, 1, 2, 63, 64, 65, 127, 128, 129, 447, 448, 449, 509, 510])
def test_every_length_matches_the_oracle(device, num_queries, filled):
    case = make_case(device, [filled], shape=(1, 2, num_queries, 16), slots=512)
    assert variant_of(case).tile == 64  # so 8 splits of one tile, on any device
    assert_matches_the_oracle(case)


@on_device
@pytest.mark.parametrize("kv_format", FORMATS)
def test_slots_that_no_query_sees_change_no_bit(device, kv_format):
    case = make_case(device, [0, 70], (kv_format, kv_format), shape=(1, 2, 3, 32))
    results = triton_decode.stored_attention(*case)
    fill_unread_slots(case, 1.0, -3)
    for before, after in zip(results, triton_decode.stored_attention(*case), strict=True):
        assert torch.equal(before, after)


@on_device
def test_every_query_equals_the_same_query_alone(device):
    case = make_case(device, [0, 62], shape=(1, 2, 4, 32), slots=128)
    out, lse = triton_decode.stored_attention(*case)
    for t in range(4):
        alone = case._replace(q=case.q[:, :, t : t + 1], start_pos=case.start_pos + t)
        together = out[:, :, t : t + 1], lse[:, :, t : t + 1]
        assert_same(together, triton_decode.stored_attention(*alone), 1e-5)


@on_device
def test_queries_and_positions_may_have_any_strides_and_width(device):
    case = make_case(device, [100, 100], shape=(1, 4, 2, 32))
    strided_q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.tensor(100, dtype=torch.int32, device=device).expand(2)
    strided = case._replace(q=strided_q, start_pos=positions)
    for actual, wanted in zip(
        triton_decode.stored_attention(*strided),
        triton_decode.stored_attention(*case),
        strict=True,
    ):
        assert torch.equal(actual, wanted)


def test_a_cache_with_gaps_is_refused():
    case = make_case("cpu", [10])
    gaps = [part[:, :, ::2] for part in case.k]
    with pytest.raises(ValueError, match="contiguous"):
        triton_decode.stored_attention(*case._replace(k=gaps))


@pytest.mark.cuda
@not_interpreted
def test_one_captured_graph_serves_every_length():
    case = make_case("cuda", [1024, 1024], slots=1024)
    triton_decode.stored_attention(*case)  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_decode.stored_attention(*case)
    for lengths in ([0, 1], [63, 64], [500, 1024]):
        case.start_pos.copy_(torch.tensor(lengths))
        graph.replay()
        assert_same(captured, oracle(case), 1e-5)


@pytest.mark.cuda
@not_interpreted
def test_addresses_beyond_2_to_the_31_are_right():
    small = make_case("cuda", [200], shape=(2, 4, 1, 128))
    slots = 2**24 + 128  # the second head starts at code 2**31 + 2**14
    codes = torch.empty(1, 2, slots, 128, dtype=torch.int8, device="cuda")
    scale = torch.empty(1, 2, slots, 1, dtype=torch.bfloat16, device="cuda")
    codes[:, :, :256], scale[:, :, :256] = small.k
    large = small._replace(k=[codes, scale], v=[codes, scale])
    expected = oracle(small._replace(v=small.k))
    assert_same(triton_decode.stored_attention(*large), expected, 1e-5)


class AbsentGPU:
    """Lets Triton compile for a GPU of this architecture, which need not exist."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return f"absent sm_{self.arch}"

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


class CompileOnly:
    """Stands in for a kernel: compiles what it is asked to launch, and launches nothing."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = None

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **options):
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **options)

        return compile_kernel


@pytest.fixture
def compile_for(monkeypatch):
    """A function (arch, case) -> the two kernels, compiled as a call with this case would."""

    def compile_kernels(arch, case):
        monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(arch))
        kernels = []
        for name in ("_split_kernel", "_merge_kernel"):
            kernels.append(CompileOnly(getattr(triton_decode, name)))
            monkeypatch.setattr(triton_decode, name, kernels[-1])
        triton_decode.stored_attention(*case)
        return [kernel.compiled for kernel in kernels]

    return compile_kernels


def resource_usage(kernel, folder):
    """Registers (REG) and spilled bytes (STACK, LOCAL) per thread."""
    try:
        cuobjdump = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        pytest.skip(f"Triton's CUDA tools are missing: {error}")
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [cuobjdump, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


@not_interpreted
@pytest.mark.parametrize("arch", SHARED_BYTES_PER_SM)
@pytest.mark.parametrize(
    ("formats", "q_dtype", "num_queries"),
    [
        (("bf16", "bf16"), "bf16", 1),
        (("fp16", "fp16"), "fp16", 1),
        (("fp32", "fp32"), "fp32", 1),
        (("int8", "int8"), "bf16", 1),
        (("int8", "bf16"), "bf16", 1),
        (("bf16", "int8"), "bf16", 5),
    ],
)
def test_two_programs_fit_on_an_sm_without_spills(
    compile_for, tmp_path, arch, formats, q_dtype, num_queries
):
    case = make_case("cpu", [0], formats, shape=(8, 4, num_queries, 128), q_dtype=q_dtype)
    for kernel in compile_for(arch, case):
        usage = resource_usage(kernel, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0
        assert 2 * usage["REG"] * 32 * kernel.metadata.num_warps <= REGISTERS_PER_SM
        assert 2 * (kernel.metadata.shared + 1024) <= SHARED_BYTES_PER_SM[arch]
