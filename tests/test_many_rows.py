"""Products of many rows by the library, from blocks of every kind of weight."""

import pytest
import torch
from cache_case import INSTRUCTION_SETS
from quantized_case import KINDS, ROUNDING, SHAPES, seeded_weight

from kernels import many_rows, native
from kernels.linear import MAX_ROWS, linear
from kernels.quantized import quantized_linear

NUM_ROWS = MAX_ROWS + 1


@pytest.fixture(params=["plain", *INSTRUCTION_SETS])
def prepared(request, monkeypatch):
    """Weights of codes as plain PyTorch reads them, then as every instruction set here does."""
    if request.param == "plain":
        monkeypatch.setattr(native, "is_loaded", lambda: False)
        yield lambda weight: weight
        return
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield lambda weight: weight.tiled()
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


@pytest.fixture(params=["emulated", "multiplied"], autouse=True)
def processor(request, monkeypatch):
    """Without products of bf16 and fp16, then with them."""
    emulated = {torch.bfloat16, torch.float16} if request.param == "emulated" else set()
    monkeypatch.setattr(many_rows, "EMULATED", emulated)


def rows_of_x(width, dtype, *sizes):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(*(sizes or (NUM_ROWS,)), width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("bits", "with_mins"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_codes_equals_the_fp64_oracle(prepared, dtype, bits, with_mins, shape):
    weight, dense = seeded_weight(shape[:2], shape[2], bits, with_mins)
    x = rows_of_x(shape[1], dtype)
    y = quantized_linear(x, prepared(weight))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), x.double() @ dense.T, atol=ROUNDING[dtype], rtol=0)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_bytes", [1, 3 * 40 * 16, 1 << 21])
def test_a_dense_product_equals_the_fp64_oracle(prepared, dtype, num_bytes, monkeypatch):
    monkeypatch.setattr(many_rows, "BLOCK_BYTES", num_bytes)
    dense = (rows_of_x(40, torch.float32, 100) / 40**0.5).to(dtype)
    x = rows_of_x(40, dtype, 2, NUM_ROWS)
    y = linear(x, dense)
    assert y.dtype == dtype
    expected = x.double() @ dense.double().T
    torch.testing.assert_close(y.double(), expected, atol=ROUNDING[dtype], rtol=0)


@pytest.mark.parametrize("num_bytes", [1, 32 * 64 * 4, 48 * 64 * 4, 1 << 21])
@pytest.mark.parametrize("num_features", [16, 96, 100])
def test_blocks_of_any_size_give_the_same(prepared, num_bytes, num_features, monkeypatch):
    monkeypatch.setattr(many_rows, "BLOCK_BYTES", num_bytes)
    weight, dense = seeded_weight((num_features, 64), 32, 4, True)
    x = rows_of_x(64, torch.float32)
    y = quantized_linear(x, prepared(weight))
    torch.testing.assert_close(y.double(), x.double() @ dense.T, atol=1e-5, rtol=0)


def test_rows_may_be_strided_and_a_residual_and_gates_follow(prepared):
    weight, dense = seeded_weight((64, 128), 32, 8, True)
    x = rows_of_x(128, torch.float32, 2, NUM_ROWS, 2)[:, :, 1]
    residual = torch.ones(2, NUM_ROWS, 32)
    y = quantized_linear(x, prepared(weight), residual=residual, swiglu=True)
    gate, up = (x.double() @ dense.T).chunk(2, -1)
    expected = 1 + gate * gate.sigmoid() * up
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_fp32_so_that_a_result_is_rounded_once(prepared, dtype):
    # In bf16 a sum of 4096 ones and a half would stay at 256.
    y = linear(torch.ones(NUM_ROWS, 4096, dtype=dtype), torch.full((3, 4096), 0.5, dtype=dtype))
    assert (y == 2048).all()


def test_what_is_not_finite_in_a_row_makes_that_row_nan_and_no_other(prepared):
    weight = prepared(seeded_weight((32, 64), 32, 8, False)[0])
    x = torch.ones(NUM_ROWS, 64, dtype=torch.bfloat16)
    x[0, 5], x[2, 63] = torch.nan, torch.inf
    finite = quantized_linear(x, weight).isfinite()
    assert not finite[[0, 2]].any()
    assert finite[[1, *range(3, NUM_ROWS)]].all()


def test_gradients_reach_a_dense_weight_that_asks_for_them(prepared):
    x = rows_of_x(64, torch.bfloat16)
    weight = torch.zeros(8, 64, dtype=torch.bfloat16, requires_grad=True)
    linear(x, weight).sum().backward()
    expected = x.float().sum(0).expand(8, 64)
    torch.testing.assert_close(weight.grad.float(), expected, atol=0.1, rtol=0.01)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
def test_compiled_it_is_the_same_call():
    weight = seeded_weight((64, 128), 32, 4, True)[0].tiled()
    x = rows_of_x(128, torch.bfloat16)

    def step(x):
        return quantized_linear(x, weight, (torch.ones(128).bfloat16(), 1e-5), swiglu=True) * 2

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(x), step(x))


WEIGHT = seeded_weight((32, 64), 32, 4, True)[0].tiled()


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "0 parts"),
        ([torch.ones(32, 64)] * 4, "4 parts"),
        ([torch.ones(32, 1)], "for 32 features of 64"),
        ([torch.ones(48, 64)], "for 32 features of 64"),
        ([torch.ones(32, 64), torch.ones(32, 1)], "for 32 features of 64"),
        ([WEIGHT.codes[:1], *WEIGHT.parts[1:]], "for 32 features of 64"),
        ([WEIGHT.codes.short(), *WEIGHT.parts[1:]], "codes of Short"),
        ([WEIGHT.codes, WEIGHT.scales[:1].repeat(2, 1, 1, 1)[:, :, :8], WEIGHT.mins], "scales"),
    ],
)
def test_parts_that_are_no_weight_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        many_rows.product_of_parts(torch.ones(NUM_ROWS, 64), parts, 32)
