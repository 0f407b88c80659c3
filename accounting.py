"""The bytes of a run: what is stored, what a decode step reads, what memory is expected."""

import torch
from torch import nn

from kv_cache import bytes_per_token
from model import ModelConfig, Transformer
from request import Request


def model_size_bytes(model: Transformer) -> int:
    """All parameters as stored, a tied matrix once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def weight_read_bytes(model: Transformer) -> int:
    """What a decode step reads: everything but an untied input embedding (one row of it)."""
    tied = model.lm_head.weight is model.embed_tokens.weight
    return model_size_bytes(model) - (0 if tied else model.embed_tokens.weight.nbytes)


def kv_cache_bytes(caches: nn.Module) -> int:
    """All cache tensors, codes and scales."""
    return sum(buffer.nbytes for buffer in caches.buffers())


def step_bytes(model: Transformer, request: Request, new_tokens: int) -> int:
    """Useful bytes of the mean decode step: weights, and K and V of the tokens then stored.

    Step i of N - 1 reads depth + prompt + i - 1 tokens. Writes and scratch do not count.
    """
    mean_filled = request.stored + (new_tokens - 2) / 2
    per_token = bytes_per_token(model.config, request.formats)
    return weight_read_bytes(model) + round(mean_filled * per_token)


def workspace_bytes(request: Request, config: ModelConfig, dtype: torch.dtype) -> int:
    """Declared scratch: the activations of the largest prefill chunk, and the logits."""
    rows = min(request.prefill_chunk, max(len(request.depth_ids), len(request.prompt_ids)))
    mlp = 2 * config.hidden_size + 3 * config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = 3 * config.hidden_size + 2 * heads * config.head_dim
    return rows * max(mlp, attention) * dtype.itemsize + config.vocab_size * 4


def expected_bytes(request: Request, config: ModelConfig, dtype: torch.dtype) -> dict[str, int]:
    """What a run will hold, before anything is allocated: weights, KV cache, workspace."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Transformer(config).parameters()) * dtype.itemsize
    return {
        "weights": weights,
        "KV cache": request.cache_len * bytes_per_token(config, request.formats),
        "workspace": workspace_bytes(request, config, dtype),
    }
