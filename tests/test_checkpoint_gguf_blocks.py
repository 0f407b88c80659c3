"""GGUF blocks that are kept: the numbers are those of the gguf library, bit for bit."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from checkpoint import open_checkpoint
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_gguf_blocks import KEPT_TYPES
from scripts.tiny_checkpoint import (
    TINY,
    gguf_settings,
    interleaved_rows,
    random_weights,
    tensor_names,
    write_gguf,
)

CONFIG = dataclasses.replace(TINY, hidden_size=64, intermediate_size=96, head_dim=32, num_layers=2)
Q4_0, Q8_0, Q5_1 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "Q5_1"))
CONFIGS = {
    "llama": CONFIG,
    "qwen2": dataclasses.replace(CONFIG, qkv_bias=True),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True),
}
every_kept_type = pytest.mark.parametrize("kind", KEPT_TYPES, ids=lambda kind: kind.name)


def write_mixed(file: Path, kind: GGMLQuantizationType, **others: GGMLQuantizationType) -> Path:
    """All matrices as `kind`, but those whose name in the file ends in a key of `others`."""
    weights = random_weights(CONFIG)
    writer = GGUFWriter(file, "llama")
    for key, value in gguf_settings(CONFIG).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    for names in tensor_names(CONFIG):
        weight = interleaved_rows(weights[names.hf], CONFIG, names.hf).float().numpy()
        last = names.gguf.removesuffix(".weight").rpartition(".")[2]
        wanted = others.get(last, kind) if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(names.gguf, gguf.quantize(weight, wanted), raw_dtype=wanted)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return file


def dense_by_the_library(checkpoint: GGUFCheckpoint) -> dict[str, torch.Tensor]:
    """Every matrix in fp32 under our name, q and k rows in their half-split order."""
    file = gguf.GGUFReader(checkpoint.path)
    dense = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in file.tensors}
    merged = {}
    for name, sources in checkpoint.sources().items():
        rows = []
        for source in sources:
            part = dense[source.name].reshape(source.shape)
            if source.num_heads:  # row 2i of a head becomes i, row 2i + 1 becomes D / 2 + i
                heads = part.reshape(source.num_heads, -1, part.shape[-1])
                part = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1)
                part = part.reshape(source.shape)
            rows.append(part)
        merged[name] = torch.from_numpy(np.concatenate(rows))
    return merged


@every_kept_type
@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("read_bytes", [1, 200, 1 << 20])
def test_kept_weights_stand_for_the_numbers_of_the_library(
    kind: GGMLQuantizationType,
    architecture: str,
    read_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("checkpoint_gguf_blocks.READ_BYTES", read_bytes)
    config = CONFIGS[architecture]
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), tensor_type=kind)
    loaded = open_checkpoint(path)
    expected = dense_by_the_library(loaded)
    matrices = {name for name, weight in expected.items() if weight.ndim == 2}
    assert loaded.kept == dict.fromkeys(matrices, KEPT_TYPES[kind])
    for name in matrices:
        assert torch.equal(loaded.read_kept(name).dequantize(), expected[name]), name


@every_kept_type
def test_random_blocks_of_every_code_and_scale_are_kept(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def random_blocks(weight: np.ndarray, wanted: GGMLQuantizationType) -> np.ndarray:
        if wanted != kind:
            return weight
        block_size, type_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = weight.size // block_size
        data = generator.integers(0, 256, (blocks, type_bytes), dtype=np.uint8)
        for i in range(type_bytes - (32 if kind == Q8_0 else 16)):
            data[:, i] = data[:, i] % 124 if i % 2 else data[:, i]  # fp16 that is finite, and > 0
        return data.reshape(weight.shape[0], -1)

    generator = np.random.default_rng(0)
    monkeypatch.setattr(gguf, "quantize", random_blocks)
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_weights(CONFIG), tensor_type=kind)
    loaded = open_checkpoint(path)
    expected = dense_by_the_library(loaded)
    for name in loaded.kept:
        assert torch.equal(loaded.read_kept(name).dequantize(), expected[name]), name


@pytest.mark.parametrize(
    ("others", "dense"),
    [
        ({"attn_v": Q8_0}, "qkv_proj"),
        ({"ffn_up": Q5_1}, "gate_up_proj"),
        ({"ffn_down": Q5_1}, "down_proj"),
        ({"token_embd": GGMLQuantizationType.F16}, "embed_tokens"),
    ],
)
def test_a_parameter_of_several_types_is_not_kept(
    others: dict[str, GGMLQuantizationType], dense: str, tmp_path: Path
) -> None:
    loaded = open_checkpoint(write_mixed(tmp_path / "a.gguf", Q4_0, **others))
    matrices = {name for name, rows in loaded.sources().items() if len(rows[0].shape) == 2}
    assert set(loaded.kept) == {name for name in matrices if dense not in name}
    assert set(loaded.kept.values()) == {"q4_0"}
    expected = dense_by_the_library(loaded)
    found = dict(loaded.weights("cpu", torch.float32, passing=dict.fromkeys(loaded.kept)))
    assert set(found) == set(expected) - set(loaded.kept)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
