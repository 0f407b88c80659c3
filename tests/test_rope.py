"""Frequencies and angles of rope, rounded as those that checkpoints were trained with."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, seeded_model
from plain_llama import frequencies

from model_config import RopeScaling
from rope import rope_frequencies

LLAMA3 = RopeScaling(kind="llama3", factor=8.0)
YARN = RopeScaling(kind="yarn", factor=3.0, original_max_seq_len=4096)

# `LlamaRotaryEmbedding(config).inv_freq` of transformers 5.24.0, theta 500000, head_dim 16.
OF_TRANSFORMERS = {
    None: "1 0.193922758 0.0376060307 0.00729266508 0.00141421345 0.000274248188 5.31829573e-05 "
    "1.03133852e-05",
    RopeScaling(kind="linear", factor=3.0): "0.333333343 0.0646409169 0.0125353439 0.00243088836 "
    "0.000471404492 9.14160628e-05 1.77276524e-05 3.43779516e-06",
    LLAMA3: "1 0.193922758 0.0376060307 0.00729266508 0.000524846022 3.42810235e-05 6.64786967e-06 "
    "1.28917316e-06",
    YARN: "1 0.193922758 0.0292491335 0.00405148044 0.000471404521 9.14160555e-05 1.77276524e-05 "
    "3.43779493e-06",
    dataclasses.replace(YARN, truncate=False): "1 0.193922758 0.0356786549 0.00461787684 "
    "0.000471404521 9.14160555e-05 1.77276524e-05 3.43779493e-06",
}


def kind(value):
    return value.kind if isinstance(value, RopeScaling) else str(value)


@pytest.mark.parametrize(("scaling", "expected"), OF_TRANSFORMERS.items(), ids=kind)
def test_frequencies_are_those_of_transformers_bit_for_bit(scaling, expected):
    config = dataclasses.replace(TINY, rope_theta=5e5, rope_scaling=scaling, head_dim=16)
    freqs = rope_frequencies(config)
    assert torch.equal(freqs, torch.tensor([float(each) for each in expected.split()]))
    assert freqs.dtype == torch.float32


BLENDS = [
    (5e5, LLAMA3),
    (1e4, RopeScaling(kind="llama3", factor=3.0, high_freq_factor=2.5)),
    (1e6, RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768)),
    (1e4, RopeScaling(kind="yarn", factor=40.0, original_max_seq_len=4096, truncate=False)),
    (1e4, RopeScaling(kind="yarn", factor=2.0, original_max_seq_len=64, beta_fast=8.0)),
]
DIVISIONS = [
    (5e4, RopeScaling(kind="linear", factor=7.0)),
    (5e5, RopeScaling(kind="factors", freq_factors=tuple(1 + i / 7 for i in range(40)))),
]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("theta", "scaling"), BLENDS, ids=kind)
def test_blended_frequencies_equal_their_published_formula_in_fp32_bit_for_bit(
    theta, scaling, head_dim
):
    config = dataclasses.replace(TINY, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    freqs = rope_frequencies(config)
    assert torch.equal(freqs, frequencies(config))
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    assert len({round(r, 3) for r in (plain / freqs).tolist()}) > 2  # kept, divided and blended


@pytest.mark.parametrize(("theta", "scaling"), DIVISIONS, ids=kind)
def test_divided_frequencies_equal_their_published_formula_in_fp32_bit_for_bit(theta, scaling):
    config = dataclasses.replace(TINY, head_dim=80, rope_theta=theta, rope_scaling=scaling)
    freqs = rope_frequencies(config)
    assert torch.equal(freqs, frequencies(config))


@pytest.mark.parametrize("scaling", OF_TRANSFORMERS, ids=kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cos_and_sin_are_of_angles_in_fp32_at_the_end_of_any_context(dtype, scaling):
    scaling = scaling and dataclasses.replace(scaling, attention_factor=0.7)
    config = dataclasses.replace(TINY, rope_scaling=scaling, head_dim=64, rope_theta=5e5)
    cos, sin = rope_of_model(config, torch.arange(131_000, 131_048), dtype)
    angles = torch.arange(131_000, 131_048).float()[:, None] * frequencies(config)
    scale = scaling.attention_factor if scaling else 1.0
    assert torch.equal(cos, angles.cos() * scale)
    assert torch.equal(sin, angles.sin() * scale)


def test_angles_are_off_by_a_hundredth_at_most_after_a_hundred_thousand_tokens():
    config = dataclasses.replace(TINY, head_dim=128, rope_theta=5e5)
    positions = torch.arange(99_900, 100_000)
    exact = torch.outer(positions.double(), 5e5 ** -(torch.arange(0, 128, 2).double() / 128))
    cos, sin = (part.double() for part in rope_of_model(config, positions, torch.float32))
    turned = torch.polar(torch.ones_like(exact), -exact) * torch.complex(cos, sin)
    assert 0.003 < turned.angle().abs().max() < 0.01


def rope_of_model(config, positions, dtype):
    """What the layers of a model of `dtype` are handed for consecutive positions [T]."""
    model = seeded_model(config, dtype=dtype)
    model.rope_freqs = rope_frequencies(config)
    seen = {}
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.update(rope=args[1]))
    # The positions are past the end of any small cache.
    caches = [SimpleNamespace(attend=lambda q, *_: q)] * config.num_layers
    model(torch.zeros(1, len(positions), dtype=torch.long), positions[:1], caches)
    return seen["rope"][0][0], seen["rope"][1][0]


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="rope scaling 'longrope'"):
        rope_frequencies(dataclasses.replace(TINY, rope_scaling=RopeScaling(kind="longrope")))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"kind": "linear", "factor": 0.5}, "rope factor 0.5: numbers from 1 on"),
        (
            {"kind": "llama3", "low_freq_factor": 4.0},
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
        ({"kind": "yarn", "beta_slow": 33.0}, "beta_fast 32.0 is not above beta_slow 33.0"),
        ({"kind": "yarn", "beta_fast": 1e308}, r"beta_fast 1e\+308: numbers up to 1e\+30"),
        (
            {"kind": "llama3", "low_freq_factor": 1e39, "high_freq_factor": 1e40},
            r"high_freq_factor 1e\+40: numbers up to 1e\+30",
        ),
    ],
)
def test_scalings_that_cannot_be_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, rope_scaling=RopeScaling(**scaling))
