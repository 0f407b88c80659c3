"""Meta's folders: params.json and consolidated.00.pth or several shards, also under `original/`."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_base import FileCheckpoint, load_headers, main_dtype
from checkpoint_fields import COMPLETE, Fields
from checkpoint_hf import folder_name
from checkpoint_pth_header import RESAVE, read_header
from config import Faults, UserError, printable
from model_config import ModelConfig, RopeScaling
from stored_tensor import StoredTensor
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer

log = logging.getLogger("kv_fast")

# The last part of a matrix's name -> the dimension that shards divide; norms are in all of them.
# Source: meta-llama/llama-models, models/llama3/model.py, its column and row parallel layers.
SPLIT_DIMS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}
EMBEDDING = "tok_embeddings.weight"
LLAMA32_SIZES = (2048, 3072)
"""`dim` of Llama 3.2 with 1B and 3B parameters. Of Llama 3.1 and 3.3 none is below 4096."""

# Settings that would make the model another one, where they are not these.
REQUIRED_SETTINGS: dict[str, Any] = {
    "moe": None,
    "moe_args": None,
    "quantization_args": None,
    "lora_args": None,
    "use_qk_norm": False,
    "nope_layer_interval": None,
    "attn_temperature_tuning": False,
}


class MetaCheckpoint(FileCheckpoint):
    """params.json beside consolidated.NN.pth shards; their head is always stored, hence untied."""

    names = {
        "embed_tokens": ["tok_embeddings"],
        "layers.{}.attention_norm": ["layers.{}.attention_norm"],
        "layers.{}.attention.qkv_proj": [
            "layers.{}.attention.wq",
            "layers.{}.attention.wk",
            "layers.{}.attention.wv",
        ],
        "layers.{}.attention.o_proj": ["layers.{}.attention.wo"],
        "layers.{}.mlp_norm": ["layers.{}.ffn_norm"],
        "layers.{}.mlp.gate_up_proj": ["layers.{}.feed_forward.w1", "layers.{}.feed_forward.w3"],
        "layers.{}.mlp.down_proj": ["layers.{}.feed_forward.w2"],
        "norm": ["norm"],
        "lm_head": ["output"],
    }
    interleaved_rope = True

    def __init__(self, path: Path, folder: Path) -> None:
        """Open `folder`, which holds params.json and is `path` or its subfolder `original`."""
        self.path = path
        self.name = folder_name(path)
        self.folder = folder
        faults = Faults()
        fields = faults.check(Fields.from_json, folder / "params.json")
        faults.check(self.find_shards)
        faults.refuse()
        assert fields is not None
        self.hidden_size = fields.integer("dim")
        check_num_shards(fields, self.shards)
        shapes = {name: self.merged_shape(name) for name in self.shards[0]}
        shapes.pop("rope.freqs", None)  # a buffer of old exports, computed from the config here
        self.config = read_config(fields, shapes)
        self.check(shapes)
        self.check_copies(shapes)
        self.dtype = main_dtype([(t.dtype, t.num_bytes) for t in self.shards[0].values()])

    def find_shards(self) -> None:
        """What each shard holds, whatever params.json says."""
        self.weight_files = find_weight_files(self.folder)
        self.shards = load_headers(self.weight_files, read_header, RESAVE)
        check_shards_agree(self.weight_files, self.shards)

    def split_dim(self, name: str) -> int | None:
        """The dimension of a tensor that the shards divide; None where each holds all of it.

        Llama 2's shards have all rows of the embedding and some of its columns, Llama 3's have
        whole rows.
        """
        if name != EMBEDDING:
            return SPLIT_DIMS.get(name.removesuffix(".weight").rpartition(".")[2])
        return int(self.shards[0][name].shape[-1:] != (self.hidden_size,))

    def merged_shape(self, name: str) -> tuple[int, ...]:
        shape, dim = list(self.shards[0][name].shape), self.split_dim(name)
        if dim is not None and len(shape) == 2:
            shape[dim] *= len(self.shards)
        return tuple(shape)

    def check_copies(self, names: Iterable[str]) -> None:
        """Refuse shards that differ in what each holds whole: they are of different models."""
        for name in names:
            if self.split_dim(name) is None:
                first, *others = (shard[name].read().view(torch.uint8) for shard in self.shards)
                for file, copy in zip(self.weight_files[1:], others, strict=True):
                    if not torch.equal(first, copy):
                        cause = f"{name} differs from that of {self.weight_files[0].name}"
                        raise UserError(f"{file}: {cause}; take all shards of one model")

    def read_into(self, name: str, out: Tensor) -> None:
        dim = self.split_dim(name)
        shards = self.shards if dim is not None else self.shards[:1]
        for shard, part in zip(shards, out.chunk(len(shards), dim or 0), strict=True):
            shard[name].read_into(part)

    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.folder)


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The shards in order. They are numbered from 00 on without a gap."""
    found = {file.name for file in folder.glob("consolidated.*.pth")}
    names = [f"consolidated.{i:02}.pth" for i in range(len(found))]
    if not found:
        raise UserError(f"{folder}: has params.json but no consolidated.00.pth; {COMPLETE}")
    for name in names:
        if name not in found:
            cause = f"has {len(found)} consolidated.*.pth files, but not {name}"
            raise UserError(f"{folder}: {cause}; {COMPLETE}")
    return tuple(folder / name for name in names)


def check_shards_agree(files: Sequence[Path], shards: Sequence[dict[str, StoredTensor]]) -> None:
    """Refuse a shard that has other tensors than the first one, or others shapes or dtypes."""
    first = {name: (tensor.dtype, tensor.shape) for name, tensor in shards[0].items()}
    for file, shard in zip(files, shards, strict=True):
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in shard.items()}
        for name in sorted(first.keys() | kinds.keys()):
            if first.get(name) != kinds.get(name):
                cause = f"{printable(name)} is {kinds.get(name)}, in {files[0].name} it is"
                raise UserError(f"{file}: {cause} {first.get(name)}; {COMPLETE}")


def check_num_shards(fields: Fields, shards: Sequence[dict[str, StoredTensor]]) -> None:
    """Refuse a folder without its last shards: the embedding says how many there are."""
    if EMBEDDING not in shards[0] or len(shards[0][EMBEDDING].shape) != 2:
        return  # read_config names it
    rows, columns = shards[0][EMBEDDING].shape
    whole, part = fields.integer("dim"), columns
    if columns == whole:
        whole, part = fields.get("vocab_size", -1), rows
    if type(whole) is int and part and whole > len(shards) * part and whole % part == 0:
        cause = f"shard {len(shards)} of {whole // part}, consolidated.{len(shards):02}.pth,"
        raise UserError(f"{fields.file.parent}: {cause} is missing; {COMPLETE}")


def read_config(fields: Fields, shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
    """ModelConfig of a params.json and of the shapes for what it leaves out.

    Files of the Llama family leave out the trained length; `default_max_seq_len` guesses it. The
    MLP's width follows from `multiple_of` by a rounding rule, so it is taken from its tensor.
    """
    fields.require(REQUIRED_SETTINGS)
    num_heads = fields.integer("n_heads")
    q_rows = num_rows(fields, shapes, "layers.0.attention.wq.weight")
    vocab_size = fields.get("vocab_size", -1)  # -1: Llama 2 leaves it to the tokenizer
    return fields.model_config(
        num_layers=fields.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("n_kv_heads", num_heads),
        head_dim=fields.integer("head_dim", q_rows // num_heads),
        hidden_size=fields.integer("dim"),
        intermediate_size=num_rows(fields, shapes, "layers.0.feed_forward.w1.weight"),
        vocab_size=(
            num_rows(fields, shapes, "tok_embeddings.weight")
            if vocab_size == -1
            else fields.integer("vocab_size")
        ),
        max_seq_len=fields.within_window(
            fields.integer("max_seq_len", default_max_seq_len(fields)), "sliding_window"
        ),
        norm_eps=fields.number("norm_eps"),
        rope_theta=fields.number("rope_theta", 10000.0),
        rope_scaling=read_rope_scaling(fields),
    )


def num_rows(fields: Fields, shapes: dict[str, tuple[int, ...]], name: str) -> int:
    if len(shapes.get(name, ())) != 2:
        raise UserError(f"{fields.file}: no matrix {name} in the weights beside it; {COMPLETE}")
    return shapes[name][0]


def default_max_seq_len(fields: Fields) -> int:
    """131072 for Llama 3.1 and later, 8192 for Llama 3, else 4096 as for Llama 2."""
    if fields.boolean("use_scaled_rope", default=False):
        return 131072
    return 8192 if fields.get("rope_theta") == 500000 else 4096


def read_rope_scaling(fields: Fields) -> RopeScaling | None:
    """Llama 3.1's constants, of which params.json names at most the factor.

    Source: meta-llama/llama-models, models/llama3/model.py, `apply_scaling`.
    """
    if not fields.boolean("use_scaled_rope", default=False):
        return None
    return RopeScaling(
        kind="llama3",
        factor=fields.number("rope_scaling_factor", default_rope_factor(fields)),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_seq_len=8192,
    )


def default_rope_factor(fields: Fields) -> float:
    """32 for Llama 3.2 of 1B and 3B, else 8; a note says which, since no file does.

    Their config.json says 32. Meta's code once had 8 for all: meta-llama/llama-models, issue 241.
    """
    factor = 32.0 if fields.get("dim") in LLAMA32_SIZES else 8.0
    if fields.get("rope_scaling_factor") is None:
        log.info("%s: rope_scaling_factor is missing, %g is taken", fields.file, factor)
    return factor
