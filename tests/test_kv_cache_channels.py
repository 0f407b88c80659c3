"""Scales of K's channels: q . k stays as it is, and large channels no longer spoil the others."""

import dataclasses

import pytest
import torch
from cache_case import oracle
from conftest import TINY, seeded_model

from config import UserError
from engine import Engine, Sampling, generate
from kernels.flash import flash_attention
from kv_cache import (
    FIRST_KEYS,
    KVCache,
    channel_scales_bytes,
    make_caches,
    parse_formats,
    scaled,
)
from kv_formats import K_FORMATS, MAX_EXPONENT, PER_CHANNEL, channel_scales
from quality import score

OF_CHANNELS = [name for name in K_FORMATS if name.endswith(PER_CHANNEL)]
OUTLIERS = (3, 17, 40)


def keys(batch=1, heads=2, length=64, *, outlier=100.0):
    k = torch.randn(batch, heads, length, 64, generator=torch.Generator().manual_seed(0))
    k[..., OUTLIERS] *= outlier
    return k


def test_every_quantised_format_has_one_and_no_plain_one():
    assert OF_CHANNELS == ["int8-channel", "fp8-channel", "int4-channel"]


@pytest.mark.parametrize(
    ("spec", "formats"),
    [
        ("int8-channel", ("int8-channel", "int8")),
        ("int4-channel", ("int4-channel", "int4")),
        ("int8-channel,int4", ("int8-channel", "int4")),
        ("int4-channel,bf16", ("int4-channel", "bf16")),
    ],
)
def test_alone_it_is_of_k_and_v_is_stored_alike_without(spec, formats):
    assert parse_formats(spec) == formats


@pytest.mark.parametrize("spec", ["int8,int8-channel", "bf16-channel", "int8-channel,", "-channel"])
def test_v_and_plain_formats_have_no_channel_scales(spec):
    with pytest.raises(UserError, match="--kv_cache_quantization .*: give one of .*int8-channel"):
        parse_formats(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_powers_of_two_that_even_out_the_channels(dtype):
    k = keys().to(dtype)
    scales = channel_scales(k)
    assert scales.shape == (2, 64)
    assert scales.dtype == torch.float32
    assert torch.equal(scales.log2(), scales.log2().round())
    even = (k.float() / scales[:, None]).abs().amax((0, 2))
    assert (even.amax(-1) / even.amin(-1) <= 2.01).all()
    assert (scales[:, OUTLIERS] >= 32 * scales.median()).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k: k.zero_(),
        lambda k: k.fill_(torch.nan),
        lambda k: k.index_fill_(-1, torch.tensor([5]), torch.inf),
        lambda k: k.index_fill_(-1, torch.tensor([5]), 0.0),
        lambda k: k.index_fill_(-1, torch.tensor([5]), 1e30),
    ],
)
def test_scales_of_any_keys_are_finite_and_within_bounds(spoil):
    scales = channel_scales(spoil(keys()))
    assert (scales >= 2.0**-MAX_EXPONENT).all()
    assert (scales <= 2.0**MAX_EXPONENT).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_rounds_nothing(dtype):
    q, k = torch.randn(1, 6, 3, 64).to(dtype), keys(length=3).to(dtype)
    channels = channel_scales(k)
    q_scaled, k_scaled = scaled(q, k, channels)
    by_head = channels[:, None]
    assert torch.equal(q_scaled, (q.float() * by_head.repeat_interleave(3, 0)).to(dtype))
    assert torch.equal(k_scaled.float() * by_head, k.float())
    assert q_scaled.dtype == k_scaled.dtype == dtype


def attention_error(k_format):
    """Of one decoded query over 200 stored keys with outliers, against fp64."""
    torch.manual_seed(3)
    k, v, q = keys(length=201), torch.randn(1, 2, 201, 64), torch.randn(1, 6, 201, 64)
    q[..., OUTLIERS] /= 100  # so that scores do not all hang on them
    cache = KVCache(k_format, "fp32", (1, 2, 256, 64))
    cache.attend(q[:, :, :200], k[:, :, :200], v[:, :, :200], torch.tensor([0]), 0)
    out = cache.attend(q[:, :, 200:], k[:, :, 200:], v[:, :, 200:], torch.tensor([200]))
    expected, _ = oracle(q[:, :, 200:], k, v, [torch.tensor([201])])
    return (out - expected).norm().item() / expected.norm().item()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_outliers_of_k_no_longer_spoil_attention(name, implementation):
    assert attention_error(name + PER_CHANNEL) < attention_error(name) / 10


def test_a_first_chunk_and_the_own_token_stay_exact():
    q, k, v = torch.randn(1, 6, 40, 64), keys(length=40), torch.randn(1, 2, 40, 64)
    cache = KVCache("int8-channel", "int8", (1, 2, 128, 64))
    out = cache.attend(q, k, v, torch.tensor([0]), 0)
    assert torch.equal(out, flash_attention(q, k, v, causal=True)[0])
    first = tuple(x[:, :, :1] for x in (q, k, v))
    out = cache.attend(*first, torch.tensor([0]))
    torch.testing.assert_close(out, first[2].repeat_interleave(3, 1))


def test_scales_are_those_of_the_first_keys_and_last_until_another_prompt_begins():
    cache = KVCache("int8-channel", "int8", (2, 2, 1024, 64))
    assert torch.equal(cache.k_channels, torch.ones(2, 64))
    k = keys(2, length=900, outlier=1.0)
    k[:, :, FIRST_KEYS:] *= keys(2, length=900)[:, :, FIRST_KEYS:]
    q, v, start = torch.randn(2, 6, 900, 64), torch.randn(2, 2, 900, 64), torch.tensor([0, 0])
    cache.attend(q, k, v, start, 0)
    scales = cache.k_channels.clone()
    assert torch.equal(scales, channel_scales(k[:, :, :FIRST_KEYS]))
    some = tuple(x[:, :, :9] for x in (q, 50 * k, v))
    cache.attend(*some, start + 900, 900)
    cache.attend(*some, start + 909)
    assert torch.equal(cache.k_channels, scales)
    cache.attend(*some, start, 0)
    assert torch.equal(cache.k_channels, channel_scales(some[1]))


@pytest.mark.parametrize("name", OF_CHANNELS)
def test_chunks_behind_the_first_see_what_decoding_sees(name):
    q, k, v = torch.randn(1, 6, 90, 64), keys(length=90), torch.randn(1, 2, 90, 64)
    q[..., OUTLIERS] /= 100  # else rounding decides which of two scores in the thousands is larger
    together, one_by_one = (KVCache(name, "int8", (1, 2, 128, 64)) for _ in range(2))
    for cache in (together, one_by_one):
        cache.attend(q[:, :, :80], k[:, :, :80], v[:, :, :80], torch.tensor([0]), 0)
    last = tuple(x[:, :, 80:81] for x in (q, k, v))
    prefilled = together.attend(*last, torch.tensor([80]), 80)
    decoded = one_by_one.attend(*last, torch.tensor([80]))
    torch.testing.assert_close(prefilled, decoded, atol=2e-3, rtol=1e-3)


def outlier_model():
    """TINY with K channels 100 times the rest, and q's smaller by as much: the same function."""
    model = seeded_model(dataclasses.replace(TINY, head_dim=64, num_layers=2))
    width = 64 * TINY.num_heads
    for layer in model.layers:
        weight = layer.attention.qkv_proj.weight.data
        q, k = (
            part.unflatten(0, (-1, 64)) for part in weight[: width + 64 * 2].split((width, 128))
        )
        for channel in (5, 23):  # with the channel that rope turns it into
            for each in (channel, channel + 32):
                q[:, each] /= 100
                k[:, each] *= 100
    return model


def mean_kl(model, k_format):
    ids = torch.randint(3, 300, (1, 160), generator=torch.Generator().manual_seed(1))
    logits = []
    for name in ("fp32", k_format):
        caches = make_caches(model.config, (name, "fp32"), 1, 256)
        engine = Engine(model, caches, compile=False)
        engine.prefill(ids[:, :128])
        with torch.inference_mode():
            x = [engine.model(ids[:, i : i + 16], torch.tensor([i]), caches) for i in (128, 144)]
        logits.append(model.logits(torch.cat(x, 1)[0]))
    return score(logits[1], logits[0], ids[0, -32:]).kl.mean().item()


def test_int8_channel_with_outliers_costs_at_most_twice_what_int8_costs_without():
    plain = seeded_model(dataclasses.replace(TINY, head_dim=64, num_layers=2))
    without, spoiled = mean_kl(plain, "int8"), mean_kl(outlier_model(), "int8")
    assert spoiled > 4 * without
    assert mean_kl(outlier_model(), "int8-channel") <= 2 * without


@pytest.mark.parametrize("name", OF_CHANNELS)
def test_the_scales_are_counted_in_the_bytes_of_the_cache(name):
    base = name.removesuffix(PER_CHANNEL)
    with_scales, without = (make_caches(TINY, (k, base), 1, 128) for k in (name, base))
    extra = sum(b.nbytes for b in with_scales.buffers()) - sum(b.nbytes for b in without.buffers())
    expected = 4 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
    assert extra == channel_scales_bytes(TINY, (name, base)) == expected
    assert channel_scales_bytes(TINY, (base, base)) == 0


@pytest.mark.parametrize("spec", [*OF_CHANNELS, "int8-channel,int4-rotated", "fp8,fp8-rotated"])
def test_compiled_ids_equal_eager_ids(spec):
    model, ids = seeded_model(), torch.arange(3, 40)[None]
    answers = []
    for compile in (False, True):
        engine = Engine(model, make_caches(TINY, parse_formats(spec), 1, 128), compile=compile)
        answers.append([int(t) for t in generate(engine, ids, 40, Sampling(320, temperature=0))])
    assert answers[0] == answers[1]
