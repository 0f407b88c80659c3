"""Cut a checkpoint that is one file into several, as its publishers do; told apart from readers."""

from pathlib import Path

import torch

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
