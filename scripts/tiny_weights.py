"""A seeded tiny model in memory, and the names of its tensors in every checkpoint format.

Names and row orders are stated here a second time, apart from the readers, so that tests can hold
one against the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model_config import ModelConfig

# Chosen to catch mistakes: head_dim is not hidden_size / num_heads, and 3 heads share a KV head.
TINY = ModelConfig(
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=80,
    intermediate_size=112,
    vocab_size=320,
    max_seq_len=2048,
)


class Names(NamedTuple):
    """One tensor in each format; those with the same name of ours are stacked in table order."""

    hf: str
    ours: str
    meta: str
    gguf: str


OUTER_NAMES = (
    Names("model.embed_tokens", "embed_tokens", "tok_embeddings", "token_embd"),
    Names("model.norm", "norm", "norm", "output_norm"),
    Names("lm_head", "lm_head", "output", "output"),
)
LAYER_PREFIX = Names("model.layers.{}.", "layers.{}.", "layers.{}.", "blk.{}.")
LAYER_NAMES = (
    Names("input_layernorm", "attention_norm", "attention_norm", "attn_norm"),
    Names("self_attn.q_proj", "attention.qkv_proj", "attention.wq", "attn_q"),
    Names("self_attn.k_proj", "attention.qkv_proj", "attention.wk", "attn_k"),
    Names("self_attn.v_proj", "attention.qkv_proj", "attention.wv", "attn_v"),
    Names("self_attn.o_proj", "attention.o_proj", "attention.wo", "attn_output"),
    Names("post_attention_layernorm", "mlp_norm", "ffn_norm", "ffn_norm"),
    Names("mlp.gate_proj", "mlp.gate_up_proj", "feed_forward.w1", "ffn_gate"),
    Names("mlp.up_proj", "mlp.gate_up_proj", "feed_forward.w3", "ffn_up"),
    Names("mlp.down_proj", "mlp.down_proj", "feed_forward.w2", "ffn_down"),
)


QK_NORM_NAMES = tuple(
    Names(f"self_attn.{side}_norm", f"attention.{side}_norm", "", f"attn_{side}_norm")
    for side in "qk"
)


def tensor_names(config: ModelConfig) -> list[Names]:
    """The names of all tensors of a model; without the head where it is tied."""
    outer = OUTER_NAMES[:2] if config.tie_embeddings else OUTER_NAMES
    names = list(outer)
    for layer in range(config.num_layers):
        prefixes = [prefix.format(layer) for prefix in LAYER_PREFIX]
        for leaves in LAYER_NAMES + QK_NORM_NAMES * config.qk_norm:
            names.append(Names(*map(str.__add__, prefixes, leaves)))
    return [
        Names(*(f"{name}.{leaf}" for name in row))
        for row in names
        for leaf in ("weight", *(["bias"] if has_bias(config, row.hf) else []))
    ]


def has_bias(config: ModelConfig, hf_name: str) -> bool:
    last = hf_name.rpartition(".")[2]
    sides = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias}
    return (sides | {"o_proj": config.o_bias}).get(last, False)


def tensor_shape(config: ModelConfig, hf_name: str) -> tuple[int, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (q_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, q_rows),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    shape = shapes.get(hf_name.split(".")[-2], (hidden,))
    return shape[:1] if hf_name.endswith(".bias") else shape


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights in bf16 under Hugging Face's names, scaled so that logits have a deviation near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for names in tensor_names(config):
        shape = tensor_shape(config, names.hf)
        weight = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weight *= shape[1] ** -0.5
        elif names.hf.endswith("norm.weight"):
            weight = 1 + weight / 10
        weights[names.hf] = weight.bfloat16()
    return weights


def interleaved_rows(weight: Tensor, config: ModelConfig, hf_name: str) -> Tensor:
    """Rows of q and k in Meta and GGUF: i and i + D / 2 of a head become 2i and 2i + 1."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(hf_name.split(".")[-2])
    if heads is None:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
