import pytest
import torch
import torch.nn.functional as F
from cache_case import INSTRUCTION_SETS

from kernels import native
from kernels.linear import MAX_ROWS, linear, rms_norm


@pytest.fixture(params=["plain", *INSTRUCTION_SETS])
def implementation(request, monkeypatch):
    """Plain PyTorch, then every instruction set that this machine can run."""
    if request.param == "plain":
        monkeypatch.setattr(native, "is_loaded", lambda: False)
        yield request.param
        return
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield request.param
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


def oracle(x, weight, norm=None, residual=None, swiglu=False):
    """In fp64, without any rounding in between."""
    h = x.double()
    if norm:
        h = h / (h.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    y = h @ weight.double().T
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual.double() + y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(
    ("with_residual", "swiglu"), [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("shape", [(1, 576, 96), (3, 40, 50), (5, 129, 31), (16, 8, 2)])
def test_linear_equals_the_fp64_oracle(
    implementation, dtype, with_norm, with_residual, swiglu, shape
):
    rows, in_features, out_features = shape
    torch.manual_seed(0)
    x = torch.randn(rows, in_features).to(dtype)
    weight = (torch.randn(out_features * (1 + swiglu), in_features) / in_features**0.5).to(dtype)
    norm = (torch.rand(in_features).to(dtype), 1e-5) if with_norm else None
    residual = torch.randn(rows, out_features).to(dtype) if with_residual else None
    y = linear(x, weight, norm, residual, swiglu=swiglu)
    assert y.dtype == dtype
    # Results of about 1, rounded once; PyTorch also rounds norm and halves, a few times.
    atol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    expected = oracle(x, weight, norm, residual, swiglu)
    torch.testing.assert_close(y.double(), expected, atol=atol, rtol=0)


def test_a_row_alone_and_among_others_gives_the_same(implementation):
    torch.manual_seed(0)
    x, weight = torch.randn(MAX_ROWS, 64), torch.randn(48, 64)
    together = linear(x, weight)
    alone = torch.cat([linear(row[None], weight) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_rows_may_be_strided_and_have_more_dimensions(implementation):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 2, 64)[:, :, 1], torch.randn(48, 64)
    torch.testing.assert_close(linear(x, weight), x @ weight.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_row_stays_non_finite(implementation, bad):
    x = torch.ones(1, 64)
    x[0, 3] = bad
    norm = (torch.ones(64), 1e-5)
    assert not linear(x, torch.ones(8, 64), norm).isfinite().all()
    assert not linear(x, torch.ones(8, 64), swiglu=True).isfinite().all()


def test_gradients_reach_a_weight_that_asks_for_them():
    x, weight = torch.randn(1, 64), torch.randn(8, 64, requires_grad=True)
    linear(x, weight, (torch.ones(64), 1e-5)).sum().backward()
    expected = rms_norm(x, torch.ones(64), 1e-5).expand(8, 64)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 100), torch.randn(70, 100)
    before = torch.get_num_threads()
    expected = linear(x, weight)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, weight), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match="for rows of 64"):
        linear(torch.ones(1, 64), torch.ones(8, 32))


def test_the_norm_is_the_root_mean_square():
    x, weight = torch.randn(3, 40), torch.rand(40)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
def test_a_norm_of_another_width_is_refused():
    with pytest.raises(ValueError, match="for rows of 64"):
        linear(torch.ones(1, 64), torch.ones(8, 64), (torch.ones(32), 1e-5))


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
@pytest.mark.parametrize("x", [torch.ones(1, 0), torch.ones(0), torch.tensor(1.0)], ids=str)
def test_rows_of_no_channels_are_refused(x):
    with pytest.raises(ValueError, match="no channels"):
        torch.ops.kv_fast.linear(x, torch.ones(4, x.numel()), None, 0.0, None, False)
