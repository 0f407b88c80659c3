"""A bias that gives some channels of K far larger values than the others, as Qwen2's does."""

import dataclasses

import pytest
import torch
from conftest import TINY, seeded_model
from plain_llama import greedy
from test_engine import PROMPT, make_engine, teacher_forced_logits


def with_outlying_keys(strength: float) -> torch.nn.Module:
    """The tiny model with a bias of `strength` deviations in the slowest pair of each KV head."""
    model = seeded_model(dataclasses.replace(TINY, qkv_bias=True))
    heads, kv_heads, size = TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
    for layer in model.layers:
        bias = layer.attention.qkv_proj.bias.data
        keys = bias[heads * size : (heads + kv_heads) * size].view(kv_heads, size)
        keys[:, size // 2 - 1], keys[:, size - 1] = -strength, strength
    return model


@pytest.mark.parametrize(("strength", "limit"), [(0, 1e-5), (10, 1e-4), (30, 1e-3)])
def test_int8_stays_near_bf16_where_a_bias_makes_channels_of_k_outlie(
    strength: float, limit: float, record_property
) -> None:
    model = with_outlying_keys(strength)
    ids = PROMPT + greedy(model, PROMPT, 64)
    log_p, log_bf16, log_int8 = (
        teacher_forced_logits(make_engine(model, kv_format), ids, len(PROMPT)).log_softmax(-1)
        for kv_format in ("fp32", "bf16", "int8")
    )
    bf16, int8 = ((log_p.exp() * (log_p - log_q)).sum(-1)[1:] for log_q in (log_bf16, log_int8))
    record_property("mean KL of bf16, of int8", (bf16.mean().item(), int8.mean().item()))
    assert 0 < bf16.mean() < int8.mean() < limit
