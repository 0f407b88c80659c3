"""stored_attention in Triton: split-KV decode attention that reads the cache as it is stored.

Two kernels. `_split_kernel` gives each program one KV head of one sequence, a share of its filled
slots and the query rows of that head, T tokens times G heads of the group, so that the cache is
read once for all of them. `_merge_kernel` joins the shares by log-sum-exp. Both grids follow from
shapes alone and lengths are read on the device: one captured CUDA graph serves every length.

With TRITON_INTERPRET=1 set before Triton is imported, the same code runs on CPU tensors.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
"""

# mypy: disable-error-code=no-untyped-def
# The arguments of a kernel are Triton's own values, which have no useful static types.

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.slots import SLOT_TILE, SLOTS_INNERMOST, layout_of
from kernels.triton_tile import attend_tile, prepare_queries, raise_top
from kv_formats import FORMATS

INTERPRETER_PROCESSORS = 4
"""SMs to assume without a GPU: enough for several splits."""

MOST_TILE_BYTES = 64 * 1024
"""Of tiles that are copied ahead of their use: two fit into the shared memory of an A100."""

MERGE_STEP = tl.constexpr(32)
"""Splits that the merge reads at a time."""

LN_2 = tl.constexpr(math.log(2))

DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    # The interpreter's bf16 dot is wrong.
    torch.bfloat16: tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
    torch.int8: tl.int8,
}
"""Triton's names for the types of the products."""


@dataclass(frozen=True)
class Variant:
    """What the kernels are specialised on.

    k_dot, v_dot: types of the products q . k and p . v; their sums are fp32, or int32 in a tile.
    query_levels: largest code of a query against int8 keys.
    block_dim: head_dim padded, in registers only, to a power of two.
    block_rows, tile: query rows per program and slots per step, powers of two.
    num_warps, num_stages: of the split kernel; it holds num_stages - 1 tiles in shared memory.
    """

    k_format: str
    v_format: str
    k_has_scale: bool
    v_has_scale: bool
    k_dot: tl.dtype
    v_dot: tl.dtype
    query_levels: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    block_dim: int
    block_rows: int
    tile: int
    num_warps: int
    num_stages: int


def stored_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    start_pos: Tensor,
    k_format: str,
    v_format: str,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """See kernels.ops.stored_attention.

    Never waits for the device, and its workspace depends on shapes only: it can be captured.

    Raises:
        ValueError: a part of the cache is not contiguous, S is not a multiple of SLOT_TILE, or
            int8 values are not tiled.
    """
    if v_format == "int8" and layout_of(v[0]) is not SLOTS_INNERMOST:
        raise ValueError(f"int8 values {list(v[0].shape)} are not tiled")
    if not all(part.is_contiguous() for part in (*k, *v)):
        raise ValueError("the cache is not contiguous")
    num_queries, num_slots = q.shape[2], k[0].shape[2]
    if num_slots % SLOT_TILE:
        raise ValueError(f"{num_slots} slots are not a multiple of {SLOT_TILE}")
    q, start_pos = q.contiguous(), start_pos.contiguous()
    variant = choose_variant(q, k[0], v[0], k_format, v_format)
    num_pairs = q.shape[0] * variant.num_kv_heads
    num_rows = variant.group_size * num_queries
    row_blocks = triton.cdiv(num_rows, variant.block_rows)
    num_tiles = triton.cdiv(num_slots, variant.tile)
    num_splits = _num_splits(q.device, num_pairs * row_blocks, num_tiles)
    split_shape = (num_pairs, num_splits, num_rows)
    split_out = q.new_empty(*split_shape, variant.head_dim, dtype=torch.float32)
    split_lse = q.new_empty(split_shape, dtype=torch.float32)
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    qk_scale = sm_scale * math.log2(math.e)
    # Blocks of rows first: those that read the same slots run at the same time.
    grid = (row_blocks, num_pairs, num_splits)
    with torch.cuda.device_of(q):
        _split_kernel[grid](
            *(q, _as_bytes(k), _as_bytes(v), start_pos, split_out, split_lse),
            *(qk_scale, num_slots, num_queries, variant),
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )
        _merge_kernel[(num_pairs, num_rows)](
            split_out, split_lse, out, lse, num_splits, num_queries, variant
        )
    return out, lse


def choose_variant(
    q: Tensor, k_payload: Tensor, v_payload: Tensor, k_format: str, v_format: str
) -> Variant:
    """The specialisation for q [B, Hq, T, D] over payloads [B, Hkv, S, D] of these formats."""
    k_dot, v_dot = _dot_dtypes(q.dtype, k_payload.dtype, v_payload.dtype)
    num_kv_heads, head_dim = k_payload.shape[1], q.shape[3]
    group_size = q.shape[1] // num_kv_heads
    block_dim = max(32, triton.next_power_of_2(head_dim))
    num_rows = group_size * q.shape[2]
    block_rows, tile, num_warps = _program_shape(num_rows, block_dim, k_dot, v_dot)
    tile_bytes = tile * block_dim * (k_payload.itemsize + v_payload.itemsize)
    return Variant(
        k_format=k_format,
        v_format=v_format,
        k_has_scale=len(FORMATS[k_format].parts(head_dim)) > 1,
        v_has_scale=len(FORMATS[v_format].parts(head_dim)) > 1,
        k_dot=DOT_TYPES[k_dot],
        v_dot=DOT_TYPES[v_dot],
        query_levels=min(127 * 256, 2**31 // (128 * head_dim)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        block_dim=block_dim,
        block_rows=block_rows,
        tile=tile,
        num_warps=num_warps,
        num_stages=3 if tile_bytes <= MOST_TILE_BYTES else 1,
    )


def _dot_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Types of the products: int8 against its codes; else q and k stay exact, p is rounded to v's.

    Other codes are exact in q's type. With fp32 queries p is not rounded either.
    """
    k, v = (q if dtype in (torch.uint8, torch.float8_e4m3fn) else dtype for dtype in (k, v))
    k_dot = k if k == torch.int8 else torch.promote_types(q, k)
    v_dot = torch.float32 if q == torch.float32 and v != torch.int8 else v
    return k_dot, v_dot


def _as_bytes(parts: list[Tensor]) -> tuple[Tensor, ...]:
    """The parts, those of fp8 as their bits: not every GPU knows the type."""
    return tuple(p.view(torch.uint8) if p.dtype == torch.float8_e4m3fn else p for p in parts)


def _program_shape(
    num_rows: int, block_dim: int, k_dot: torch.dtype, v_dot: torch.dtype
) -> tuple[int, int, int]:
    """Query rows, slots per step and warps of a program, by counting instructions: see LOG.md."""
    if torch.float32 in (k_dot, v_dot):
        # Outside the tensor cores, with both operands whole in registers.
        most_rows, most_slots, tile_elements, num_warps = 16, 64, 2048, 8
    elif k_dot == v_dot == torch.int8:
        most_rows, most_slots, tile_elements, num_warps = 16, SLOT_TILE, 16384, 4
    else:
        most_rows, most_slots, tile_elements, num_warps = 32, 64, 8192, 4
    # The rows are the short side of the products with int8 values: 8 at least, else 16.
    fewest_rows, fewest_slots = (8, 32) if v_dot == torch.int8 else (16, 16)
    most_rows = max(fewest_rows, min(most_rows, 4096 // block_dim))
    block_rows = max(fewest_rows, min(triton.next_power_of_2(num_rows), most_rows))
    tile = max(fewest_slots, min(tile_elements // block_dim, most_slots))
    return block_rows, tile, num_warps


def _num_splits(device: torch.device, num_shares: int, num_tiles: int) -> int:
    """Programs that share the slots of a row block: two per SM in all, at most one per tile."""
    processors = INTERPRETER_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(triton.cdiv(2 * processors, num_shares), num_tiles)


@triton.jit(do_not_specialize=["num_queries"])
def _split_kernel(
    q, k, v, start_pos, out, lse, qk_scale, num_slots, num_queries, variant: tl.constexpr
):
    """Attention of block_rows query rows over one of the equal shares of the slots they see.

    Row r of a KV head is query token r // G of head r % G of its group. The results go to
    out [pairs, splits, T * G, D] and lse [pairs, splits, T * G], the lse to base 2. A split without
    slots writes lse = -inf and leaves its out as it is.
    """
    pair = tl.program_id(1).to(tl.int64)  # a sequence and a KV head; 64 bits for every address
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    rows = tl.program_id(0) * variant.block_rows + tl.arange(0, variant.block_rows)
    num_rows = num_queries * variant.group_size
    results = (pair * num_splits + split) * num_rows + rows

    filled = tl.load(start_pos + pair // variant.num_kv_heads).to(tl.int32)
    end = filled + num_queries - 1
    share = tl.cdiv(tl.cdiv(end, num_splits), variant.tile) * variant.tile
    lo = split * share
    hi = tl.minimum(lo + share, end)
    if lo >= hi:
        tl.store(lse + results, float("-inf"), mask=rows < num_rows)
        return

    token, head = rows // variant.group_size, rows % variant.group_size
    q_rows = (pair * variant.group_size + head) * num_queries + token
    d = tl.arange(0, variant.block_dim)[None, :]
    exists = (rows < num_rows)[:, None] & (d < variant.head_dim)
    queries = tl.load(q + q_rows[:, None] * variant.head_dim + d, mask=exists, other=0)
    queries = prepare_queries(queries.to(tl.float32), qk_scale, variant)

    acc = tl.full([variant.block_rows, variant.block_dim], 0.0, tl.float32)
    total = tl.full([variant.block_rows], 0.0, tl.float32)
    top = tl.full([variant.block_rows], float("-inf"), tl.float32)
    state = (acc, total, top)
    base = pair * num_slots
    # Below start_pos every row sees every slot: only the last tile or two need masks.
    whole = tl.maximum(lo, tl.minimum(hi, filled) // variant.tile * variant.tile)
    for first in range(lo, whole, variant.tile):
        slots = base + first
        state = attend_tile(state, queries, k, v, slots, None, None, variant)
    for first in tl.range(whole, hi, variant.tile, num_stages=2):
        slots, count, visible = base + first, hi - first, filled + token - first
        state = attend_tile(state, queries, k, v, slots, count, visible, variant)

    acc, total, top = state
    acc /= tl.where(total == 0, 1.0, total)[:, None]  # a total of NaN spoils the row
    tl.store(lse + results, top + tl.log2(total), mask=rows < num_rows)
    tl.store(out + results[:, None] * variant.head_dim + d, acc, mask=exists)


@triton.jit(do_not_specialize=["num_splits", "num_queries"])
def _merge_kernel(split_out, split_lse, out, lse, num_splits, num_queries, variant: tl.constexpr):
    """One row of one KV head: its splits weighted by exp2 of their lse; 0 and -inf without any."""
    pair, row, num_rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d = tl.arange(0, variant.block_dim)
    acc = tl.full([variant.block_dim], 0.0, tl.float32)
    total, top = 0.0, float("-inf")
    for first in range(0, num_splits, MERGE_STEP):
        split = first + tl.arange(0, MERGE_STEP)
        results = (pair * num_splits + split) * num_rows + row
        part_lse = tl.load(split_lse + results, mask=split < num_splits, other=float("-inf"))
        written = (part_lse > float("-inf"))[:, None] & (d < variant.head_dim)[None, :]
        pointers = split_out + results[:, None] * variant.head_dim + d[None, :]
        part_out = tl.load(pointers, mask=written, other=0)
        top, offset, decay = raise_top(top, tl.max(part_lse, 0))
        weights = tl.exp2(part_lse - offset)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * part_out, 0)

    token, head = row // variant.group_size, row % variant.group_size
    q_row = (pair * variant.group_size + head) * num_queries + token
    acc /= tl.where(total == 0, 1.0, total)
    tl.store(out + q_row * variant.head_dim + d, acc, mask=d < variant.head_dim)
    tl.store(lse + q_row, (top + tl.log2(total)) * LN_2)
