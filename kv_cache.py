"""The static KV cache: it stores new keys and values and answers attention over all of them.

Attention is a merge of partial results. A decoded query sees its own token in full precision and
every earlier token as stored; a prefill chunk sees itself in full precision and earlier chunks as
stored. No copy of the cache in another precision, no repetition of K and V to all query heads and
no mask over the allocated slots ever exists, and slots past the filled length are never read.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from config import UserError, printable
from kernels import ops
from kernels.flash import flash_attention
from kernels.huge_pages import Empty, empty_in_huge_pages
from kernels.merge import merge_partials
from kernels.slots import read_slots, write_slots_
from kv_formats import (
    K_FORMATS,
    PER_CHANNEL,
    ROTATED,
    V_FORMATS,
    base_name,
    channel_scales,
    format_of,
    rotated,
)
from model_config import ModelConfig

PREFILL_BLOCK = 4096
"""Stored slots that prefill decodes at a time: scratch does not grow, and merges cost little."""

FIRST_KEYS = 512
"""Of a prompt, from which the scales of K's channels are taken."""


class KVCache(nn.Module):
    """Keys and values of one layer: [B, Hkv, S, width] per part, allocated once, KV heads only.

    Parts are allocated in the layout that the attention op reads, see kernels.slots.

    Args:
        k_format: a name in K_FORMATS.
        v_format: a name in V_FORMATS.
        shape: (B, Hkv, S, D).
        device: where the slots live.
        empty: allocates them, called like `torch.empty(sizes, dtype=, device=)`.

    Attributes:
        k_channels: [Hkv, D] fp32, `channel_scales` of the first keys of the prompt that was
            prefilled last from slot 0 on; K is stored divided by them. None: k_format has none.
        rotates_v: whether V is stored `rotated`.

    Raises:
        ValueError: S is not a multiple of what a layout takes, at most SLOT_TILE.
    """

    k_channels: Tensor | None

    def __init__(
        self,
        k_format: str,
        v_format: str,
        shape: tuple[int, int, int, int],
        device: torch.device | str = "cpu",
        empty: Empty = torch.empty,
    ) -> None:
        super().__init__()
        self.k_format, self.v_format = k_format, v_format
        self.shape, self.head_dim = shape, shape[-1]
        self.rotates_v = v_format.endswith(ROTATED)
        for side, name in (("k", k_format), ("v", v_format)):
            for part in format_of(name).parts(self.head_dim):
                layout = ops.layout(side, part, torch.device(device))
                sizes = (*shape[:2], *layout.sizes(shape[2], part.width))
                # Written now: what does not fit must fail here, not in the middle of a run.
                slots = empty(sizes, dtype=part.dtype, device=device).zero_()
                self.register_buffer(f"{side}_{part.name}", slots, persistent=False)
        scales = torch.ones(shape[1], shape[3], device=device)
        self.register_buffer(
            "k_channels", scales if has_channel_scales(k_format) else None, persistent=False
        )

    @property
    def k_parts(self) -> list[Tensor]:
        return self._parts("k", self.k_format)

    @property
    def v_parts(self) -> list[Tensor]:
        return self._parts("v", self.v_format)

    def _parts(self, side: str, name: str) -> list[Tensor]:
        parts = format_of(name).parts(self.head_dim)
        return [getattr(self, f"{side}_{part.name}") for part in parts]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, start_pos: Tensor, past_len: int | None = None
    ) -> Tensor:
        """Store k, v, and attend over them and everything before.

        Args:
            q: [B, Hq, T, D], after rope.
            k, v: [B, Hkv, T, D], k after rope; stored at slots start_pos[b] + 0 .. T - 1.
            start_pos: [B] integers on the device.
            past_len: None: decode or verification, T <= 16. Else prefill after this many slots.

        Returns:
            [B, Hq, T, D] in q's dtype.
        """
        if self.k_channels is not None:
            if past_len == 0:
                self.k_channels.copy_(channel_scales(k[:, :, :FIRST_KEYS]))
            q, k = scaled(q, k, self.k_channels)
        self._store(k, v, start_pos)
        if past_len is None:
            return self._decode(q, k, v, start_pos)
        return self._prefill(q, k, v, past_len)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, start_pos: Tensor) -> Tensor:
        sm_scale = 1 / math.sqrt(self.head_dim)
        names = base_name(self.k_format), base_name(self.v_format)
        stored, lse = ops.stored_attention(
            q, self.k_parts, self.v_parts, start_pos, *names, sm_scale
        )
        stored = rotated(stored) if self.rotates_v else stored
        out, _ = merge_partials((stored, lse), own_token(q, k, v, sm_scale))
        return out.to(q.dtype)

    def _store(self, k: Tensor, v: Tensor, start_pos: Tensor) -> None:
        slots = start_pos[:, None] + torch.arange(k.shape[2], device=k.device)  # [B, T]
        for part, new in self._encoded(k, v):
            write_slots_(part, slots, new)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, past_len: int) -> Tensor:
        result = flash_attention(q, k, v, causal=True)
        for lo in range(0, past_len, PREFILL_BLOCK):
            hi = min(lo + PREFILL_BLOCK, past_len)
            past, lse = flash_attention(q, *self._decoded(lo, hi, q.dtype), causal=False)
            past = rotated(past) if self.rotates_v else past
            result = merge_partials(result, (past, lse))
        return result[0].to(q.dtype)

    def fill_synthetic_(self, depth: int, generator: torch.Generator) -> None:
        """Store normal vectors at slots 0 .. depth - 1, encoded block by block."""
        batch_size, num_kv_heads = self.shape[:2]
        for lo in range(0, depth, PREFILL_BLOCK):
            hi = min(lo + PREFILL_BLOCK, depth)
            shape = (batch_size, num_kv_heads, hi - lo, self.head_dim)
            k, v = (
                torch.randn(shape, generator=generator, device=generator.device) for _ in range(2)
            )
            self._store(k, v, torch.full((batch_size,), lo, device=k.device))

    def _encoded(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        v = rotated(v) if self.rotates_v else v
        yield from zip(self.k_parts, format_of(self.k_format).encode(k), strict=True)
        yield from zip(self.v_parts, format_of(self.v_format).encode(v), strict=True)

    def _decoded(self, lo: int, hi: int, dtype: torch.dtype) -> Iterator[Tensor]:
        for parts, name in ((self.k_parts, self.k_format), (self.v_parts, self.v_format)):
            yield format_of(name).decode(tuple(read_slots(part, lo, hi) for part in parts), dtype)


def scaled(q: Tensor, k: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Queries times, and keys divided by, scales [Hkv, D] of channels: q . k stays as it is."""
    channels = channels.to(k.dtype)[:, None]  # powers of two, in every dtype
    q_groups = q.unflatten(1, (k.shape[1], -1)) * channels[:, None]  # [B, Hkv, G, T, D]
    return q_groups.flatten(1, 2), k / channels


def own_token(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every new token to itself alone, in full precision: out = v, lse = q . k."""
    q_groups = q.unflatten(1, (k.shape[1], -1)).float()  # [B, Hkv, G, T, D]
    lse = (q_groups * k.unsqueeze(2).float()).sum(-1) * sm_scale
    out = v.unsqueeze(2).expand(q_groups.shape)
    return out.flatten(1, 2), lse.flatten(1, 2)


def parse_formats(spec: str) -> tuple[str, str]:
    """K and V format names of a `--kv_cache_quantization` value: one name, or two as K,V.

    Channels have scales in K alone: `int8-channel` is `int8-channel,int8`; V alone is rotated.
    """
    k_format, comma, v_format = spec.partition(",")
    v_format = v_format if comma else base_name(k_format)
    if k_format not in K_FORMATS or v_format not in V_FORMATS:
        of_v = [name for name in V_FORMATS if name not in K_FORMATS]
        raise UserError(
            f"--kv_cache_quantization {printable(spec)}: give one of {', '.join(K_FORMATS)}, or two"
            f" as K,V; names with {PER_CHANNEL} are of K alone, and {', '.join(of_v)} of V"
        )
    return k_format, v_format


def has_channel_scales(k_format: str) -> bool:
    """Whether K's channels are divided by scales before they are stored."""
    return k_format.endswith(PER_CHANNEL)


def make_caches(
    config: ModelConfig,
    formats: tuple[str, str],
    batch_size: int,
    cache_len: int,
    device: torch.device | str = "cpu",
) -> nn.ModuleList:
    """One cache per layer, each directly in its final format."""
    shape = (batch_size, config.num_kv_heads, cache_len, config.head_dim)
    num_parts = sum(len(format_of(name).parts(config.head_dim)) for name in formats)
    num_bytes = batch_size * cache_len * bytes_per_token(config, formats)
    empty = empty_in_huge_pages(num_bytes, config.num_layers * num_parts, device)
    return nn.ModuleList(KVCache(*formats, shape, device, empty) for _ in range(config.num_layers))


def bytes_per_token(config: ModelConfig, formats: tuple[str, str]) -> int:
    """Bytes that one cached token takes in all layers, all parts of K and V."""
    per_head = sum(format_of(name).bytes_per_vector(config.head_dim) for name in formats)
    return config.num_layers * config.num_kv_heads * per_head


def channel_scales_bytes(config: ModelConfig, formats: tuple[str, str]) -> int:
    """Bytes of the scales of K's channels, which are as many for any number of tokens."""
    per_head = 4 * config.head_dim * has_channel_scales(formats[0])
    return config.num_layers * config.num_kv_heads * per_head


def payload_bytes_per_token(config: ModelConfig, formats: tuple[str, str]) -> int:
    """Of `bytes_per_token` the data; the rest is scales and zeros."""
    payloads = (format_of(name).parts(config.head_dim)[0] for name in formats)
    per_head = sum(payload.width * payload.dtype.itemsize for payload in payloads)
    return config.num_layers * config.num_kv_heads * per_head


def past_scratch_bytes(
    config: ModelConfig, formats: tuple[str, str], rows: int, past_len: int, dtype: torch.dtype
) -> int:
    """Scratch of `KVCache` for a chunk of `rows` tokens behind `past_len` stored slots.

    Results [rows, Hq, D]: one in dtype, and four in fp32 while two are merged. One block of slots:
    K and V in dtype unless stored so, and fp32 codes and product while one of them is decoded.
    One side is decoded after the other: that leaves room for its codes out of their tiles.
    """
    if not past_len:
        return 0
    results = rows * config.num_heads * config.head_dim * (dtype.itemsize + 4 * 4)
    decoded = [n for n in formats if format_of(n).parts(config.head_dim)[0].dtype != dtype]
    per_value = len(decoded) * dtype.itemsize + (2 * 4 if decoded else 0)
    slots = min(PREFILL_BLOCK, past_len) * config.num_kv_heads
    return results + slots * config.head_dim * per_value


def fill_synthetic_(caches: nn.ModuleList, depth: int) -> None:
    """Fill slots 0 .. depth - 1 of every cache with random K and V, the same in every run."""
    generator = torch.Generator(next(caches.buffers()).device).manual_seed(0)
    for cache in caches:
        cache.fill_synthetic_(depth, generator)  # type: ignore[operator]


def synthetic_scratch_bytes(config: ModelConfig, depth: int) -> int:
    """Scratch of `fill_synthetic_`: K, V and three steps of encoding one block of slots, fp32."""
    return 5 * 4 * min(PREFILL_BLOCK, depth) * config.num_kv_heads * config.head_dim


def describe_caches(caches: nn.ModuleList) -> str:
    """One line about what is really there, read from the tensors."""
    cache: KVCache = caches[0]  # type: ignore[assignment]
    payloads = cache.k_parts[0], cache.v_parts[0]
    data = len(caches) * sum(payload.nbytes for payload in payloads)
    elements = len(caches) * 2 * math.prod(cache.shape)
    scales = sum(buffer.nbytes for buffer in caches.buffers()) - data
    return (
        f"KV cache: {len(caches)} layers of K {cache.k_format}, V {cache.v_format}"
        f" {list(cache.shape)}, {data / 1e6:.1f} MB data + {scales / 1e6:.1f} MB scales"
        f" (bf16: {2 * elements / 1e6:.1f})"
    )
