"""Three formats of one tiny model, and what each may leave out."""

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import edit_json, every_format, loaded_logits, tiny
from plain_llama import plain_logits
from torch import Tensor

from checkpoint import open_checkpoint
from checkpoint_base import half_split_rows
from checkpoint_fields import Fields
from checkpoint_meta import read_rope_scaling
from model_config import ModelConfig, RopeScaling
from rope import apply_rope, rope_frequencies
from scripts.tiny_checkpoint import (
    TINY,
    interleaved_rows,
    random_weights,
    tensor_names,
    write_gguf,
)

Weights = dict[str, Tensor]
TIED = dataclasses.replace(TINY, tie_embeddings=True)
GROUPED = dataclasses.replace(TINY, num_heads=32, num_kv_heads=4, head_dim=8)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=256)


# One model in every format


@every_format
@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_tensors_are_the_written_ones_bit_for_bit(
    kind: str, config: ModelConfig, tmp_path: Path
) -> None:
    weights = random_weights(config)
    expected: dict[str, list[Tensor]] = {}
    for names in tensor_names(config):
        expected.setdefault(names.ours, []).append(weights[names.hf])
    if config.tie_embeddings and kind.startswith("meta"):
        expected["lm_head.weight"] = expected["embed_tokens.weight"]

    tensors = dict(open_checkpoint(tiny(kind, tmp_path, config)).weights("cpu", torch.float32))

    assert tensors.keys() == expected.keys()
    for name, parts in expected.items():
        assert torch.equal(tensors[name].float(), torch.cat(parts).float()), name


@every_format
@pytest.mark.parametrize(
    "config", [TINY, TIED, GROUPED], ids=["untied", "tied", "32 heads, 4 KV heads"]
)
def test_logits_are_those_of_the_written_weights(
    kind: str, config: ModelConfig, tmp_path: Path
) -> None:
    tokens = torch.randint(config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = plain_logits(config, random_weights(config), tokens[0])
    assert 0.5 < expected.std() < 2
    logits = loaded_logits(tiny(kind, tmp_path, config), tokens)[0]
    assert (logits - expected).abs().max() < 1e-5


@every_format
def test_the_config_is_the_written_one(kind: str, tmp_path: Path) -> None:
    loaded = open_checkpoint(tiny(kind, tmp_path))
    assert loaded.config == TINY
    assert loaded.dtype == torch.bfloat16
    assert loaded.name == "tiny"


@pytest.mark.parametrize("kind", ["hf", "meta", "gguf"])
def test_the_tokenizer_is_the_same_in_every_format(kind: str, tmp_path: Path) -> None:
    tokenizer = open_checkpoint(tiny(kind, tmp_path)).tokenizer()
    assert tokenizer.encode("a to the\n 12") == [260, 97, 259, 111, 32, 256, 101, 10, 32, 49, 50]
    assert (tokenizer.bos_id, 261 in tokenizer.stop_ids) == (260, True)


@pytest.mark.parametrize("kind", ["hf", "meta", "gguf"])
def test_llama3_scaling_gives_the_same_logits_in_every_format(kind: str, tmp_path: Path) -> None:
    scaling = dataclasses.replace(LLAMA3, original_max_seq_len=8192)  # the one Meta's files mean
    config = dataclasses.replace(TINY, rope_scaling=scaling, rope_theta=500000.0)
    tokens = torch.randint(config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(1))
    expected = plain_logits(config, random_weights(config), tokens[0])
    unscaled = dataclasses.replace(config, rope_scaling=None)
    assert (plain_logits(unscaled, random_weights(config), tokens[0]) - expected).abs().max() > 1e-2
    logits = loaded_logits(tiny(kind, tmp_path, config), tokens)[0]
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_linear_scaling_is_read(kind: str, tmp_path: Path) -> None:
    scaling = RopeScaling(kind="linear", factor=4.0)
    config = dataclasses.replace(TINY, rope_scaling=scaling)
    assert open_checkpoint(tiny(kind, tmp_path, config)).config.rope_scaling == scaling


# Rope layouts


@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 16), (4, 16), (9, 64), (3, 2)])
def test_half_split_undoes_interleaving(num_heads: int, head_dim: int) -> None:
    config = dataclasses.replace(TINY, num_heads=num_heads, num_kv_heads=num_heads)
    weight = torch.randn(num_heads * head_dim, 5)
    interleaved = interleaved_rows(weight, config, "model.layers.0.self_attn.q_proj.weight")
    assert head_dim == 2 or not torch.equal(interleaved, weight)
    assert torch.equal(half_split_rows(interleaved, num_heads), weight)


def test_interleaved_rope_on_meta_rows_scores_as_half_split_rope_on_ours() -> None:
    num_heads, head_dim, positions = 3, 8, torch.arange(50.0)
    generator = torch.Generator().manual_seed(0)
    q_rows, k_rows = torch.randn(2, num_heads * head_dim, 20, generator=generator)
    x = torch.randn(1, 50, 20, generator=generator)
    freqs = rope_frequencies(dataclasses.replace(TINY, head_dim=head_dim))
    angles = positions[:, None] * freqs

    def heads(rows: Tensor) -> Tensor:
        return (x @ rows.T).unflatten(-1, (num_heads, head_dim)).transpose(1, 2)

    def interleaved(rows: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads(rows).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)).flatten(-2)

    def half_split(rows: Tensor) -> Tensor:
        return apply_rope(
            heads(half_split_rows(rows, num_heads)), angles.cos()[None], angles.sin()[None]
        )

    expected = interleaved(q_rows) @ interleaved(k_rows).mT
    scores = half_split(q_rows) @ half_split(k_rows).mT
    assert (scores - expected).abs().max() < 1e-6 * expected.abs().max()


# What a config may say in several ways, or leave out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": -1}, {}),
        ({"n_kv_heads": None}, {"num_kv_heads": 6}),
        ({"rope_theta": None}, {}),
        ({"max_seq_len": None}, {"max_seq_len": 4096}),
        ({"max_seq_len": None, "rope_theta": 5e5}, {"max_seq_len": 8192, "rope_theta": 5e5}),
        (
            {"max_seq_len": None, "use_scaled_rope": True},
            {"max_seq_len": 131072, "rope_scaling": RopeScaling(kind="llama3", factor=8.0)},
        ),
        (
            {"use_scaled_rope": True, "rope_scaling_factor": 32},
            {"rope_scaling": RopeScaling(kind="llama3", factor=32.0)},
        ),
    ],
    ids=str,
)
def test_spellings_of_params_json(
    changes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    config = dataclasses.replace(TINY, **expected)  # type: ignore[arg-type]
    folder = tiny("meta", tmp_path, config)
    edit_json(folder / "params.json", **{"use_scaled_rope": False, **changes})
    assert open_checkpoint(folder).config == config


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"dim": 2048}, 32.0),  # Llama 3.2 1B
        ({"dim": 3072}, 32.0),  # 3B
        ({"dim": 4096}, 8.0),  # Llama 3.1 8B
        ({"dim": 2048, "rope_scaling_factor": 8}, 8.0),
    ],
    ids=str,
)
def test_a_rope_factor_that_params_json_leaves_out_is_that_of_the_models_size_and_is_told(
    settings: dict[str, object], factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kv_fast")
    fields = Fields(Path("params.json"), {"use_scaled_rope": True, **settings})
    scaling = read_rope_scaling(fields)
    assert scaling
    assert scaling.factor == factor
    note = f"params.json: rope_scaling_factor is missing, {factor:g} is taken"
    assert (note in caplog.messages) == ("rope_scaling_factor" not in settings)


def test_gguf_defaults_are_those_of_llama_cpp(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, num_kv_heads=6, hidden_size=96)
    optional = ["llama.attention.head_count_kv", "llama.attention.key_length"]
    fields = dict.fromkeys([*optional, "llama.rope.freq_base"])
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), fields=fields)
    assert open_checkpoint(path).config == config


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, None),
    ],
    ids=str,
)
def test_spellings_of_linear_scaling_in_gguf(
    fields: dict[str, object], factor: float | None, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "a.gguf", TINY, random_weights(TINY), fields=fields)
    expected = factor and RopeScaling(kind="linear", factor=factor)
    assert open_checkpoint(path).config.rope_scaling == expected


def test_a_rope_tensor_of_a_gguf_file_divides_the_frequencies(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, rope_scaling=LLAMA3)
    loaded = open_checkpoint(tiny("gguf", tmp_path, config)).config
    assert loaded.rope_scaling is not None
    assert loaded.rope_scaling.kind == "factors"
    torch.testing.assert_close(rope_frequencies(loaded), rope_frequencies(config))
