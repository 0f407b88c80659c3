"""Random models: their published shapes, their weights, and runs without any file."""

import dataclasses

import pytest
import torch
from checkpoint_kinds import refusal

import fetch
from accounting import model_size_bytes
from checkpoint import open_checkpoint
from checkpoint_random import SHAPES, byte_tokenizer
from engine import load_model
from generate_config import GenerateConfig
from model import Transformer
from rope import rope_frequencies

pytest_plugins = ["generate_process"]

# As their model cards and safetensors headers say.
NUM_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}
CPU = torch.device("cpu")


def opened(name):
    return open_checkpoint(fetch.resolve(f"random:{name}"))


@pytest.mark.parametrize(("name", "count"), NUM_PARAMETERS.items())
def test_a_shape_has_the_published_number_of_parameters(name, count):
    with torch.device("meta"):
        model = Transformer(opened(name).config)
    assert model_size_bytes(model) == 4 * count


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_room_for_a_million_tokens_with_finite_rope(name):
    config = opened(name).config
    assert config.max_seq_len > 10**6
    assert bool(rope_frequencies(config).isfinite().all())


@pytest.mark.parametrize("name", ["tinny", "", "Llama-3.1-8B", "a/b"])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    known = ", ".join(f"random:{shape}" for shape in SHAPES)
    message = refusal(fetch.resolve(f"random:{name}"), f"no such shape; take one of {known}")
    assert message.startswith(f"random:{name}: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_those_of_every_run_and_norms_are_one(dtype):
    first, again = (dict(opened("tiny").weights(CPU, dtype)) for _ in range(2))
    with torch.device("meta"):
        expected = {n: p.shape for n, p in Transformer(SHAPES["tiny"]).named_parameters()}
    assert {name: weight.shape for name, weight in first.items()} == expected
    for name, weight in first.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, again[name])
        if "norm" in name:
            assert bool((weight == 1).all())
        else:
            assert weight.float().std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first["embed_tokens.weight"], first["lm_head.weight"])


def test_a_model_is_loaded_without_a_copy_of_any_weight():
    checkpoint, made = opened("tiny"), {}
    weights = checkpoint.weights

    def watched(*args):
        for name, weight in weights(*args):
            made[name] = weight.data_ptr()
            yield name, weight

    checkpoint.weights = watched
    model = load_model(checkpoint, CPU, torch.bfloat16)
    assert made == {name: weight.data_ptr() for name, weight in model.named_parameters()}


def test_the_sha_is_that_of_the_name_in_every_process():
    shas = {name: opened(name).sha for name in SHAPES}
    assert shas == {name: opened(name).sha for name in SHAPES}
    assert len(set(shas.values())) == len(SHAPES)
    assert shas["tiny"] == "aa8a7c7d49c0"


def test_an_option_that_a_shape_does_not_use_changes_no_sha(monkeypatch):
    before = opened("llama-3.2-1b").sha
    config = SHAPES["llama-3.2-1b"]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    wider = dataclasses.make_dataclass(
        "Wider", [("option", bool, False)], bases=(type(config),), frozen=True, kw_only=True
    )
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", wider(**values))
    assert opened("llama-3.2-1b").sha == before
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", wider(**values, option=True))
    assert opened("llama-3.2-1b").sha != before


@pytest.mark.parametrize("text", ["", "plain", "hé 한🦙", "\0\n"])
def test_texts_are_bytes_and_come_back(text):
    tokenizer = byte_tokenizer(512)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([256, 511]).isprintable()


def test_a_run_needs_no_file_and_has_a_row(run_generate, tmp_path):
    flags = ["--max_new_tokens", 8, "--kv_cache_quantization", "--write_result", tmp_path / "rows"]
    runs = [run_generate(*flags, path="random:tiny") for _ in range(2)]
    row = runs[0].row
    assert runs[0].code == 0
    assert runs[0].stdout.startswith(GenerateConfig.prompt)
    assert runs[0].stdout == runs[1].stdout
    assert (row.model, row.model_sha) == ("random:tiny", opened("tiny").sha)
    assert (row.new_tokens, row.prompt_len) == (8, len(GenerateConfig.prompt))
    assert "--checkpoint_path random:tiny" in row.repro
