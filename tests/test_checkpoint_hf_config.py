"""config.json: every spelling and option gives the logits of an independent forward."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import edit_json, loaded_logits, tiny
from hf_config_case import LINEAR, LLAMA3, ORIGINAL, YARN, changed, spoken
from plain_llama import plain_logits

from accounting import model_size_bytes
from checkpoint import open_checkpoint
from engine import load_model
from kv_cache import bytes_per_token
from model_config import ModelConfig
from scripts.tiny_checkpoint import TINY, random_weights

# Logits


@pytest.mark.parametrize(
    "config",
    [
        changed(num_kv_heads=1),
        changed(num_kv_heads=6),
        changed(num_heads=32, num_kv_heads=4, head_dim=8),
        changed(num_heads=4, num_kv_heads=2, head_dim=32),
        changed(qkv_bias=True),
        changed(qkv_bias=True, tie_embeddings=True),
        changed(qkv_bias=True, o_bias=True),
        changed(qk_norm=True),
        changed(qk_norm=True, qkv_bias=True, o_bias=True, head_dim=32),
        changed(rope_scaling=LINEAR),
        changed(rope_scaling=LLAMA3, rope_theta=500000.0),
        changed(rope_scaling=YARN),
        changed(rope_scaling=dataclasses.replace(YARN, truncate=False, beta_fast=8.0)),
        changed(rope_scaling=dataclasses.replace(YARN, attention_factor=2.0), qk_norm=True),
    ],
    ids=lambda config: ",".join(
        f"{f.name}={getattr(config, f.name)}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(TINY, f.name)
    )[:80],
)
def test_logits_far_beyond_the_original_context_are_those_of_an_independent_forward(
    config: ModelConfig, tmp_path: Path
) -> None:
    tokens = torch.randint(config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(1))
    weights = random_weights(config)
    expected = plain_logits(config, weights, tokens[0])
    for changes in ({"rope_scaling": None}, {"qkv_bias": False, "o_bias": False, "qk_norm": False}):
        without = dataclasses.replace(config, **changes)
        if without != config:
            names = random_weights(without)
            plain = plain_logits(without, {n: weights[n] for n in names}, tokens[0])
            assert (plain - expected).abs().max() > 0.05
    logits = loaded_logits(tiny("hf", tmp_path, config), tokens)[0]
    assert (logits - expected).abs().max() < 1e-4


def test_a_vocabulary_that_the_folders_name_contradicts_gives_the_right_logits(
    tmp_path: Path,
) -> None:
    config = changed(vocab_size=32016, num_layers=1)
    folder = tiny("hf", tmp_path, config).rename(tmp_path / "CodeLlama-13b-x")
    tokens = torch.tensor([[5, 32015, 31999, 7]])
    expected = plain_logits(config, random_weights(config), tokens[0])
    assert (loaded_logits(folder, tokens)[0] - expected).abs().max() < 1e-4


def test_the_head_dim_of_the_config_decides_the_bytes_of_the_cache(tmp_path: Path) -> None:
    config = changed(num_heads=4, num_kv_heads=2, head_dim=32)  # not 80 / 4
    loaded = open_checkpoint(tiny("hf", tmp_path, config))
    assert bytes_per_token(loaded.config, ("bf16", "bf16")) == 4 * 2 * (32 + 32) * 2


@pytest.mark.parametrize("config", [TINY, changed(qkv_bias=True), changed(qk_norm=True)])
def test_a_tied_model_counts_the_shared_matrix_once(config: ModelConfig, tmp_path: Path) -> None:
    tied = dataclasses.replace(config, tie_embeddings=True)
    sizes = [
        model_size_bytes(
            load_model(
                open_checkpoint(tiny("hf", tmp_path / str(each.tie_embeddings), each)),
                torch.device("cpu"),
                torch.bfloat16,
            )
        )
        for each in (config, tied)
    ]
    assert sizes[0] - sizes[1] == 320 * 80 * 2
    assert sizes[1] == sum(t.nbytes for t in random_weights(tied).values())


# Spellings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": 6}, {"num_kv_heads": 6}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ({"num_key_value_heads": 1}, {"num_kv_heads": 1}),
        ({"hidden_size": 96, "head_dim": None}, {"hidden_size": 96, "head_dim": 16}),
        ({"rms_norm_eps": None}, {"norm_eps": 1e-6}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 3e5}}, {"rope_theta": 3e5}),
        ({"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}}, {"rope_theta": 3e5}),
        ({"rope_parameters": {"rope_type": "default"}}, {}),
        ({"rope_scaling": {"type": "default", "factor": 1.0}}, {}),
        ({"rope_scaling": {}, "rope_parameters": {}}, {}),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 1}}, {}),
        ({"tie_word_embeddings": None}, {}),
        ({"attention_bias": None, "mlp_bias": None}, {}),
        ({"attention_multiplier": 0.25, "query_pre_attn_scalar": 16}, {}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {}),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_scaling": LINEAR}),
        ({"rope_parameters": spoken(LINEAR)}, {"rope_scaling": LINEAR}),
        ({"rope_scaling": spoken(LINEAR, type="linear")}, {"rope_scaling": LINEAR}),
        (
            {"rope_scaling": spoken(LINEAR), "rope_parameters": spoken(LINEAR)},
            {"rope_scaling": LINEAR},
        ),
        ({"rope_scaling": spoken(LLAMA3)}, {"rope_scaling": LLAMA3}),
        (
            {"rope_parameters": spoken(LLAMA3, rope_theta=5e5), "rope_theta": None},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        ({"rope_scaling": spoken(YARN)}, {"rope_scaling": YARN}),
        ({"rope_scaling": spoken(YARN, rope_type=None, type="yarn")}, {"rope_scaling": YARN}),
        (
            {"rope_parameters": spoken(YARN, rope_theta=1e6), "rope_theta": None},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            {
                "rope_scaling": spoken(YARN, original_max_position_embeddings=None),
                "original_max_position_embeddings": ORIGINAL,
            },
            {"rope_scaling": YARN},
        ),
        (
            {"rope_scaling": spoken(YARN, attention_factor=1.5, beta_fast=16, truncate=False)},
            {
                "rope_scaling": dataclasses.replace(
                    YARN, attention_factor=1.5, beta_fast=16.0, truncate=False
                )
            },
        ),
        (
            {"rope_scaling": spoken(YARN, mscale=1.0, mscale_all_dim=1.0)},
            {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.0)},
        ),
    ],
    ids=str,
)
def test_spellings_of_config_json(
    changes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    config = changed(**expected)
    folder = tiny("hf", tmp_path, config)
    edit_json(folder / "config.json", rope_scaling=None, rope_theta=config.rope_theta)
    edit_json(folder / "config.json", **changes)
    assert open_checkpoint(folder).config == config


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "tie_word_embeddings"])
def test_a_key_that_is_left_out_has_the_default_of_llama(key: str, tmp_path: Path) -> None:
    config = changed(num_kv_heads=6, hidden_size=96)
    folder = tiny("hf", tmp_path, config)
    settings = json.loads((folder / "config.json").read_text())
    del settings[key]
    (folder / "config.json").write_text(json.dumps(settings))
    assert open_checkpoint(folder).config == config


@pytest.mark.parametrize("spelling", [{}, {"rope_parameters": {"rope_type": "default"}}], ids=str)
def test_a_theta_that_is_nowhere_is_10000_with_a_note(
    spelling: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", rope_theta=None, **spelling)
    with caplog.at_level(logging.INFO, "kv_fast"):
        assert open_checkpoint(folder).config == TINY
    assert f"{folder / 'config.json'}: rope_theta is missing, 10000 is taken" in caplog.messages


def test_a_theta_that_is_given_needs_no_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kv_fast"):
        open_checkpoint(tiny("hf", tmp_path))
    assert not caplog.messages


# Lengths


@pytest.mark.parametrize(("max_positions", "expected"), [(64, 256), (128, 256), (1000, 1000)])
def test_yarn_reaches_its_factor_times_the_original_context(
    max_positions: int, expected: int, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path, changed(rope_scaling=YARN))
    edit_json(folder / "config.json", max_position_embeddings=max_positions)
    assert open_checkpoint(folder).config.max_seq_len == expected


QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
SLIDES = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 9000),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 10000}, 9000),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"sliding_window": 100}, 100),
        ({}, 9000),
        ({**QWEN2, "sliding_window": 100}, 9000),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": False}, 9000),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": True}, 9000),
        (
            {**QWEN2, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 4},
            9000,
        ),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3}, 100),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": True, "layer_types": SLIDES}, 100),
        (
            {
                **QWEN2,
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 4,
                "max_window_layers": 0,
            },
            9000,
        ),
    ],
    ids=str,
)
def test_a_sliding_window_limits_the_context_to_where_attention_is_exact(
    changes: dict[str, object], expected: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_qwen = changes.get("architectures") == QWEN2["architectures"]
    folder = tiny("hf", tmp_path, changed(max_seq_len=9000, qkv_bias=is_qwen))
    edit_json(folder / "config.json", **changes)
    with caplog.at_level(logging.INFO, "kv_fast"):
        assert open_checkpoint(folder).config.max_seq_len == expected
    note = f"{folder / 'config.json'}: sliding_window {expected}: the context of 9000 ends there"
    assert (note in caplog.messages) == (expected < 9000)
