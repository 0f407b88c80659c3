"""The bytes of a run: what is stored, what a decode step reads, what memory is expected."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from kv_cache import (
    bytes_per_token,
    channel_scales_bytes,
    past_scratch_bytes,
    payload_bytes_per_token,
    synthetic_scratch_bytes,
)
from model import Linear, Transformer
from model_config import ModelConfig
from request import PLAIN_FORMAT, Request
from summary import size_text
from weight_formats import QuantizedLinear, describe_formats, stored_bytes

CPU = torch.device("cpu")

PROGRAM = "Python and torch"
"""The part of the expected memory that is neither weights, cache nor scratch."""

NO_FORMATS: Mapping[str, str] = MappingProxyType({})


def model_size_bytes(model: Transformer) -> int:
    """All weights as stored, dense or as codes; a tied matrix once."""
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    return held - model.rope_freqs.nbytes


def weight_read_bytes(model: Transformer) -> int:
    """What a decode step reads: everything but an untied input embedding (one row of it)."""
    if model.config.tie_embeddings:
        return model_size_bytes(model)
    looked_up = (*model.embed_tokens.parameters(), *model.embed_tokens.buffers())
    return model_size_bytes(model) - sum(each.nbytes for each in looked_up)


def weight_format(model: Transformer) -> str:
    """How the weights are stored, as a row says it: see `describe_formats`."""
    formats = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            formats[f"{name}.weight".replace(".linear.", ".")] = module.layout_name
        elif isinstance(module, Linear | nn.Embedding):
            dtype = str(module.weight.dtype).removeprefix("torch.")
            formats[f"{name}.weight"] = PLAIN_FORMAT[dtype]
    return describe_formats(formats)


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
    """Declared scratch: of the largest prefill chunk or of a synthetic fill, and the logits.

    The context adds nothing to it: attention takes what is stored block by block.
    """
    rows = request.largest_chunk
    mlp = rows * (2 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = rows * (3 * config.hidden_size + 2 * heads * config.head_dim) * dtype.itemsize
    past_len = request.stored if request.stored > rows else 0
    attention += past_scratch_bytes(config, request.formats, rows, past_len, dtype)
    synthetic = synthetic_scratch_bytes(config, request.synthetic_depth)
    return max(mlp, attention, synthetic) + config.vocab_size * 4


def expected_bytes(
    request: Request,
    config: ModelConfig,
    dtype: torch.dtype,
    formats: Mapping[str, str] = NO_FORMATS,
    device: torch.device = CPU,
) -> dict[str, int]:
    """What a run will hold, by part, before anything is allocated.

    Args:
        formats: layouts of the weights held as codes on `device`, by name.
    """
    weights = sum(stored_bytes(config, formats, dtype, device).values())
    cache = request.cache_len * bytes_per_token(config, request.formats)
    cache += channel_scales_bytes(config, request.formats)
    data = request.cache_len * payload_bytes_per_token(config, request.formats)
    return {
        "weights": weights,
        "KV cache data": data,
        "KV cache scales": cache - data,
        "workspace": workspace_bytes(request, config, dtype),
    }


def describe_bytes(parts: Mapping[str, int]) -> str:
    """The sum of the parts, and each of them: `2.50 GB (weights 2.00 GB, workspace 0.50 GB)`."""
    listed = ", ".join(f"{name} {size_text(size / 1e9)}" for name, size in parts.items() if size)
    return f"{size_text(sum(parts.values()) / 1e9)} ({listed})"
