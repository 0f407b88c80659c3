"""The default model in every format: the weights of its own file bit for bit, the same logits."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from checkpoint_kinds import WRITERS, loaded_logits
from checkpoint_shards import shard_meta
from gguf import GGMLQuantizationType
from material import default_model
from torch import Tensor

from checkpoint import open_checkpoint
from model_config import ModelConfig
from scripts.tiny_checkpoint import (
    interleaved_rows,
    tensor_names,
    weights_of,
    write_gguf,
    write_hf,
    write_meta,
)

pytestmark = [pytest.mark.network, pytest.mark.slow]

Weights = dict[str, Tensor]
Writer = Callable[[Path, ModelConfig, Weights], Path]


def in_gguf(kind: GGMLQuantizationType, *, max_tensors: int = 0) -> Writer:
    """All of a split model is opened by its folder."""

    def write(folder: Path, config: ModelConfig, weights: Weights) -> Path:
        file = folder / "a.gguf"
        write_gguf(file, config, weights, tensor_type=kind, max_tensors=max_tensors)
        return folder if max_tensors else file

    return write


def in_shards(num_shards: int, embedding_dim: int = 0) -> Writer:
    return lambda folder, *model: shard_meta(
        write_meta(folder, *model), num_shards, embedding_dim=embedding_dim
    )


# 9 heads and 3 KV heads: only 3 shards cut between heads, and 2, 4 and 8 within one.
FORMATS: dict[str, Writer] = WRITERS | {
    "hf-float32": lambda folder, *model: write_hf(folder, *model, dtype=torch.float32),
    **{f"meta-{n}-shards": in_shards(n) for n in (2, 3, 8)},
    **{f"meta-llama2-{n}-shards": in_shards(n, 1) for n in (3, 8)},
    "gguf-float32": in_gguf(GGMLQuantizationType.F32),
    "gguf-float32-parts": in_gguf(GGMLQuantizationType.F32, max_tensors=100),
}

# Rows of 576 are no whole blocks of 256, so none of the K kinds, nor can the library write them.
BLOCKS = [GGMLQuantizationType[name] for name in ("F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")]


class Written:
    """The default model in bf16, as a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        source = open_checkpoint(default_model())
        self.config, self.weights = source.config, weights_of(source)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(self.config.vocab_size, (1, 32), generator=generator)
        self.logits = loaded_logits(write_hf(folder, self.config, self.weights), self.ids)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    folder = tmp_path_factory.mktemp("default")
    yield Written(folder / "hf")
    shutil.rmtree(folder)


def check_weights(path: Path, config: ModelConfig, weights: Weights) -> None:
    """What is read is what was written under Hugging Face's names; Meta has a head of its own."""
    found = dict(open_checkpoint(path).weights("cpu", torch.float32))
    expected: dict[str, list[Tensor]] = {}
    for names in tensor_names(config):
        expected.setdefault(names.ours, []).append(weights[names.hf])
    if (path / "params.json").exists():
        expected["lm_head.weight"] = expected["embed_tokens.weight"]
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        assert torch.equal(found[name], torch.cat(parts).float()), name


def in_blocks(weight: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """A matrix as the library makes blocks of it and reads them; norms stay."""
    if weight.ndim == 1:
        return weight.float()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.float().numpy(), kind), kind))


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_bit_equal_and_logits_equal(
    kind: str, written: Written, tmp_path: Path
) -> None:
    path = FORMATS[kind](tmp_path / "model", written.config, written.weights)
    check_weights(path, written.config, written.weights)
    assert torch.equal(loaded_logits(path, written.ids), written.logits)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_the_weights_and_the_logits_that_the_library_makes_of_them(
    kind: GGMLQuantizationType, written: Written, tmp_path: Path
) -> None:
    rounded = {name: in_blocks(weight, kind) for name, weight in written.weights.items()}
    folder = write_hf(tmp_path / "hf", written.config, rounded, dtype=torch.float32)
    expected = loaded_logits(folder, written.ids)
    for name, max_tensors in (("single", 0), ("split", 100)):
        write = in_gguf(kind, max_tensors=max_tensors)
        path = write(tmp_path / name, written.config, written.weights)
        check_weights(path, written.config, rounded)
        assert torch.equal(loaded_logits(path, written.ids), expected)
    shutil.rmtree(tmp_path)


def test_the_file_itself_is_read_as_the_library_reads_it() -> None:
    source = open_checkpoint(default_model())
    found, config = dict(source.weights("cpu", torch.float32)), source.config
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(default_model()).tensors}
    start = dict.fromkeys(found, 0)
    for names in tensor_names(config):
        tensor = stored.pop(names.gguf)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        rows = found[names.ours][start[names.ours] :][: len(expected)]
        assert torch.equal(interleaved_rows(rows, config, names.hf), expected), names.gguf
        start[names.ours] += len(rows)
    assert not stored
    assert start == {name: len(weight) for name, weight in found.items()}
