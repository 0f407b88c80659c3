"""GGUF files: the config from the metadata, tensors read by offset and dequantised."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from checkpoint_base import FileCheckpoint, main_dtype
from checkpoint_fields import COMPLETE, Fields
from checkpoint_gguf_blocks import kept_layouts, read_blocks
from checkpoint_gguf_header import Entry
from checkpoint_gguf_parts import model_name, read_parts
from config import UserError, printable
from kernels.quantized import QuantizedWeight
from model_config import ModelConfig, RopeScaling
from stored_tensor import StoredTensor, fill, opened_at
from tokenizer_base import Tokenizer, reading
from tokenizer_gguf import gguf_tokenizer

ROPE_FACTORS = "rope_freqs.weight"
BLOCK_BYTES = 1 << 18  # dequantised at a time: its fp32 temporaries stay in the CPU's cache

INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architecture -> whether rows of q and k are in Meta's rope layout: llama.cpp's `rope_type`.

The only list of those that are read. In llama.cpp's src/llama-arch.cpp their tensors differ by
biases of q, k and v, and by norms of q and k."""

# Settings that would make the model another one, where they are not these; behind its name.
REQUIRED_SETTINGS: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,  # llama.cpp's word for head_dim ** -0.5
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "expert_count": 0,
    "use_parallel_residual": False,
}

PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFCheckpoint(FileCheckpoint):
    """A .gguf file or its parts, of an architecture of INTERLEAVED; without `output.weight` tied.

    Attributes:
        architecture: its name, with which the keys of its settings begin.
    """

    names = {
        "embed_tokens": ["token_embd"],
        "layers.{}.attention_norm": ["blk.{}.attn_norm"],
        "layers.{}.attention.qkv_proj": ["blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"],
        "layers.{}.attention.q_norm": ["blk.{}.attn_q_norm"],
        "layers.{}.attention.k_norm": ["blk.{}.attn_k_norm"],
        "layers.{}.attention.o_proj": ["blk.{}.attn_output"],
        "layers.{}.mlp_norm": ["blk.{}.ffn_norm"],
        "layers.{}.mlp.gate_up_proj": ["blk.{}.ffn_gate", "blk.{}.ffn_up"],
        "layers.{}.mlp.down_proj": ["blk.{}.ffn_down"],
        "norm": ["output_norm"],
        "lm_head": ["output"],
    }

    def __init__(self, path: Path) -> None:
        """Open `path`: the only file, or any part of several."""
        self.path = path
        self.name = model_name(path)
        self.weight_files, values, self.entries = read_parts(path)
        self.fields = Fields(self.weight_files[0], values)
        check_readable(self.entries)
        self.architecture = read_architecture(self.fields)
        self.interleaved_rope = INTERLEAVED[self.architecture]
        self.config = self._read_config()
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        shapes.pop(ROPE_FACTORS, None)  # part of the config, not a parameter
        self.check(shapes)
        self.all_sources = self.sources()
        self.kept = kept_layouts(self.all_sources, self.entries)
        entries = self.entries.values()
        self.dtype = main_dtype([(PLAIN_DTYPES.get(e.tensor_type), e.num_bytes) for e in entries])

    def _read_config(self) -> ModelConfig:
        """ModelConfig of the metadata, with the defaults that llama.cpp takes."""
        fields, name = self.fields, self.architecture
        fields.require({f"{name}.{key}": value for key, value in REQUIRED_SETTINGS.items()})
        num_heads = fields.integer(f"{name}.attention.head_count")
        hidden_size = fields.integer(f"{name}.embedding_length")
        head_dim = fields.integer(f"{name}.attention.key_length", hidden_size // num_heads)
        for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
            if fields.get(key, head_dim) != head_dim:
                raise fields.error(key, f"only the size of a key head, {head_dim}, is supported")
        return fields.model_config(
            num_layers=fields.integer(f"{name}.block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer(f"{name}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{name}.feed_forward_length"),
            vocab_size=self._vocab_size(),
            max_seq_len=fields.within_window(
                fields.integer(f"{name}.context_length"), f"{name}.attention.sliding_window"
            ),
            norm_eps=shortest(fields.number(f"{name}.attention.layer_norm_rms_epsilon")),
            rope_theta=fields.number(f"{name}.rope.freq_base", 10000.0),
            rope_scaling=self._read_rope_scaling(head_dim),
            tie_embeddings="output.weight" not in self.entries,
            qkv_bias=name == "qwen2" or "blk.0.attn_q.bias" in self.entries,
            o_bias="blk.0.attn_output.bias" in self.entries,
            qk_norm=name == "qwen3",
        )

    def _vocab_size(self) -> int:
        embedding = self.entries.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise UserError(f"{self.path}: holds no weights (no token_embd.weight); {COMPLETE}")
        return embedding.shape[0]

    def _read_rope_scaling(self, head_dim: int) -> RopeScaling | None:
        """Of the keys, or of the frequency tensor in which converters store Llama 3.1's scaling."""
        linear = self._linear_scaling()
        factors = self.entries.get(ROPE_FACTORS)
        if factors is None:
            return linear
        if linear or factors.shape != (head_dim // 2,):
            cause = f"{ROPE_FACTORS} of shape {factors.shape} beside {linear} is not supported"
            raise UserError(f"{self.path}: {cause}; take another checkpoint")
        values = torch.empty(factors.shape, dtype=torch.float32)
        self.read_into(ROPE_FACTORS, values)
        if not (values.isfinite() & (values > 0)).all():
            raise UserError(f"{self.path}: {ROPE_FACTORS} is not finite and above 0; {COMPLETE}")
        return RopeScaling(kind="factors", freq_factors=tuple(values.tolist()))

    def _linear_scaling(self) -> RopeScaling | None:
        """As llama.cpp reads it: linear where no type is named, none where the factor is 0."""
        fields = self.fields
        kind_key = f"{self.architecture}.rope.scaling.type"
        kind = fields.get(kind_key, "linear")
        if kind not in ("none", "linear"):
            raise fields.error(kind_key, "supported are none and linear")
        keys = (f"{self.architecture}.rope.{name}" for name in ("scaling.factor", "scale_linear"))
        key = next((key for key in keys if fields.get(key, 0)), None)
        if kind == "none" or key is None:
            return None
        return RopeScaling(kind="linear", factor=fields.number(key))

    def read_into(self, name: str, out: Tensor) -> None:
        entry = self.entries[name]
        if dtype := PLAIN_DTYPES.get(entry.tensor_type):
            StoredTensor(entry.file, dtype, entry.shape, entry.offset).read_into(out)
        else:
            dequantise(entry, out)

    def read_kept(self, name: str) -> QuantizedWeight:
        return read_blocks(self.kept[name], self.all_sources[name], self.entries)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_in(self.fields.values, self.path)


def tokenizer_in(values: Mapping[str, Any], file: Path) -> Tokenizer:
    """The tokenizer of GGUF metadata, which came from `file`."""
    with reading(file):
        try:
            return gguf_tokenizer(values, str(file))
        except UserError as error:  # it knows the keys, not the file
            raise UserError(f"{file}: {error}") from error


def read_architecture(fields: Fields) -> str:
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in INTERLEAVED:
        raise fields.error("general.architecture", f"supported are {', '.join(INTERLEAVED)}")
    return name


def shortest(value: float) -> float:
    """The fp32 value as it was written, so that 1e-5 is 1e-5 in every format."""
    return float(str(np.float32(value)))


def check_readable(entries: dict[str, Entry]) -> None:
    """Refuse block formats that the library cannot dequantise, before any tensor is read."""
    for name, entry in entries.items():
        if not is_readable(entry.tensor_type):
            known = ", ".join(kind.name for kind in GGMLQuantizationType if is_readable(kind))
            cause = (
                f"{printable(name)} is stored as {entry.tensor_type.name}, supported are {known}"
            )
            raise UserError(f"{entry.file}: {cause}; convert it to BF16 or Q8_0")


@functools.cache
def is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether the library dequantises it: only trying tells."""
    _, type_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, type_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@np.errstate(all="ignore")  # scales that are not finite: the run refuses its logits, in one line
def dequantise(entry: Entry, out: Tensor) -> None:
    """Fill `out`, of any dtype and on any device, block of rows by block of rows."""
    rows = out.view(-1, entry.shape[-1])
    row_bytes = entry.num_bytes // len(rows)
    with opened_at(entry.file, entry.offset, entry.num_bytes) as opened:
        for block in rows.split(max(1, BLOCK_BYTES // row_bytes)):
            data = torch.empty((len(block), row_bytes), dtype=torch.uint8)
            fill(opened, data)
            block.copy_(torch.from_numpy(gguf.dequantize(data.numpy(), entry.tensor_type)))
