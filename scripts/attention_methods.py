"""The ways to attend over stored tokens that bench_attention.py compares, and how they are timed.

A method gets as many layers of its own, each with its own cache, as it takes to push what it reads
out of the processor's caches from one pass to the next: so does a model between two tokens.
"""

import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import machine
from kernels import ops
from kernels.huge_pages import empty_in_huge_pages
from kernels.slots import SLOT_TILE
from kv_cache import KVCache
from kv_formats import FORMATS

MAX_LAYERS = 32
"""As many caches as a large model has."""

PATTERN = 1 << 20
"""Random elements that a buffer repeats: data does not change the time, making it takes long."""

MAX_PARTS = 6
"""Of a cache: codes, scales and zeros of K and V."""

Call = Callable[[], object]


class Heads(NamedTuple):
    """What an attention layer looks like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Case:
    """What all methods of one comparison share.

    Attributes:
        filled: slots that the first query sees; each further query sees one more.
        queries: T, new tokens per sequence.
    """

    heads: Heads
    filled: int
    batch_size: int
    queries: int
    device: torch.device

    @property
    def slots(self) -> int:
        """That the last query sees: what is read."""
        return self.filled + self.queries - 1

    def stored_bytes(self, formats: Sequence[str], slots: int | None = None) -> int:
        """Of codes and scales of K and V in `slots` slots of one layer; None: of those read."""
        per_head = sum(FORMATS[name].bytes_per_vector(self.heads.head_dim) for name in formats)
        return self.batch_size * self.heads.num_kv_heads * per_head * (slots or self.slots)

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        return self.batch_size, self.heads.num_kv_heads, slots, self.heads.head_dim

    def random_q(self) -> Tensor:
        """[B, Hq, T, D] in bf16."""
        shape = self.batch_size, self.heads.num_heads, self.queries, self.heads.head_dim
        return torch.randn(shape, device=self.device).to(torch.bfloat16)


@dataclass(frozen=True)
class Method:
    """One way to compute the attention of one layer.

    Attributes:
        make_layer: allocates and fills one layer, and gives the call that is timed.
        read_bytes: of the stored K and V, per call.
        held_bytes: that one layer keeps allocated.
        scratch_bytes: that a call writes and reads again.
    """

    name: str
    make_layer: Callable[[], Call]
    read_bytes: int
    held_bytes: int
    scratch_bytes: int = 0

    @property
    def touched_bytes(self) -> int:
        return self.read_bytes + self.scratch_bytes


def stored(case: Case, formats: tuple[str, str]) -> Method:
    """Ours: the op over a cache as it is stored."""
    cache_len = -(-case.slots // SLOT_TILE) * SLOT_TILE
    held_bytes = case.stored_bytes(formats, cache_len)

    def make_layer() -> Call:
        empty = empty_in_huge_pages(held_bytes, MAX_PARTS, case.device)
        cache = KVCache(*formats, case.shape(cache_len), case.device, empty)
        for name, part in cache.named_buffers():
            fill_(part, name.removeprefix("k_").removeprefix("v_"))
        start_pos = torch.full((case.batch_size,), case.filled, device=case.device)
        inputs = case.random_q(), cache.k_parts, cache.v_parts, start_pos
        sm_scale = 1 / math.sqrt(case.heads.head_dim)
        return functools.partial(ops.stored_attention, *inputs, *formats, sm_scale)

    return Method(format_name(formats), make_layer, case.stored_bytes(formats), held_bytes)


def sdpa(case: Case) -> Method:
    """The library's attention over a bf16 cache that is exactly full, all queries seeing all."""

    def make_layer() -> Call:
        (k,), (v,) = random_parts(case, "bf16"), random_parts(case, "bf16")
        attention = F.scaled_dot_product_attention
        return functools.partial(attention, case.random_q(), k, v, enable_gqa=True)

    read_bytes = case.stored_bytes(("bf16", "bf16"))
    return Method("sdpa", make_layer, read_bytes, held_bytes=read_bytes)


def origin(case: Case) -> Method:
    """The way of torchao's int8 cache: see `dequantised_attention`."""

    def make_layer() -> Call:
        k, v = random_parts(case, "int8"), random_parts(case, "int8")
        return functools.partial(dequantised_attention, case.random_q(), k, v)

    read_bytes = case.stored_bytes(("int8", "int8"))
    copies = 1 + case.heads.num_heads // case.heads.num_kv_heads  # dequantised, then repeated
    scratch_bytes = copies * case.stored_bytes(("bf16", "bf16"))
    return Method("origin", make_layer, read_bytes, read_bytes, scratch_bytes)


def dequantised_attention(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
    """K and V dequantised whole, repeated for all query heads, then the library's attention.

    Kinder than the origin: it has no mask, and the cache holds no slot more than is filled.

    Source: https://github.com/pytorch/ao/pull/532.
    """
    group_size = q.shape[1] // k[0].shape[1]
    k_all, v_all = ((codes * scale).repeat_interleave(group_size, dim=1) for codes, scale in (k, v))
    return F.scaled_dot_product_attention(q, k_all, v_all)


def format_name(formats: tuple[str, str]) -> str:
    """Of K and V, as --formats takes it."""
    return "+".join(dict.fromkeys(formats))


def reading(device: torch.device) -> Method:
    """A sum of more than the caches hold: how fast this device reads, at the time of the others.

    A virtual machine's memory is not as fast in one minute as in the next.
    """
    num_bytes = evicting_bytes(device)

    def make_layer() -> Call:
        empty = empty_in_huge_pages(num_bytes, 1, device)
        buffer = empty((num_bytes // 4,), dtype=torch.float32, device=device).fill_(1)
        return functools.partial(torch.sum, buffer)

    return Method("read", make_layer, num_bytes, held_bytes=num_bytes)


def random_parts(case: Case, name: str) -> list[Tensor]:
    """K or V of one layer in a format of FORMATS, each part [B, Hkv, slots, width]."""
    empty = empty_in_huge_pages(case.stored_bytes((name,)), MAX_PARTS, case.device)
    parts = []
    for part in FORMATS[name].parts(case.heads.head_dim):
        shape = *case.shape(case.slots)[:-1], part.width
        parts.append(empty(shape, dtype=part.dtype, device=case.device))
        fill_(parts[-1], part.name)
    return parts


RANGES = {"codes": (-127.0, 127.0), "scale": (0.01, 0.03), "zero": (-0.2, -0.1)}


def fill_(part: Tensor, name: str) -> None:
    """Random codes, scales, zeros or values of the size that real ones have."""
    pattern = part.new_empty(min(PATTERN, part.numel()))
    if not part.dtype.is_floating_point:
        pattern.random_(torch.iinfo(part.dtype).min + 1, torch.iinfo(part.dtype).max + 1)
    elif name in RANGES:
        pattern = pattern.float().uniform_(*RANGES[name]).to(part.dtype)
    else:
        pattern.normal_()
    for chunk in part.view(-1).split(pattern.numel()):
        chunk.copy_(pattern[: chunk.numel()])


def evicting_bytes(device: torch.device) -> int:
    """Reading this much leaves little of what was read before in the device's caches."""
    if device.type == "cuda":
        last_level = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        last_level = machine.last_level_cache_bytes()
    return max(256 * machine.MIB, 2 * last_level)


def num_layers(method: Method, device: torch.device, budget_bytes: int) -> int:
    """Layers that evict each other from the caches, as far as the budget goes; at least one."""
    wanted = math.ceil(evicting_bytes(device) / method.touched_bytes)
    return max(1, min(wanted, MAX_LAYERS, budget_bytes // method.held_bytes))


class Pass:
    """One method's calls on all of its layers; on CUDA one graph, as a decode step is."""

    def __init__(self, method: Method, layers: int, device: torch.device) -> None:
        self.calls = [method.make_layer() for _ in range(layers)]
        self.run: Call = self._capture() if device.type == "cuda" else self._call_all

    def _call_all(self) -> None:
        for call in self.calls:
            call()

    def _capture(self) -> Call:
        self._call_all()  # what is compiled on first use cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call_all()
        return graph.replay


def interleaved_s(passes: Sequence[Pass], repeats: int, device: torch.device) -> list[list[float]]:
    """The times of each pass, run in turns after one round of warm-up.

    Nothing waits for a GPU between passes: it always has the next one queued.
    """
    turns = itertools.chain.from_iterable(itertools.repeat(passes, repeats))
    gc.collect()
    gc.disable()
    try:
        for each in passes:
            each.run()
        stamps = [_stamp(device)]
        for each in turns:
            each.run()
            stamps.append(_stamp(device))
    finally:
        gc.enable()
    times_s = _differences_s(stamps, device)
    return [times_s[index :: len(passes)] for index in range(len(passes))]


def _stamp(device: torch.device) -> Any:
    """The moment at which all earlier work is done: a CUDA event, else the host's clock."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    machine.synchronize(device)
    return time.perf_counter()


def _differences_s(stamps: Sequence[Any], device: torch.device) -> list[float]:
    machine.synchronize(device)
    pairs = itertools.pairwise(stamps)
    if device.type == "cuda":
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]
    return [end - start for start, end in pairs]
