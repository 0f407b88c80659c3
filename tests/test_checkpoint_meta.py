"""Meta's shards: put together along the right dimension, or refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import refusal, tiny
from checkpoint_shards import shard_meta

from checkpoint import open_checkpoint
from scripts.tiny_checkpoint import TINY, random_weights, write_meta

NORM = "layers.1.ffn_norm.weight"


def sharded(folder: Path, num_shards: int, *, embedding_dim: int = 0) -> Path:
    return shard_meta(tiny("meta", folder), num_shards, embedding_dim=embedding_dim)


def edit_shard(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**torch.load(file), **changes}
    torch.save({name: t for name, t in tensors.items() if t is not None}, file)


@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["llama3", "llama2"])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_are_the_original_bit_for_bit(
    num_shards: int, embedding_dim: int, tmp_path: Path
) -> None:
    expected = dict(open_checkpoint(tiny("meta", tmp_path / "whole")).weights("cpu", torch.float32))
    folder = sharded(tmp_path, num_shards, embedding_dim=embedding_dim)
    loaded = open_checkpoint(folder)
    assert loaded.config == TINY
    assert len(loaded.weight_files) == num_shards
    tensors = dict(loaded.weights("cpu", torch.float32))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["llama3", "llama2"])
def test_a_square_embedding_is_cut_as_the_shapes_of_the_shards_say(
    embedding_dim: int, tmp_path: Path
) -> None:
    config = dataclasses.replace(TINY, vocab_size=TINY.hidden_size)
    weights = random_weights(config)
    folder = write_meta(tmp_path, config, weights)
    tensors = dict(
        open_checkpoint(shard_meta(folder, 2, embedding_dim=embedding_dim)).weights(
            "cpu", torch.float32
        )
    )
    assert torch.equal(tensors["embed_tokens.weight"], weights["model.embed_tokens.weight"])


def test_the_vocabulary_is_taken_from_the_shards_where_params_leave_it_out(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2, embedding_dim=1)
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    assert open_checkpoint(folder).config == TINY


@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["llama3", "llama2"])
@pytest.mark.parametrize("missing", range(4))
def test_a_missing_shard_is_named(missing: int, embedding_dim: int, tmp_path: Path) -> None:
    folder = sharded(tmp_path, 4, embedding_dim=embedding_dim)
    (folder / f"consolidated.0{missing}.pth").unlink()
    refusal(folder, f"consolidated.0{missing}.pth")


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        (NORM, torch.ones(80), f"{NORM} differs from that of consolidated.00.pth"),
        (NORM, torch.ones(80).float(), f"{NORM} is (torch.float32, (80,)), in"),
        ("output.weight", None, "output.weight is None"),
        ("output.weight", torch.zeros(80, 80).bfloat16(), "output.weight is (torch.bfloat16"),
        ("extra.weight", torch.ones(2), "extra.weight is (torch.float32"),
    ],
    ids=["norm", "dtype", "missing", "shape", "unknown"],
)
def test_a_shard_of_another_model_is_named(
    name: str, change: torch.Tensor | None, cause: str, tmp_path: Path
) -> None:
    folder = sharded(tmp_path, 2)
    if "differs" in cause and change is not None:
        change = change.bfloat16()
    edit_shard(folder / "consolidated.01.pth", **{name: change})
    refusal(folder, "consolidated.01.pth", cause)


def test_a_file_too_many_is_refused(tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    data = (folder / "consolidated.00.pth").read_bytes()
    (folder / "consolidated.01.pth").write_bytes(data)
    refusal(folder, "tensors of the wrong shape")


def test_shards_under_original_are_found(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2, embedding_dim=1)
    (tmp_path / "Llama").mkdir()
    folder.rename(tmp_path / "Llama" / "original")
    loaded = open_checkpoint(tmp_path / "Llama")
    assert (loaded.name, loaded.config) == ("Llama", TINY)


def test_code_in_a_pth_file_is_named_and_does_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "mark",)

    folder = tiny("meta", tmp_path)
    torch.save({NORM: Attack()}, folder / "consolidated.00.pth")
    refusal(folder, "consolidated.00.pth: refuses", "re-save its tensors as safetensors")
    assert not (tmp_path / "mark").exists()


def test_integers_in_a_pth_file_are_no_weights(tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    edit_shard(folder / "consolidated.00.pth", **{NORM: torch.ones(80).int()})
    refusal(folder, f"consolidated.00.pth: {NORM} is torch.int32")
