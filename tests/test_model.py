import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, seeded_model
from plain_llama import frequencies, full_forward

from kv_cache import make_caches
from model import Transformer
from model_config import ModelConfig, RopeScaling
from rope import rope_frequencies

IDS = torch.randint(0, 320, (1, 48), generator=torch.Generator().manual_seed(3))


def prefill_hidden(model, ids, dtype="fp32"):
    caches = make_caches(model.config, (dtype, dtype), 1, 128)
    return model(ids, torch.zeros(1, dtype=torch.long), caches, past_len=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 6},
        {"num_kv_heads": 1},
        {"num_heads": 14, "num_kv_heads": 2},
        {"head_dim": 40},
        {"tie_embeddings": True},
        {"rope_theta": 100000.0, "norm_eps": 1e-6},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True},
        {"qk_norm": True, "head_dim": 40},
    ],
    ids=str,
)
def test_logits_equal_a_forward_without_cache(changes):
    model = seeded_model(dataclasses.replace(TINY, **changes))
    logits = model.logits(prefill_hidden(model, IDS))[0]
    expected = full_forward(model, IDS[0].tolist()).float()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_tied_head_is_the_embedding():
    model = Transformer(dataclasses.replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_logits_are_fp32_of_only_the_rows_asked_for(tiny_model):
    x = prefill_hidden(tiny_model, IDS)
    last = tiny_model.logits(x[:, -1])
    assert last.shape == (1, TINY.vocab_size)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, tiny_model.logits(x)[:, -1])


SCALINGS = [
    None,
    RopeScaling(kind="linear", factor=4.0),
    RopeScaling(kind="llama3", factor=8.0),
    RopeScaling(kind="yarn", factor=4.0, attention_factor=0.7),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind if s else "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_is_fp64_rounded_once_at_the_end_of_any_context(dtype, scaling):
    config = dataclasses.replace(TINY, rope_scaling=scaling, head_dim=64, rope_theta=500000.0)
    model = seeded_model(config, dtype=dtype)
    model.rope_freqs = rope_frequencies(config)
    seen = {}
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.update(rope=args[1]))
    # The positions are past the end of any small cache.
    caches = [SimpleNamespace(attend=lambda q, *_: q)] * TINY.num_layers
    model(IDS, torch.tensor([131_000]), caches)
    positions = torch.arange(131_000, 131_048, dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(frequencies(config), dtype=torch.float64))
    scale = scaling.attention_factor if scaling else 1
    for part, exact in zip(seen["rope"], (angles.cos(), angles.sin()), strict=True):
        assert part.dtype == torch.float32
        assert (part[0] - scale * exact).abs().max() < 2**-24


def scaled(**scaling):
    return rope_frequencies(dataclasses.replace(TINY, rope_scaling=RopeScaling(**scaling)))


def test_linear_scaling_divides_every_frequency():
    assert torch.equal(scaled(kind="linear", factor=4.0), rope_frequencies(TINY) / 4)


def test_frequency_factors_divide_one_by_one():
    factors = tuple(float(i) for i in range(1, 9))
    expected = rope_frequencies(TINY) / torch.tensor(factors, dtype=torch.float64)
    assert torch.equal(scaled(kind="factors", freq_factors=factors), expected)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (500000.0, RopeScaling(kind="llama3", factor=8.0)),
        (10000.0, RopeScaling(kind="llama3", factor=3.0, high_freq_factor=2.5)),
        (1e6, RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768)),
        (10000.0, RopeScaling(kind="yarn", factor=40.0, original_max_seq_len=4096, truncate=False)),
        (1e4, RopeScaling(kind="yarn", factor=2.0, original_max_seq_len=64, beta_fast=8.0)),
    ],
    ids=str,
)
def test_llama3_and_yarn_scaling_equal_their_published_formulas(theta, scaling):
    config = dataclasses.replace(TINY, head_dim=128, rope_theta=theta)
    plain = rope_frequencies(config)
    config = dataclasses.replace(config, rope_scaling=scaling)
    freqs = rope_frequencies(config)
    expected = torch.tensor(frequencies(config), dtype=torch.float64)
    torch.testing.assert_close(freqs, expected, rtol=1e-12, atol=0)
    assert len({round(r, 3) for r in (plain / freqs).tolist()}) > 2  # kept, divided and blended


def test_an_attention_factor_scales_both_sides_of_a_score():
    config = dataclasses.replace(TINY, rope_scaling=RopeScaling(kind="linear", attention_factor=3))
    model = seeded_model(config)
    expected = full_forward(model, IDS[0].tolist()).float()
    torch.testing.assert_close(
        model.logits(prefill_hidden(model, IDS))[0], expected, atol=1e-4, rtol=1e-4
    )
    plain = seeded_model(dataclasses.replace(config, rope_scaling=None))
    assert (full_forward(plain, IDS[0].tolist()) - expected).abs().max() > 0.1


def test_a_model_without_options_has_no_parameters_for_them(tiny_model):
    names = {name.rpartition(".")[2] for name, _ in tiny_model.named_parameters()}
    assert names == {"weight"}
    assert not any("q_norm" in name for name, _ in tiny_model.named_parameters())


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="rope scaling 'longrope'"):
        scaled(kind="longrope")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"kind": "linear", "factor": 0.5}, "rope factor 0.5: numbers from 1 on"),
        (
            {"kind": "llama3", "low_freq_factor": 4.0},
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
        ({"kind": "yarn", "beta_slow": 33.0}, "beta_fast 32.0 is not above beta_slow 33.0"),
    ],
)
def test_scalings_that_cannot_be_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        scaled(**scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "6 heads over 4 KV heads"),
        ({"head_dim": 15}, "head_dim 15: even"),
        ({"head_dim": 2}, "head_dim 2: even"),
        ({"rope_theta": 1.0}, "rope_theta 1.0: numbers above 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_no_buffer_grows_with_the_context():
    sizes = []
    for max_seq_len in (512, 1 << 20):
        model = Transformer(ModelConfig(**{**vars(TINY), "max_seq_len": max_seq_len}))
        sizes.append(sum(buffer.nbytes for buffer in model.buffers()))
    assert sizes[0] == sizes[1] == TINY.head_dim // 2 * 8
