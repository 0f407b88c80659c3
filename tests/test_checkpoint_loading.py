"""Where files may be, quantised files, the identity of weights, and the memory of loading."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_kinds import every_format, tiny
from checkpoint_shards import pickle_hf, shard_meta
from gguf import GGMLQuantizationType
from loading_memory import measure_loading
from torch import Tensor

import checkpoint_base
import fetch
from checkpoint import model_sha, open_checkpoint
from checkpoint_gguf_header import read_header
from config import UserError
from model_config import ModelConfig
from scripts.tiny_checkpoint import (
    TINY,
    random_weights,
    tensor_names,
    write_gguf,
    write_hf,
    write_meta,
)

pytest_plugins = ["generate_process"]

Weights = dict[str, Tensor]


# Where the files are


def test_an_original_folder_is_found_under_the_name_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "Llama-3-8B").mkdir()
    tiny("meta", tmp_path).rename(tmp_path / "Llama-3-8B" / "original")
    loaded = open_checkpoint(tmp_path / "Llama-3-8B")
    assert loaded.name == "Llama-3-8B"
    assert loaded.tokenizer().bos_id == 260


def test_a_config_json_above_does_not_hide_an_original_folder(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    tiny("meta", tmp_path / "meta").rename(folder / "original")
    assert open_checkpoint(folder).weight_files == (folder / "model.safetensors",)
    (folder / "model.safetensors").unlink()
    assert open_checkpoint(folder).weight_files == (folder / "original/consolidated.00.pth",)


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--Some-Llama" / "snapshots" / "0a1b2c"
    snapshot.parent.mkdir(parents=True)
    tiny("hf", tmp_path).rename(snapshot)
    assert open_checkpoint(snapshot).name == "Some-Llama"


def test_a_gguf_file_is_known_by_its_first_bytes_or_alone_in_its_folder(tmp_path: Path) -> None:
    file = tiny("gguf", tmp_path)
    assert open_checkpoint(file.parent).weight_files == (file,)
    renamed = file.rename(tmp_path / "weights.bin")
    assert open_checkpoint(renamed).config == TINY


def test_the_only_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    (folder / "model.safetensors").rename(folder / "CodeLlama-13b.safetensors")
    assert open_checkpoint(folder).config == TINY


def test_files_outside_the_set_are_not_read(tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    (folder / "model-00009-of-00003.safetensors").write_bytes(b"not one of them")
    (folder / "pytorch_model.bin").write_bytes(b"another copy")
    names = [file.name for file in open_checkpoint(folder).weight_files]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


# Quantised GGUF files

QUANTISED = dataclasses.replace(TINY, hidden_size=64, intermediate_size=96, head_dim=32)
BLOCK_TYPES = [
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
]


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_quantised_blocks_are_read_as_the_library_does(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint_gguf.BLOCK_BYTES", 200)  # several blocks, the last one short
    weights = random_weights(QUANTISED)
    path = write_gguf(tmp_path / "a.gguf", QUANTISED, weights, tensor_type=kind)
    loaded = open_checkpoint(path)
    assert loaded.dtype is None
    tensors = dict(loaded.weights("cpu", torch.float32))
    for name, hf_name in {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "layers.1.mlp.down_proj.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        blocks = gguf.quantize(weights[hf_name].float().numpy(), kind)
        assert tensors[name].dtype == torch.float32
        assert np.array_equal(tensors[name].numpy(), gguf.dequantize(blocks, kind))


def rewrite(file: Path) -> None:
    """Other bytes of the same number in the same place."""
    data = file.read_bytes()
    file.write_bytes(data[:-64] + bytes(64))


def replace_by_copy(file: Path) -> None:
    """What a download tool does."""
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").replace(file)


def grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(10))


@every_format
@pytest.mark.parametrize("change", [rewrite, replace_by_copy, grow, Path.unlink])
def test_a_file_that_changes_between_check_and_read_is_named(
    change: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    loaded = open_checkpoint(tiny(kind, tmp_path))
    file = loaded.weight_files[-1]
    time.sleep(0.02)  # the kernel's clock for files has coarse steps
    change(file)
    with pytest.raises(OSError, match="changed since its header|No such file") as caught:
        list(loaded.weights("cpu", torch.float32))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, GGMLQuantizationType.F16], ids=lambda k: k.name)
def test_the_header_is_read_as_the_library_does(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    fields = {"some.list": [1, -2], "some.flag": False, "some.words": ["a", "ü"], "some.x": 0.5}
    weights = random_weights(QUANTISED)
    path = write_gguf(tmp_path / "a.gguf", QUANTISED, weights, tensor_type=kind, fields=fields)
    reader = gguf.GGUFReader(path)
    values, entries = read_header(path)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert values == expected
    assert {name: (e.offset, e.num_bytes) for name, e in entries.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors
    }


# Identity and cost


def test_model_sha_of_small_files_is_that_of_their_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "b", tmp_path / "a"]
    for file in files:
        file.write_bytes(file.name.encode() * 3_000_000)
    expected = hashlib.sha256(b"b" * 3_000_000 + b"a" * 3_000_000).hexdigest()[:12]
    assert model_sha(files) == expected
    assert model_sha(reversed(files)) != expected


@pytest.mark.parametrize(
    ("offset", "is_seen"),
    [(0, True), ((1 << 20) - 1, True), (1 << 21, False), ((1 << 26) - 1, True)],
)
def test_model_sha_of_large_files_sees_start_end_and_samples(
    offset: int, is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_base, "HASHED_WHOLE_BYTES", 1 << 25)
    file = tmp_path / "a"
    with file.open("wb") as opened:
        opened.truncate(1 << 26)
    before = model_sha([file])
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"x")
    assert (model_sha([file]) != before) == is_seen


LARGER = ModelConfig(
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    hidden_size=768,
    intermediate_size=2048,
    vocab_size=16000,
    max_seq_len=2048,
)


@pytest.fixture(scope="module")
def larger_weights() -> Weights:
    weights = random_weights(dataclasses.replace(LARGER, num_layers=0))
    layer = random_weights(dataclasses.replace(LARGER, num_layers=1, vocab_size=1))
    for names in tensor_names(LARGER):
        if names.hf not in weights:
            weights[names.hf] = layer[re.sub(r"layers\.\d+", "layers.0", names.hf)].clone()
    return weights


LARGER_WRITERS: dict[str, Callable[[Path, ModelConfig, Weights], Path]] = {
    "hf": write_hf,
    "hf-shards": lambda folder, *model: write_hf(folder, *model, num_shards=3),
    "hf-float32": lambda folder, *model: write_hf(folder, *model, dtype=torch.float32),
    "hf-bin": lambda folder, *model: pickle_hf(write_hf(folder, *model)),
    "meta": write_meta,
    "meta-shards": lambda folder, *model: shard_meta(write_meta(folder, *model), 4),
    "meta-llama2-shards": lambda folder, *model: shard_meta(
        write_meta(folder, *model), 2, embedding_dim=1
    ),
    "gguf": lambda folder, *model: write_gguf(folder / "a.gguf", *model),
    "gguf-q8_0": lambda folder, *model: write_gguf(
        folder / "a.gguf", *model, tensor_type=GGMLQuantizationType.Q8_0
    ),
    "gguf-parts": lambda folder, *model: (
        write_gguf(
            folder / "a.gguf", *model, tensor_type=GGMLQuantizationType.F16, max_tensors=10
        ).parent
    ),
}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", LARGER_WRITERS)
def test_loading_needs_the_model_one_tensor_and_a_tenth(
    kind: str, dtype: torch.dtype, larger_weights: Weights, processes, tmp_path: Path
) -> None:
    path = LARGER_WRITERS[kind](tmp_path / "model", LARGER, larger_weights)
    result = tmp_path / "result"
    process = processes.Process(target=measure_loading, args=(path, dtype, result))
    process.start()
    process.join()
    used, model_bytes, largest = json.loads(result.read_text())
    assert model_bytes > 90e6
    assert model_bytes < used <= model_bytes * 1.1 + largest * dtype.itemsize
    shutil.rmtree(tmp_path)


@pytest.mark.network
def test_the_default_model_is_read_whole() -> None:
    try:
        path = fetch.resolve(None)
    except UserError as error:
        if "sha256" in str(error):
            raise
        pytest.skip(str(error))
    loaded = open_checkpoint(path)
    config = ModelConfig(
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=100000.0,
        tie_embeddings=True,
    )
    assert (loaded.config, loaded.dtype) == (config, None)
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    assert sum(tensor.numel() for _, tensor in loaded.weights("cpu", torch.float32)) == 134_515_008
