"""What `python checkpoint.py PATH` shows of a checkpoint, and how it refuses one."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import every_format, tiny

import checkpoint
from checkpoint import CheckpointConfig, open_checkpoint
from checkpoint_summary import as_text, summarize
from command import run
from model_config import ModelConfig, RopeScaling
from scripts.tiny_checkpoint import TINY
from tokenizer_base import Tokenizer

TIED = dataclasses.replace(TINY, tie_embeddings=True)
SCALED = dataclasses.replace(TINY, rope_scaling=RopeScaling(kind="llama3", factor=8.0))


def shown(path: Path, *flags: str, capsys: pytest.CaptureFixture) -> str:
    assert run(checkpoint.main, CheckpointConfig, [str(path), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("kind", ["hf", "meta", "gguf"])
def test_the_document_says_what_the_model_has(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tiny(kind, tmp_path)
    opened = open_checkpoint(path)
    document = json.loads(shown(path, "--json", capsys=capsys))
    assert document["config"]["num_kv_heads"] == TINY.num_kv_heads
    assert document["config"]["max_seq_len"] == TINY.max_seq_len
    assert document["rope"] == {"theta": TINY.rope_theta, "scaling": None}
    assert document["format"] == {"hf": "Hugging Face", "meta": "Meta", "gguf": "GGUF"}[kind]
    assert document["architecture"] == ("LlamaForCausalLM" if kind == "hf" else "llama")
    weights = dict(opened.weights("cpu", torch.float32))
    assert document["parameters"] == sum(weight.numel() for weight in weights.values())
    assert sum(tensor["count"] for tensor in document["tensors"]) == len(weights)
    for tensor in document["tensors"]:
        assert list(weights[tensor["name"].format(0)].shape) == tensor["shape"]
    files = [path / name if path.is_dir() else path for name in document["files"]]
    assert document["bytes"] == sum(file.stat().st_size for file in files)
    assert document["dtype"] == "bfloat16"
    tokenizer = opened.tokenizer()
    assert document["tokenizer"]["stop_ids"] == sorted(tokenizer.stop_ids)
    assert document["tokenizer"]["bos_id"] == tokenizer.bos_id


@every_format
@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_every_stored_tensor_is_named(kind: str, config: ModelConfig, tmp_path: Path) -> None:
    opened = open_checkpoint(tiny(kind, tmp_path, config))
    document = summarize(opened, some_tokenizer())
    stored = [
        name.replace("{}", str(layer)) for tensor in document["tensors"]
        for name in tensor["stored_as"] for layer in range(tensor["count"])
    ]  # fmt: skip
    expected = [s.name for sources in opened.sources().values() for s in sources]
    assert sorted(stored) == sorted(expected)


def some_tokenizer(vocab_size: int = 320) -> Tokenizer:
    return Tokenizer(
        encode_text=lambda text: list(text.encode()),
        pieces=[b"a"] * vocab_size,
        bos_id=None,
        stop_ids=frozenset(),
        special_ids=frozenset(),
        strips_leading_space=False,
    )


def test_the_text_has_a_line_per_subject(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = shown(tiny("hf", tmp_path, SCALED), capsys=capsys)
    lines = {key: value.strip() for key, _, value in (x.partition(":") for x in text.splitlines())}
    assert lines["format"] == "Hugging Face, architecture LlamaForCausalLM"
    assert "num_heads 6, num_kv_heads 2, head_dim 16" in lines["shapes"]
    assert lines["rope"].startswith("theta 10000, scaling kind llama3, factor 8.0, ")
    assert lines["weights"].endswith(" parameters, bfloat16")
    assert lines["files"].endswith(" MB: model.safetensors")
    assert lines["tokenizer"] == "320 ids, 60 special"
    assert lines["stop ids"] == "261, 268, 269"
    assert lines["chat template"] == "none"
    assert (
        "  layers.{}.attention.qkv_proj.weight [160, 80] x 4 <- "
        "model.layers.{}.self_attn.q_proj.weight, model.layers.{}.self_attn.k_proj.weight, "
        "model.layers.{}.self_attn.v_proj.weight"
    ) in text.splitlines()


@pytest.mark.parametrize(
    ("vocab_size", "words"),
    [
        (300, "300 ids, 0 special, 20 more in the vocabulary"),
        (320, "320 ids, 0 special"),
        (325, "325 ids, 0 special, 5 of them beyond the vocabulary"),
    ],
)
def test_a_vocabulary_of_another_size_than_the_tokenizer_is_told(
    vocab_size: int, words: str, tmp_path: Path
) -> None:
    document = summarize(open_checkpoint(tiny("hf", tmp_path)), some_tokenizer(vocab_size))
    assert f"tokenizer:     {words}\n" in as_text(document)


def test_a_model_without_files_is_shown_too(capsys: pytest.CaptureFixture) -> None:
    text = shown(Path("random:tiny"), capsys=capsys)
    assert "random, architecture llama" in text
    assert "files:         0.0 MB: none" in text
