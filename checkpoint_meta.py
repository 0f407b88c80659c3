"""Meta's folders: params.json and consolidated.00.pth, alone or under `original/`."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_base import COMPLETE, Fields, FileCheckpoint, main_dtype, refusing
from checkpoint_hf import folder_name
from config import UserError, printable
from model import ModelConfig, RopeScaling
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer

RESAVE = "re-save its tensors as safetensors in the Hugging Face layout"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_REOPENINGS = 50
# What the restricted unpickler and the zip reader raise on files that are not plain tensors.
PICKLE_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
)


class MetaCheckpoint(FileCheckpoint):
    """params.json beside one consolidated.00.pth, whose head is always stored, hence untied."""

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
        self.file = find_weight_file(folder)
        self.weight_files = (self.file,)
        self.stored = load(self.file)
        self.resident_bytes = 0
        shapes = {name: tuple(tensor.shape) for name, tensor in self.stored.items()}
        shapes.pop("rope.freqs", None)  # a buffer of old exports, computed from the config here
        self.config = read_config(Fields.from_json(folder / "params.json"), shapes)
        self.check(shapes)
        self.dtype = main_dtype([(tensor.dtype, tensor.nbytes) for tensor in self.stored.values()])

    def read(self, name: str) -> Tensor:
        # Pages of a mapping stay resident until it is closed, and unpickling for each tensor
        # would take seconds in all: so it is opened again for every few per cent of the file.
        if self.resident_bytes > self.file.stat().st_size // NUM_REOPENINGS:
            self.stored = load(self.file)
            self.resident_bytes = 0
        tensor = self.stored[name]
        self.resident_bytes += tensor.nbytes
        return tensor

    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.folder)


def find_weight_file(folder: Path) -> Path:
    found = sorted(folder.glob("consolidated.*.pth"))
    if not found:
        raise UserError(f"{folder}: has params.json but no consolidated.00.pth; {COMPLETE}")
    if len(found) > 1:
        cause = f"{len(found)} consolidated.*.pth shards are not supported"
        raise UserError(f"{folder}: {cause}; take the safetensors version of the model")
    return found[0]


def load(file: Path) -> dict[str, Tensor]:
    """The tensors of a .pth file as views of the mapped file; runs no code out of the pickle."""
    with refusing(file, PICKLE_ERRORS, RESAVE):
        stored = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(stored, dict):
        raise UserError(f"{file}: is not a table of tensors; {RESAVE}")
    for name, tensor in stored.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise UserError(f"{file}: {printable(repr(name))} is no named tensor; {RESAVE}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            kinds = ", ".join(str(dtype) for dtype in DTYPES)
            raise UserError(f"{file}: {printable(name)} is no dense tensor of {kinds}; {RESAVE}")
    return {name: tensor.detach() for name, tensor in stored.items()}


def read_config(fields: Fields, shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
    """ModelConfig of a params.json and of the shapes for what it leaves out.

    Files of the Llama family leave out the trained length; `default_max_seq_len` guesses it. The
    MLP's width follows from `multiple_of` by a rounding rule, so it is taken from its tensor.
    """
    num_heads = fields.integer("n_heads")
    vocab_size = fields.get("vocab_size", -1)  # -1: Llama 2 leaves it to the tokenizer
    return fields.model_config(
        num_layers=fields.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("n_kv_heads", num_heads),
        head_dim=num_rows(fields, shapes, "layers.0.attention.wq.weight") // num_heads,
        hidden_size=fields.integer("dim"),
        intermediate_size=num_rows(fields, shapes, "layers.0.feed_forward.w1.weight"),
        vocab_size=(
            num_rows(fields, shapes, "tok_embeddings.weight")
            if vocab_size == -1
            else fields.integer("vocab_size")
        ),
        max_seq_len=fields.integer("max_seq_len", default_max_seq_len(fields)),
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
    """Llama 3.1's constants, of which params.json names at most the factor (32 in Llama 3.2).

    Source: meta-llama/llama-models, models/llama3/model.py, `apply_scaling`.
    """
    if not fields.boolean("use_scaled_rope", default=False):
        return None
    return RopeScaling(
        kind="llama3",
        factor=fields.number("rope_scaling_factor", 8.0),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_seq_len=8192,
    )
