"""GGUF files of Qwen2 and Qwen3, and biases of attention: the model of the Hugging Face folder."""

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import loaded_logits, refusal, tiny
from plain_llama import plain_logits

from checkpoint import open_checkpoint
from model_config import ModelConfig, RopeScaling
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf

QWEN2 = dataclasses.replace(TINY, qkv_bias=True)
QWEN3 = dataclasses.replace(TINY, qk_norm=True)
LINEAR = RopeScaling(kind="linear", factor=4.0)
MODELS = {
    "qwen2": QWEN2,
    "qwen2, tied": dataclasses.replace(QWEN2, tie_embeddings=True),
    "qwen2, linear rope": dataclasses.replace(QWEN2, rope_scaling=LINEAR),
    "qwen3": QWEN3,
    "qwen3 with biases": dataclasses.replace(QWEN3, qkv_bias=True, o_bias=True),
    "llama with biases": dataclasses.replace(TINY, qkv_bias=True, o_bias=True),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_weights_and_config_are_those_of_the_hugging_face_folder(
    config: ModelConfig, tmp_path: Path
) -> None:
    folder, file = (open_checkpoint(tiny(kind, tmp_path / kind, config)) for kind in ("hf", "gguf"))
    assert folder.config == file.config == config
    expected = dict(folder.weights("cpu", torch.float32))
    found = dict(file.weights("cpu", torch.float32))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_the_written_weights(config: ModelConfig, tmp_path: Path) -> None:
    tokens = torch.randint(config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = plain_logits(config, random_weights(config), tokens[0])
    logits = loaded_logits(tiny("gguf", tmp_path, config), tokens)[0]
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "architecture", "missing"),
    [
        (TINY, "qwen2", "blk.0.attn_q.bias"),
        (TINY, "qwen3", "blk.0.attn_q_norm.weight"),
    ],
)
def test_a_file_without_what_its_architecture_has_is_refused(
    config: ModelConfig, architecture: str, missing: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config))
    path.write_bytes(path.read_bytes().replace(b"llama", architecture.encode()))
    refusal(path, "tensors missing", missing)


@pytest.mark.parametrize(("config", "unknown"), [(QWEN2, "attn_q.bias"), (QWEN3, "attn_q_norm")])
def test_a_file_with_more_than_its_architecture_has_is_not_read_without_it(
    config: ModelConfig, unknown: str, tmp_path: Path
) -> None:
    path = tiny("gguf", tmp_path, config)
    data = path.read_bytes()
    name = b"qwen3" if config.qk_norm else b"qwen2"
    path.write_bytes(data.replace(name, b"llama"))
    if config.qk_norm:
        refusal(path, "tensors unknown", unknown)
    else:  # biases are read wherever they are
        assert open_checkpoint(path).config == config
