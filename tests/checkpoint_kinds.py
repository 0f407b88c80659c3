"""A tiny seeded model in every checkpoint format, and how it is refused, for tests."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoint_shards import pickle_hf, shard_meta
from gguf import GGMLQuantizationType
from torch import Tensor

import quantize
from checkpoint import open_checkpoint
from config import UserError
from model import Transformer
from model_config import ModelConfig
from quantize import QuantizeConfig
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf, write_hf, write_meta
from scripts.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(TINY.vocab_size)
Writer = Callable[[Path, ModelConfig, dict[str, Tensor]], Path]


def gguf_parts(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> Path:
    """Some four files; the folder is opened."""
    fields = TOKENIZER.gguf_fields
    write_gguf(folder / "tiny.gguf", config, weights, fields=fields, max_tensors=10)
    return folder


def gguf_blocks(name: str, *, max_tensors: int = 0) -> Writer:
    """A file, or parts of one, whose matrices are blocks of a type, which stay as they are."""
    kind = GGMLQuantizationType[name.upper()]

    def write(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> Path:
        file, fields = folder / "tiny.gguf", tiny_tokenizer(config.vocab_size).gguf_fields
        options = {"fields": fields, "tensor_type": kind, "max_tensors": max_tensors}
        write_gguf(file, config, weights, **options)
        return folder if max_tensors else file

    return write


def quantized(source: str, spec: str) -> Writer:
    """A folder of quantize.py, made of a checkpoint of another format."""

    def write(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> Path:
        path = WRITERS[source](folder.parent / "source", config, weights)
        with contextlib.redirect_stdout(io.StringIO()):
            quantize.main(QuantizeConfig(source=str(path), target=folder, quantization=spec))
        return folder

    return write


# name -> (folder, config, weights under Hugging Face's names) -> what to open
WRITERS: dict[str, Writer] = {
    "hf": lambda folder, *model: write_hf(folder, *model, files=TOKENIZER.hf_files),
    "hf-shards": lambda folder, *model: write_hf(
        folder, *model, num_shards=3, files=TOKENIZER.hf_files
    ),
    "hf-bin": lambda folder, *model: pickle_hf(WRITERS["hf"](folder, *model)),
    "hf-bin-shards": lambda folder, *model: pickle_hf(WRITERS["hf-shards"](folder, *model)),
    "meta": lambda folder, *model: write_meta(folder, *model, files=TOKENIZER.meta_files),
    "meta-shards": lambda folder, *model: shard_meta(write_meta(folder, *model), 4),
    "meta-llama2-shards": lambda folder, *model: shard_meta(
        write_meta(folder, *model), 2, embedding_dim=1
    ),
    "gguf": lambda folder, *model: write_gguf(
        folder / "tiny.gguf", *model, fields=TOKENIZER.gguf_fields
    ),
    "gguf-parts": gguf_parts,
}
# Matrices of theirs are codes; rows must be whole groups of 32.
CODE_WRITERS = {
    **{f"gguf-{name}": gguf_blocks(name) for name in ("q8_0", "q4_0", "q4_1")},
    "gguf-q4_0-parts": gguf_blocks("q4_0", max_tensors=10),
    "quantized": quantized("hf", "int4:32,int8"),
    "quantized-gguf": quantized("gguf", "int4:32,int8"),
}

every_format = pytest.mark.parametrize("kind", WRITERS)


def tiny(kind: str, folder: Path, config: ModelConfig = TINY) -> Path:
    """Write the seeded model below `folder`; gives the path to open, whose base name is tiny."""
    writers = WRITERS | CODE_WRITERS
    return writers[kind](folder / "tiny", config, random_weights(config))


def refusal(path: Path, *causes: str) -> str:
    """The line that opening `path` ends in; it must begin with that path and contain all causes."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for cause in causes:
        assert cause in message
    return message


def edit_json(file: Path, **changes: object) -> None:
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, **changes}))


class CausalCache:
    """All T tokens at once, nothing stored: what a cache answers on an empty past."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def loaded_logits(path: Path, tokens: Tensor) -> Tensor:
    loaded = open_checkpoint(path)
    model = Transformer(loaded.config).requires_grad_(False)
    parameters = dict(model.named_parameters())
    for name, tensor in loaded.weights("cpu", torch.float32):
        parameters.pop(name).copy_(tensor)
    assert not parameters
    caches = [CausalCache()] * loaded.config.num_layers
    return model.logits(model(tokens, torch.zeros(1, dtype=torch.long), caches, past_len=0))
