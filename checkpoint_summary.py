"""What the tool sees in a checkpoint, as a document and as text; no tensor is read."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from checkpoint_base import Checkpoint, FileCheckpoint
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_hf import HFCheckpoint
from checkpoint_meta import MetaCheckpoint
from checkpoint_quantized import QuantizedCheckpoint
from config import printable
from model import Transformer
from summary import size_text
from tokenizer_base import Tokenizer
from tokenizer_files import read_json
from weight_formats import describe_formats

FORMATS: dict[type[Checkpoint], str] = {
    HFCheckpoint: "Hugging Face",
    MetaCheckpoint: "Meta",
    GGUFCheckpoint: "GGUF",
    QuantizedCheckpoint: "quantised by this tool",
}


def summarize(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """A JSON document: shapes from the config, tensors from the model that it describes."""
    config = checkpoint.config
    shapes = dataclasses.asdict(config)
    rope = {"theta": shapes.pop("rope_theta"), "scaling": shapes.pop("rope_scaling")}
    return {
        "path": str(checkpoint.path),
        "name": checkpoint.name,
        "format": next(
            (n for kind, n in FORMATS.items() if isinstance(checkpoint, kind)), "random"
        ),
        "architecture": architecture(checkpoint),
        "config": shapes,
        "rope": rope,
        **stored(checkpoint),
        "parameters": sum(p.numel() for p in parameters(checkpoint).values()),
        "tensors": list(tensors(checkpoint)),
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "stop_ids": sorted(tokenizer.stop_ids),
            "num_special_ids": len(tokenizer.special_ids),
            "chat_template": tokenizer.chat_template and tokenizer.chat_template.source,
        },
    }


def architecture(checkpoint: Checkpoint) -> str:
    """As the checkpoint calls it."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.fields.get("general.architecture")
    if isinstance(checkpoint, HFCheckpoint):
        return ", ".join(read_json(checkpoint.path / "config.json")["architectures"])
    return "llama"


def stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """The files that hold the weights, their bytes, and the dtype that most of them have."""
    if not isinstance(checkpoint, FileCheckpoint):
        return {"dtype": None, "bytes": 0, "files": []}
    sizes = {file.name: file.stat().st_size for file in checkpoint.weight_files}
    dtype = str(checkpoint.dtype).removeprefix("torch.") if checkpoint.dtype else "quantised blocks"
    if checkpoint.kept:
        dtype += f", kept {describe_formats(checkpoint.kept)}"
    return {"dtype": dtype, "bytes": sum(sizes.values()), "files": list(sizes)}


def parameters(checkpoint: Checkpoint) -> dict[str, torch.nn.Parameter]:
    with torch.device("meta"):
        return dict(Transformer(checkpoint.config).named_parameters())


def tensors(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Each kind of parameter once: {} stands for the layer, `stored_as` for what is stacked."""
    sources = checkpoint.sources() if isinstance(checkpoint, FileCheckpoint) else {}
    kinds: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters(checkpoint).items():
        kind = of_any_layer(name)
        names = [of_any_layer(source.name) for source in sources.get(name, ())]
        kinds.setdefault(
            kind, {"name": kind, "shape": list(parameter.shape), "count": 0, "stored_as": names}
        )
        kinds[kind]["count"] += 1
    yield from kinds.values()


def of_any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)


def as_text(document: Mapping[str, Any]) -> str:
    """The document for people: a line per subject, then the tensors."""
    shapes, tokenizer = document["config"], document["tokenizer"]
    lines = {
        "name": document["name"],
        "format": f"{document['format']}, architecture {document['architecture']}",
        "shapes": words(shapes),
        "rope": f"theta {document['rope']['theta']:g}, {rope_text(document['rope']['scaling'])}",
        "weights": f"{document['parameters']} parameters, {document['dtype'] or 'random'}",
        "files": f"{size_text(document['bytes'] / 1e9)}: {', '.join(document['files']) or 'none'}",
        "tokenizer": f"{tokenizer['vocab_size']} ids, {tokenizer['num_special_ids']} special"
        + padding_text(shapes["vocab_size"] - tokenizer["vocab_size"]),
        "BOS": "none" if tokenizer["bos_id"] is None else tokenizer["bos_id"],
        "stop ids": ", ".join(map(str, tokenizer["stop_ids"])) or "none",
        "chat template": tokenizer["chat_template"] or "none",
    }
    table = [f"{key + ':':15}{printable(str(value), 400)}" for key, value in lines.items()]
    return "\n".join([*table, "tensors:", *map(tensor_line, document["tensors"])])


def words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def padding_text(padding: int) -> str:
    """How the vocabulary of the model differs from the tokenizer's."""
    if padding == 0:
        return ""
    where = "more in the vocabulary" if padding > 0 else "of them beyond the vocabulary"
    return f", {abs(padding)} {where}"


def rope_text(scaling: Mapping[str, Any] | None) -> str:
    if scaling is None:
        return "no scaling"
    shown = {k: f"{len(v)} values" if isinstance(v, tuple) else v for k, v in scaling.items() if v}
    return f"scaling {words(shown)}"


def tensor_line(tensor: Mapping[str, Any]) -> str:
    origin = f" <- {', '.join(tensor['stored_as'])}" if tensor["stored_as"] else ""
    times = f" x {tensor['count']}" if tensor["count"] > 1 else ""
    return f"  {tensor['name']} {tensor['shape']}{times}{origin}"
