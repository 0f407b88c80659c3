"""Hugging Face folders: config.json beside safetensors or .bin files, one or several."""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint_base import FileCheckpoint, load_headers, main_dtype
from checkpoint_fields import COMPLETE, Fields
from checkpoint_hf_config import ARCHITECTURES, read_config
from checkpoint_hf_files import find_weights
from config import Faults, UserError, printable
from stored_tensor import StoredTensor
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HFCheckpoint(FileCheckpoint):
    """config.json beside weights; q and k rows already are in the half-split layout."""

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
    cure = f"{COMPLETE}; supported are {', '.join(ARCHITECTURES)}"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = folder_name(path)
        self.stored: dict[str, StoredTensor] = {}
        faults = Faults()
        config = faults.check(lambda: read_config(Fields.from_json(path / "config.json")))
        faults.check(self.find_tensors)
        faults.refuse()
        assert config is not None
        self.config = config
        head = self.stored.pop(HEAD, None) if self.config.tie_embeddings else None
        if head:  # a tied matrix may be there twice, or under the name of the head alone
            self.stored.setdefault(EMBEDDING, head)
        self.check({name: tensor.shape for name, tensor in self.stored.items()})
        if head:
            self.check_tied(head)
        self.dtype = main_dtype([(t.dtype, t.num_bytes) for t in self.stored.values()])

    def find_tensors(self) -> None:
        """Where each tensor lies, whatever the config says."""
        layout, self.weight_files = find_weights(self.path)
        headers = load_headers(self.weight_files, layout.read_header, layout.cure)
        for file, header in zip(self.weight_files, headers, strict=True):
            self.add(file, header)

    def add(self, file: Path, header: dict[str, StoredTensor]) -> None:
        for name, tensor in header.items():
            if name.endswith("rotary_emb.inv_freq"):  # a buffer of old exports
                continue
            if name in self.stored:
                other = self.stored[name].file.name
                raise UserError(f"{file}: {printable(name)} is in {other} too; {COMPLETE}")
            self.stored[name] = tensor

    def check_tied(self, head: StoredTensor) -> None:
        """Refuse a head that is no copy of the embedding: the config or the files are wrong."""
        embedding = self.stored[EMBEDDING]
        if (head.file, head.offset) == (embedding.file, embedding.offset):
            return
        if (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
            copies = (each.read().contiguous().view(torch.uint8) for each in (head, embedding))
            if torch.equal(*copies):
                return
        cause = f"tie_word_embeddings is true, but {HEAD} in {head.file.name} is no copy of"
        cure = "set it to false if the head was trained"
        raise UserError(f"{self.path / 'config.json'}: {cause} {EMBEDDING}; {cure}")

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
