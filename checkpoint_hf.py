"""Hugging Face folders: config.json and safetensors, one file or shards with an index."""

from pathlib import Path

from torch import Tensor

from checkpoint_base import (
    COMPLETE,
    Fields,
    FileCheckpoint,
    main_dtype,
    refusing,
)
from checkpoint_hf_config import read_config
from checkpoint_safetensors_header import read_header
from config import UserError, printable
from stored_tensor import DTYPES, DamagedFile, StoredTensor, check_regular, is_regular
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer

INDEX_NAME = "model.safetensors.index.json"


class HFCheckpoint(FileCheckpoint):
    """config.json beside safetensors files; q and k rows already are in the half-split layout."""

    names = {
        "embed_tokens": ["model.embed_tokens"],
        "layers.{}.attention_norm": ["model.layers.{}.input_layernorm"],
        "layers.{}.attention.qkv_proj": [
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ],
        "layers.{}.attention.q_norm": ["model.layers.{}.self_attn.q_norm"],
        "layers.{}.attention.k_norm": ["model.layers.{}.self_attn.k_norm"],
        "layers.{}.attention.o_proj": ["model.layers.{}.self_attn.o_proj"],
        "layers.{}.mlp_norm": ["model.layers.{}.post_attention_layernorm"],
        "layers.{}.mlp.gate_up_proj": [
            "model.layers.{}.mlp.gate_proj",
            "model.layers.{}.mlp.up_proj",
        ],
        "layers.{}.mlp.down_proj": ["model.layers.{}.mlp.down_proj"],
        "norm": ["model.norm"],
        "lm_head": ["lm_head"],
    }
    interleaved_rope = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = folder_name(path)
        self.config = read_config(Fields.from_json(path / "config.json"))
        self.weight_files = find_weight_files(path)
        self.stored: dict[str, StoredTensor] = {}
        for file in self.weight_files:
            for name, tensor in load_header(file).items():
                if self.is_left_out(name):
                    continue
                if name in self.stored:
                    other = self.stored[name].file.name
                    raise UserError(f"{file}: {printable(name)} is in {other} too")
                self.stored[name] = tensor
        self.check({name: tensor.shape for name, tensor in self.stored.items()})
        self.dtype = main_dtype([(t.dtype, t.num_bytes) for t in self.stored.values()])

    def is_left_out(self, name: str) -> bool:
        """Buffers of old exports, and the copy of a tied head that some exports contain."""
        is_tied_head = name == "lm_head.weight" and self.config.tie_embeddings
        return is_tied_head or name.endswith("rotary_emb.inv_freq")

    def read_into(self, name: str, out: Tensor) -> None:
        self.stored[name].read_into(out)

    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.path)


def folder_name(folder: Path) -> str:
    """Base name of a folder; in the hub's cache the repository's name instead of the commit."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The set of safetensors files that holds the model; files outside it are not looked at."""
    found = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_NAME
    if folder / "model.safetensors" in found:
        return (folder / "model.safetensors",)
    if index.is_file():
        return shards_of(index)
    if len(found) == 1:
        return (found[0],)
    if found:
        raise UserError(f"{folder}: {len(found)} safetensors files and no {INDEX_NAME}; add it")
    raise UserError(
        f"{folder}: holds no safetensors file; convert its weights to model.safetensors"
    )


def shards_of(index: Path) -> tuple[Path, ...]:
    weight_map = Fields.from_json(index).section("weight_map")
    names = list(weight_map.values.values()) if weight_map else []
    if not names:
        raise UserError(f"{index}: names no file; {COMPLETE}")
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: {printable(repr(name))} is no plain file name; {COMPLETE}")
    shards = tuple(index.parent / name for name in sorted(set(names)))
    missing = [shard.name for shard in shards if not is_regular(shard)]
    if missing:
        listed = ", ".join(printable(name) for name in missing[:3])
        raise UserError(f"{index}: {len(missing)} files it names are missing: {listed}; {COMPLETE}")
    return shards


def load_header(file: Path) -> dict[str, StoredTensor]:
    """The places of all tensors in a safetensors file; none is read."""
    check_regular([file])
    with refusing(file, (DamagedFile, OSError), COMPLETE):
        header = read_header(file)
    for name, tensor in header.items():
        if tensor.dtype not in DTYPES:
            cure = f"convert it to one of {', '.join(str(dtype) for dtype in DTYPES)}"
            raise UserError(f"{file}: {printable(name)} is {tensor.dtype}; {cure}")
    return header
