"""Models without files: random weights in well-known shapes, to measure speed and memory.

`--checkpoint_path random:NAME` with a name of `SHAPES`. Their text means nothing.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_base import NO_NAMES, Checkpoint
from config import RANDOM_PREFIX, UserError, printable
from model import Transformer
from model_config import ModelConfig, RopeScaling
from stored_tensor import short_lived
from tokenizer_base import Tokenizer

SEED = 0
STANDARD_DEVIATION = 0.02
"""Of the matrices, as Llama's own training starts; norms are 1, so activations stay finite."""

MAX_SEQ_LEN = 1 << 21
"""Random weights have no trained context; the rope frequencies are those published."""

# meta-llama/Meta-Llama-3-8B, config.json
LLAMA_3_8B = ModelConfig(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_seq_len=MAX_SEQ_LEN,
    rope_theta=500000.0,
)
# HuggingFaceTB/SmolLM2-135M, config.json
SMOLLM2_135M = ModelConfig(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    max_seq_len=MAX_SEQ_LEN,
    rope_theta=100000.0,
    tie_embeddings=True,
)
SHAPES = {
    # meta-llama/Llama-3.1-8B, config.json
    "llama-3.1-8b": dataclasses.replace(
        LLAMA_3_8B, rope_scaling=RopeScaling(kind="llama3", factor=8.0)
    ),
    "llama-3-8b": LLAMA_3_8B,
    # meta-llama/Llama-2-7b, config.json
    "llama-2-7b": ModelConfig(
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        max_seq_len=MAX_SEQ_LEN,
        rope_theta=10000.0,
    ),
    # meta-llama/Llama-3.2-1B, config.json
    "llama-3.2-1b": ModelConfig(
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        hidden_size=2048,
        intermediate_size=8192,
        vocab_size=128256,
        max_seq_len=MAX_SEQ_LEN,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0),
        tie_embeddings=True,
    ),
    "smollm2-135m": SMOLLM2_135M,
    # of nobody: a cache of 3 KB per token in bf16, of which a million fit small machines
    "smollm2-4-layers": dataclasses.replace(SMOLLM2_135M, num_layers=4),
    # of nobody: for trying commands out
    "tiny": ModelConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        hidden_size=256,
        intermediate_size=512,
        vocab_size=512,
        max_seq_len=MAX_SEQ_LEN,
    ),
}


class RandomCheckpoint(Checkpoint):
    """`random:NAME`: the same weights in every run on one kind of device in one dtype.

    Those that are quantised are drawn in bf16.

    Raises:
        UserError: no such name.
    """

    dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        shape = self.name.removeprefix(RANDOM_PREFIX)
        if shape not in SHAPES:
            known = ", ".join(RANDOM_PREFIX + name for name in SHAPES)
            raise UserError(f"{printable(self.name)}: no such shape; take one of {known}")
        self.config = SHAPES[shape]

    @property
    def sha(self) -> str:
        settings = own_settings(self.config)
        recipe = f"{self.name} {settings} seed={SEED} std={STANDARD_DEVIATION}"
        return hashlib.sha256(recipe.encode()).hexdigest()[:12]

    def tokenizer(self) -> Tokenizer:
        return byte_tokenizer(self.config.vocab_size)

    def weights(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        empty: Callable[..., Tensor] = torch.empty,
        passing: Mapping[str, torch.dtype | None] = NO_NAMES,
    ) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator(device).manual_seed(SEED)
        with torch.device("meta"):
            parameters = dict(Transformer(self.config).named_parameters())
        for name, parameter in parameters.items():
            wanted, make = passing.get(name, dtype), short_lived if name in passing else empty
            assert wanted  # all or none are drawn: one number follows the other
            weight = make(parameter.shape, dtype=wanted, device=device)
            if weight.ndim == 1:
                yield name, weight.fill_(1)
            else:
                yield name, weight.normal_(0, STANDARD_DEVIATION, generator=generator)


def own_settings(config: Any) -> dict[str, Any]:
    """What a dataclass says beyond its defaults, so that a new option changes no old sha."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    return {
        name: own_settings(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte b of a text is id b; the other ids, which no text gives, print as some ASCII sign."""
    signs = bytes(range(0x20, 0x7F))
    others = [signs[i % len(signs)] for i in range(256, vocab_size)]
    return Tokenizer(
        encode_text=lambda text: list(text.encode()),
        pieces=[bytes([byte]) for byte in (*range(256), *others)],
        bos_id=None,
        stop_ids=frozenset(),
        special_ids=frozenset(),
        strips_leading_space=False,
    )
