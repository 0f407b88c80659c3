"""The Llama forward pass in plain PyTorch: no files, no devices, no flags.

Shapes, in this and every other file: B batch, T new tokens, S cache slots, Hq / Hkv query and
KV heads, G = Hq / Hkv, D head_dim, C hidden_size, V vocab_size.

The model does not know how K and V are stored. It hands the new q, k, v to `cache.attend`, which
stores them and answers with attention over everything stored so far (kv_cache.py).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.block_tail import block_tail
from kernels.linear import linear, rms_norm


class Cache(Protocol):
    """What a layer needs of its KV cache; see kv_cache.KVCache.attend."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, start_pos: Tensor, past_len: int | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rope frequencies of a checkpoint differ from plain `theta ** (-2i / D)`.

    kind: "linear" divides all by `factor`; "llama3" and "yarn" divide the low ones and blend the
    middle, by turns in the original context and by channel; "factors" divides each by its entry of
    `freq_factors` (GGUF `rope_freqs.weight`).
    attention_factor: cos and sin are multiplied by it, whatever the kind.
    beta_fast, beta_slow: turns in the original context between which yarn blends.
    truncate: whether yarn's blend begins and ends at whole channels.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    freq_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def check(self) -> None:
        """Raises ValueError where the numbers describe no scaling."""
        if self.factor < 1:
            raise ValueError(f"rope factor {self.factor}: numbers from 1 on are supported")
        ranges = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_slow", "beta_fast"),
        }
        if self.kind in ranges:
            low, high = (getattr(self, name) for name in ranges[self.kind])
            if not low < high:
                low_name, high_name = ranges[self.kind]
                raise ValueError(f"{high_name} {high} is not above {low_name} {low}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one checkpoint, whatever format they were read from.

    Options beyond Llama: `qkv_bias` and `o_bias` add to the projections of attention; `qk_norm` is
    an RMSNorm over each head of q and k before rope.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads over {self.num_kv_heads} KV heads")
        if self.head_dim % 2 or not 4 <= self.head_dim <= 1024:
            raise ValueError(f"head_dim {self.head_dim}: even numbers from 4 to 1024 are supported")
        if self.rope_scaling:
            self.rope_scaling.check()
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta}: numbers above 1 are supported")


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
        y = linear(x, self.weight, parts, residual, swiglu=swiglu)
        return y if self.bias is None else y + self.bias


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair: [D / 2], fp64; fp32 is off by 0.005 at 100,000.

    Source of "llama3": Llama 3.1, https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").double() / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.freq_factors, dtype=torch.float64, device="cpu")
    if scaling.kind == "llama3":
        turns = scaling.original_max_seq_len * freqs / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unscaled, 0: divided by factor
    elif scaling.kind == "yarn":
        keep = yarn_kept_share(config, scaling)
    else:
        raise ValueError(f"rope scaling {scaling.kind!r}")
    return freqs * (keep + (1 - keep) / scaling.factor)


def yarn_kept_share(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """How much of each frequency yarn keeps, 1 .. 0; the rest is divided by `factor`: [D / 2].

    Linear in the channel between those that turn `beta_fast` and `beta_slow` times in the original
    context. Pair i turns n times where theta ** (-2i / D) * length = 2 pi n, hence `pair`.

    Source: YaRN, https://arxiv.org/abs/2309.00071, section 3.2; whole channels as its code has it.
    """

    def pair(num_turns: float) -> float:
        log = math.log(scaling.original_max_seq_len) - math.log(2 * math.pi) - math.log(num_turns)
        return config.head_dim / 2 * log / math.log(config.rope_theta)

    first = max(pair(scaling.beta_fast), 0)
    last = min(pair(scaling.beta_slow), config.head_dim - 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    pairs = torch.arange(config.head_dim // 2, device="cpu").double()
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, D] by cos, sin [B, T, D / 2]; channel i is paired with i + D / 2.

    This is Hugging Face's layout. Meta and GGUF files pair neighbouring channels instead; the
    checkpoint reader permutes their q and k rows, so only one layout exists from here on.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


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
        o_proj, mlp = self.attention.o_proj, self.mlp
        if o_proj.bias is not None:
            return mlp(o_proj(y, residual=x), self.mlp_norm)
        norm = self.mlp_norm.weight, self.mlp_norm.eps
        return block_tail(y, x, o_proj.weight, norm, mlp.gate_up_proj.weight, mlp.down_proj.weight)


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
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, start_pos, cache, past_len)
        return x

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of the angles at positions [B, T]: [B, T, D / 2] fp32, rounded once."""
        dtype = torch.promote_types(self.rope_freqs.dtype, torch.float32)
        angles = positions[..., None].to(dtype) * self.rope_freqs
        scaling = self.config.rope_scaling
        scale = scaling.attention_factor if scaling else 1.0
        return (angles.cos() * scale).float(), (angles.sin() * scale).float()

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: x [..., C] -> [..., V] fp32. Pass only the rows you need."""
        return self.lm_head(x, self.norm).float()
