"""All that is wrong with a checkpoint is told together, a line each, and nothing else with it."""

import re
from pathlib import Path

import pytest
from checkpoint_kinds import TOKENIZER, edit_json, tiny

import checkpoint
from checkpoint import CheckpointConfig
from command import run
from fetch import sha256_of
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf, write_hf


@pytest.fixture
def refused(capsys):
    """The lines that `python checkpoint.py PATH` ends in, without what is in front of each."""

    def lines(path: Path, *flags: str) -> list[str]:
        assert run(checkpoint.main, CheckpointConfig, [str(path), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        found = captured.err.splitlines()
        assert all(line.startswith("error: ") for line in found), found
        return [line.removeprefix("error: ") for line in found]

    return lines


@pytest.mark.parametrize(
    ("kind", "config", "weights", "tokenizer"),
    [
        ("hf", "config.json", "model.safetensors", "tokenizer.json"),
        ("hf-bin", "config.json", "pytorch_model.bin", "tokenizer.json"),
        ("meta", "params.json", "consolidated.00.pth", "tokenizer.model"),
    ],
)
def test_faults_of_config_weights_and_tokenizer_are_listed_together(
    kind: str,
    config: str,
    weights: str,
    tokenizer: str,
    tmp_path: Path,
    refused,
) -> None:
    path = tiny(kind, tmp_path)
    for name in (config, weights, tokenizer):
        (path / name).write_bytes(b"<html>")
    lines = refused(path)
    names = [f"{path}/{name}: " for name in (config, weights, tokenizer)]
    assert len(lines) == 3
    assert all(map(str.startswith, lines, names)), lines


@pytest.mark.parametrize("kind", ["hf-shards", "hf-bin-shards", "meta-shards", "gguf-parts"])
def test_all_damaged_shards_are_listed(kind: str, tmp_path: Path, refused) -> None:
    path = tiny(kind, tmp_path)
    shards = sorted(
        f for f in path.glob("*") if re.search(r"\d\d\.(pth|bin|safe|gguf)|-of-", f.name)
    )
    for file in shards[1:]:
        file.write_bytes(b"<html>")
    lines = refused(path)
    for file in shards[1:]:
        assert sum(line.startswith(f"{file}: ") for line in lines) == 1, lines


def test_faults_of_gguf_settings_and_tokenizer_are_listed_together(tmp_path: Path, refused) -> None:
    fields = {**TOKENIZER.gguf_fields, "llama.block_count": 0, "tokenizer.ggml.model": "bert"}
    path = write_gguf(tmp_path / "a.gguf", TINY, random_weights(TINY), fields=fields)
    first, second = refused(path)
    assert first.startswith(f"{path}: llama.block_count is 0; ")
    assert second.startswith(f"{path}: tokenizer.ggml.model: 'bert'; ")


def test_all_settings_that_are_not_supported_are_listed(tmp_path: Path, refused) -> None:
    path = tiny("hf", tmp_path)
    edit_json(path / "config.json", hidden_act="gelu", mlp_bias=True, num_experts=8)
    lines = refused(path)
    named = [line.removeprefix(f"{path}/config.json: ").split()[0] for line in lines]
    assert named == ["mlp_bias", "hidden_act", "num_experts"]


def test_a_file_of_another_kind_is_one_line(tmp_path: Path, refused) -> None:
    (tmp_path / "a.gguf").write_bytes(b"<html>")
    assert len(refused(tmp_path / "a.gguf")) == 1


def test_notes_stand_in_front_of_no_refusal(tmp_path: Path, refused, caplog, capsys) -> None:
    path = tiny("hf", tmp_path)
    (path / "stray.safetensors").write_bytes(b"x")
    assert run(checkpoint.main, CheckpointConfig, [str(path)]) == 0
    assert caplog.messages == [f"{path}: reads model.safetensors, not stray.safetensors"]
    caplog.clear()
    capsys.readouterr()
    (path / "tokenizer.json").write_text("{")
    [line] = refused(path)
    assert line.startswith(f"{path}/tokenizer.json: ")
    assert not caplog.messages


def test_other_bytes_in_the_cache_of_the_hub_are_found_by_verify(
    tmp_path: Path, refused, capsys, caplog
) -> None:
    path = tiny("hf-shards", tmp_path / "models--a--b" / "snapshots")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for file in path.glob("*.safetensors"):
        blob = blobs / sha256_of(file)
        file.rename(blob)
        file.symlink_to(blob)
    assert run(checkpoint.main, CheckpointConfig, [str(path), "--verify"]) == 0
    assert caplog.messages[-1].startswith(
        "SHA-256 as published: model-00001-of-00003.safetensors, "
    )
    capsys.readouterr()
    shard = path / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # as another revision's would be
    assert run(checkpoint.main, CheckpointConfig, [str(path)]) == 0
    capsys.readouterr()
    [line] = refused(path, "--verify")
    assert line.startswith(f"{shard}: sha256 is {sha256_of(shard)}, not {shard.resolve().name}; ")


def test_verify_is_refused_where_no_hash_is_known(tmp_path: Path, refused) -> None:
    path = tiny("hf", tmp_path)
    [line] = refused(path, "--verify")
    assert line.startswith(f"{path}/model.safetensors: its hash is not known; ")
    assert refused(Path("random:tiny"), "--verify") == [
        "random:tiny: has no files; leave out --verify"
    ]


def test_all_that_is_wrong_is_listed(tmp_path: Path, refused) -> None:
    path = write_hf(tmp_path / "model", TINY, random_weights(TINY))
    (path / "model.safetensors").unlink()
    first, second = refused(path)
    assert first.startswith(f"{path}: holds no safetensors file")
    assert second.startswith(f"{path}: no tokenizer.json and no tokenizer.model")
