"""V rotated before it is stored: the same attention, less error where a channel is large."""

import pytest
import torch
from cache_case import oracle

from config import UserError
from kernels.flash import flash_attention
from kv_cache import KVCache, parse_formats
from kv_formats import ROTATED, V_FORMATS, rotated

OF_V = [name for name in V_FORMATS if name.endswith(ROTATED)]
OUTLIERS = (3, 17, 40)


def hadamard(size):
    """The matrix by its definition: -1 to the number of bits that row and column share."""
    bits = torch.tensor([[bin(i & j).count("1") for j in range(size)] for i in range(size)])
    return (1 - 2 * (bits % 2)).double() / size**0.5


@pytest.mark.parametrize(
    ("width", "size"), [(64, 64), (80, 16), (96, 32), (100, 4), (128, 128), (256, 256), (1, 1)]
)
def test_each_run_of_a_power_of_two_is_multiplied_with_a_hadamard_matrix(width, size):
    x = torch.randn(2, 3, width)
    expected = (x.double().unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2)
    torch.testing.assert_close(rotated(x).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotated(rotated(x)), x, atol=1e-5, rtol=1e-5)


def values(length, dtype=torch.float32):
    v = torch.randn(1, 2, length, 64, generator=torch.Generator().manual_seed(0))
    v[..., OUTLIERS] *= 10
    return v.to(dtype)


def attention_error(v_format):
    """Of one decoded query over 200 stored values with outliers, against fp64, but for these."""
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 6, 201, 64), torch.randn(1, 2, 201, 64), values(201)
    cache = KVCache("fp32", v_format, (1, 2, 256, 64))
    cache.attend(q[:, :, :200], k[:, :, :200], v[:, :, :200], torch.tensor([0]), 0)
    out = cache.attend(q[:, :, 200:], k[:, :, 200:], v[:, :, 200:], torch.tensor([200]))
    expected, _ = oracle(q[:, :, 200:], k, v, [torch.tensor([201])])
    return (out - expected).norm().item() / expected.norm().item()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_outliers_of_v_cost_less(name, implementation):
    assert attention_error(name + ROTATED) < attention_error(name) / 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_chunk_and_the_own_token_stay_exact(dtype):
    q, k = torch.randn(1, 6, 40, 64).to(dtype), torch.randn(1, 2, 40, 64).to(dtype)
    v = values(40, dtype)
    cache = KVCache("int4", "int4-rotated", (1, 2, 128, 64))
    out = cache.attend(q, k, v, torch.tensor([0]), 0)
    assert torch.equal(out, flash_attention(q, k, v, causal=True)[0].to(dtype))
    first = tuple(x[:, :, :1] for x in (q, k, v))
    out = cache.attend(*first, torch.tensor([0]))
    torch.testing.assert_close(out, first[2].repeat_interleave(3, 1))


@pytest.mark.parametrize("name", OF_V)
def test_chunks_behind_the_first_see_what_decoding_sees(name):
    q, k, v = torch.randn(1, 6, 90, 64), torch.randn(1, 2, 90, 64), values(90)
    together, one_by_one = (KVCache("int8", name, (1, 2, 128, 64)) for _ in range(2))
    for cache in (together, one_by_one):
        cache.attend(q[:, :, :80], k[:, :, :80], v[:, :, :80], torch.tensor([0]), 0)
    last = tuple(x[:, :, 80:81] for x in (q, k, v))
    prefilled = together.attend(*last, torch.tensor([80]), 80)
    decoded = one_by_one.attend(*last, torch.tensor([80]))
    torch.testing.assert_close(prefilled, decoded, atol=2e-3, rtol=1e-3)


def test_it_is_of_quantised_v_alone():
    assert OF_V == ["int8-rotated", "fp8-rotated", "int4-rotated"]
    assert parse_formats("int8-channel,int4-rotated") == ("int8-channel", "int4-rotated")
    for spec in ("int4-rotated", "int4-rotated,int4", "int8,bf16-rotated"):
        with pytest.raises(UserError, match="names with -channel are of K alone"):
            parse_formats(spec)
