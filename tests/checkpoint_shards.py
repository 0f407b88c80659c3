"""Give a checkpoint's files other shapes, as its publishers do; told apart from readers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

ROW_PARALLEL = ("wo", "w2")  # cut along their inputs, dimension 1; all other matrices along 0


def shard_meta(folder: Path, num_shards: int, *, embedding_dim: int = 0) -> Path:
    """Meta's shards instead of consolidated.00.pth.

    Args:
        embedding_dim: 1 as in Llama 2's files, 0 as in Llama 3's.
    """
    file = folder / "consolidated.00.pth"
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    for name, tensor in torch.load(file, weights_only=True).items():
        leaf = name.split(".")[-2]
        dim = embedding_dim if leaf == "tok_embeddings" else int(leaf in ROW_PARALLEL)
        is_norm = tensor.ndim == 1
        parts = [tensor] * num_shards if is_norm else tensor.tensor_split(num_shards, dim)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    for i, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{i:02}.pth")
    return folder


def pickle_hf(folder: Path) -> Path:
    """pytorch_model*.bin files instead of model*.safetensors, and an index of them if there is one.

    As transformers wrote them: the state of a module, hence a table with attributes of its own, and
    a tied head is there twice, in one storage.
    """
    for file in folder.glob("*.safetensors"):
        module = torch.nn.Module()
        for name, tensor in load_file(file).items():
            module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))
        state = module.state_dict()
        for name in list(state):
            state[name.replace("/", ".")] = state.pop(name)
        settings = json.loads((folder / "config.json").read_text())
        if settings["tie_word_embeddings"] and "model.embed_tokens.weight" in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        torch.save(state, folder / bin_name(file.name))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        weight_map = {name: bin_name(shard) for name, shard in weight_map.items()}
        renamed = folder / "pytorch_model.bin.index.json"
        renamed.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        index.unlink()
    return folder


def bin_name(safetensors_name: str) -> str:
    return f"pytorch_{safetensors_name.removesuffix('.safetensors')}.bin"
