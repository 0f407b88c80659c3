"""The Llama forward pass in plain PyTorch: no files, no devices, no flags.

Shapes, in this and every other file: B batch, T new tokens, S cache slots, Hq / Hkv query and
KV heads, G = Hq / Hkv, D head_dim, C hidden_size, V vocab_size.

The model does not know how K and V are stored. It hands the new q, k, v to `cache.attend`, which
stores them and answers with attention over everything stored so far (kv_cache.py); or all parts of
all caches to one call that does so for a whole decode step (kernels/decode_layers.py).
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.decode_layers import Basis, LayerTensors, decode_layers, runs_in_one_call
from kernels.linear import rms_norm
from kernels.product import product
from model_config import ModelConfig
from rope import apply_rope, rope_frequencies


class Cache(Protocol):
    """What a layer needs of its KV cache; see kv_cache.KVCache."""

    @property
    def k_parts(self) -> list[Tensor]: ...

    @property
    def v_parts(self) -> list[Tensor]: ...

    @property
    def k_channels(self) -> Tensor | None: ...

    rotates_v: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, start_pos: Tensor, past_len: int | None = None
    ) -> Tensor: ...


class RMSNorm(nn.Module):
    """Weight and eps of a norm; the product after it applies it, see `Linear`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class Linear(nn.Module):
    """A weight [N, C], and its product with all that surrounds it; see kernels.linear.linear.

    A bias [N] is an operation of its own, so that products without one cost no more for it.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        *,
        swiglu: bool = False,
    ) -> Tensor:
        parts = None if norm is None else (norm.weight, norm.eps)
        y = product(x, self.weight, parts, residual, swiglu=swiglu)
        return y if self.bias is None else y + self.bias


class Attention(nn.Module):
    """[B, T, C] -> [B, T, Hq * D]; `o_proj` is applied by the layer, with what follows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        width, heads_width = config.hidden_size, config.num_heads * config.head_dim
        qkv_width = sum(self.heads) * config.head_dim
        self.qkv_proj = Linear(width, qkv_width, bias=config.qkv_bias)
        self.o_proj = Linear(heads_width, width, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm,
        rope: tuple[Tensor, Tensor],
        start_pos: Tensor,
        cache: Cache,
        past_len: int | None,
    ) -> Tensor:
        qkv = self.qkv_proj(x, norm).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)  # [B, Hq, T, D], [B, Hkv, T, D] twice
        if self.q_norm and self.k_norm:
            q = rms_norm(q, self.q_norm.weight, self.q_norm.eps)
            k = rms_norm(k, self.k_norm.weight, self.k_norm.eps)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return cache.attend(q, k, v, start_pos, past_len).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.down_proj(self.gate_up_proj(x, norm, swiglu=True), residual=x)


class Block(nn.Module):
    """One layer: attention, then MLP, each with its norm before and its residual after, inside.

    Layers are alike, so the body is compiled once for all: a 30-layer model is ready in a fifth of
    the time, with the same speed per token (figures in LOG.md).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        """In the order in which they are used."""
        attention, mlp = self.attention, self.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj

    @torch.compiler.nested_compile_region
    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        start_pos: Tensor,
        cache: Cache,
        past_len: int | None,
    ) -> Tensor:
        y = self.attention(x, self.attention_norm, rope, start_pos, cache, past_len)
        return self.mlp(self.attention.o_proj(y, residual=x), self.mlp_norm)


class Transformer(nn.Module):
    """Llama, and with `ModelConfig`'s options Qwen2 and Qwen3; the head is tied or untied."""

    rope_freqs: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Not nn.Embedding(V, C): its random values, drawn even on the meta device, cost 2 s there.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens: nn.Module = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head: nn.Module = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("rope_freqs", rope_frequencies(config), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        start_pos: Tensor,
        caches: Iterable[Cache],
        past_len: int | None = None,
    ) -> Tensor:
        """Hidden state of T new tokens, which the caches store on the way.

        Args:
            tokens: [B, T] ids.
            start_pos: [B] integers on the device; row b's tokens have positions, and fill slots,
                start_pos[b] + 0 .. T - 1.
            caches: one per layer; mutated.
            past_len: None for decode and verification. For prefill the number of slots already
                filled, the same for all rows and equal to start_pos.

        Returns:
            [B, T, C], before the final norm; see `logits`.
        """
        rope = self._rope(start_pos[:, None] + torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embed_tokens(tokens)
        if past_len is None and runs_in_one_call(x, tensors := self._layer_tensors()):
            k = [part for cache in caches for part in cache.k_parts]
            v = [part for cache in caches for part in cache.v_parts]
            k_channels = [cache.k_channels for cache in caches if cache.k_channels is not None]
            basis = Basis(k_channels, any([cache.rotates_v for cache in caches]))
            return decode_layers(x, rope, start_pos, tensors, k, v, basis)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, start_pos, cache, past_len)
        return x

    def _layer_tensors(self) -> LayerTensors:
        layers: list[Any] = list(self.layers)
        attentions = [layer.attention for layer in layers]
        return LayerTensors(
            weights=[linear.weight for layer in layers for linear in layer.linears],
            norms=[
                norm.weight for layer in layers for norm in (layer.attention_norm, layer.mlp_norm)
            ],
            eps=self.config.norm_eps,
            qkv_biases=[each.qkv_proj.bias for each in attentions if self.config.qkv_bias],
            o_biases=[each.o_proj.bias for each in attentions if self.config.o_bias],
            head_norms=[
                norm.weight for each in attentions for norm in (each.q_norm, each.k_norm) if norm
            ],
            num_heads=self.config.num_heads,
        )

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [B, T, D / 2] of the angles, all fp32, at positions [B, T]."""
        angles = positions[..., None].float() * self.rope_freqs
        scaling = self.config.rope_scaling
        scale = scaling.attention_factor if scaling else 1.0
        return angles.cos() * scale, angles.sin() * scale

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: x [..., C] -> [..., V] fp32. Pass only the rows you need."""
        return self.lm_head(x, self.norm).float()
