"""One tile of the cache in Triton: scores and the online softmax, for every pair of formats.

Int8 codes go to the integer tensor cores as they are; converting them first would issue more
instructions than the memory has time for. So the other operand becomes an integer too, a number
of 14 to 16 bits in two int8 digits, and one operand of codes serves both digits:

    scores  q = (256 high + low) * factor, one factor per query row. The high digits are the upper
            half of the rows of one product, the low digits the lower half.
    values  weight * scale = (128 high + low) * 2**tile_top, one tile_top per query row and tile.
            Two products, with V as [D, slots]: integer products need the summed index contiguous.

Codes of fp8 and int4 are made into the type of a plain product, in which they are exact. Those of
int4 are multiplied less ZERO_NIBBLE; what that and the zeros add is a number per slot or query row:

    scores  q . (scale * code + zero) = scale * (q . code) + zero * (sum of q)
    values  (sum of weight * scale * code) + (sum of weight * zero), added to every channel

In every function: variant is a triton_decode.Variant; the tile starts at slot `first` of all rows
and heads together; of it `count` slots are read, None: all.
"""

# mypy: disable-error-code=no-untyped-def
# The arguments of a kernel are Triton's own values, which have no useful static types.

import triton
import triton.language as tl

from kernels.slots import SLOT_TILE

VALUE_TILE = tl.constexpr(SLOT_TILE)
"""Slots that int8 values keep together: [B, Hkv, S / VALUE_TILE, D, VALUE_TILE]."""

VALUE_WORD = tl.constexpr(16)
"""Slots in 16 bytes of int8 values, the least that a fast copy takes."""

WEIGHT_BITS = tl.constexpr(13.9)
"""Log2 of the largest integer weight: 2**13.9 is below 2**14 by more than log2_roughly is wrong."""

SMALLEST = tl.constexpr(2.0**-60)
"""Floor of scales that are divided by or whose logarithm is taken."""

ZERO_NIBBLE = tl.constexpr(8)
"""Is subtracted from codes of int4: products of smaller numbers are rounded less."""


@triton.jit
def prepare_queries(q, qk_scale, variant: tl.constexpr):
    """Of q [rows, D] fp32: the left operand of q . k, factors from products to scores, sums of q.

    For int8 keys the operand is [2 * rows, D]: high digits, then low digits.
    """
    if variant.k_format == "int8":
        step = tl.maximum(tl.max(tl.abs(q), 1) / variant.query_levels, SMALLEST)
        codes = tl.floor(q / step[:, None] + 0.5).to(tl.int32)[None, :, :]
        is_high = tl.arange(0, 2)[:, None, None] == 0
        # Cut to 8 bits, a code is its low digit: -128 .. 127.
        digits = tl.where(is_high, (codes + 128) >> 8, codes).to(tl.int8)
        operand = tl.reshape(digits, (2 * variant.block_rows, variant.block_dim))
        factor = step * qk_scale
    else:
        operand = q.to(variant.k_dot)
        factor = tl.full([variant.block_rows], 1.0, tl.float32) * qk_scale
    return operand, factor, tl.sum(q, 1)


@triton.jit
def attend_tile(state, queries, k, v, first, count, visible, variant: tl.constexpr):
    """One step of the online softmax.

    state: weighted values [rows, D] and weights [rows], both relative to exp2(top [rows]).
    queries: from prepare_queries.
    visible: row r sees the first visible[r] slots; None: all.
    """
    operand, factor, q_sum = queries
    scores = _products(operand, q_sum, k, first, count, variant) * factor[:, None]
    if visible is not None:
        slot = tl.arange(0, variant.tile)[None, :]
        scores = tl.where(slot < visible[:, None], scores, float("-inf"))
    if variant.v_format == "int8":
        state = _add_int8_values(state, scores, v, first, count, variant)
    else:
        state = _add_plain_values(state, scores, v, first, count, variant)
    return state


@triton.jit
def _products(queries, q_sum, k, first, count, variant: tl.constexpr):
    """[rows, tile] fp32."""
    keys = _load_vectors(k[0], first, count, variant.k_format, variant.k_dot, variant)
    if variant.k_format == "int8":
        digits = tl.dot(queries, tl.trans(keys))
        digits = tl.reshape(digits, (2, variant.block_rows, variant.tile))
        high, low = tl.split(tl.permute(digits, (1, 2, 0)))
        products = (high * 256 + low).to(tl.float32)
    elif variant.v_format == "int8":
        # Transposed, so that the compiler spreads each product of the step over all warps.
        products = tl.trans(tl.dot(keys, tl.trans(queries), input_precision="ieee"))
    else:
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if variant.k_has_scale:
        scale = _load_scale(k[1], first, count, variant)
        products *= scale[None, :]
        if variant.k_format == "int4":
            zero = _load_scale(k[2], first, count, variant) + scale * ZERO_NIBBLE
            products += q_sum[:, None] * zero[None, :]
    return products


@triton.jit
def _add_plain_values(state, scores, v, first, count, variant: tl.constexpr):
    """Weights relative to the running maximum."""
    acc, total, top = state
    top, offset, decay = raise_top(top, tl.max(scores, 1))
    weights = tl.exp2(scores - offset[:, None])
    total = total * decay + tl.sum(weights, 1)
    values = _load_vectors(v[0], first, count, variant.v_format, variant.v_dot, variant)
    acc *= decay[:, None]
    if variant.v_has_scale:
        scale = _load_scale(v[1], first, count, variant)
        if variant.v_format == "int4":
            zero = _load_scale(v[2], first, count, variant) + scale * ZERO_NIBBLE
            acc += tl.sum(weights * zero[None, :], 1)[:, None]
        weights *= scale[None, :]
    acc = tl.dot(weights.to(variant.v_dot), values, acc, input_precision="ieee")
    return acc, total, top


@triton.jit
def _add_int8_values(state, scores, v, first, count, variant: tl.constexpr):
    """Weights relative to the largest weight * scale of the tile: all its levels are then in use.

    A row that sees nothing has a tile_top of -inf, weights of 0 and a gain of 0.
    """
    acc, total, top = state
    scale = _load_scale(v[1], first, count, variant)[None, :]
    tile_top = tl.max(scores + _log2_roughly(tl.maximum(scale, SMALLEST)), 1) - WEIGHT_BITS
    weights = tl.exp2(scores - tl.where(tile_top == float("-inf"), 0.0, tile_top)[:, None])
    codes = (weights * scale + 0.5).to(tl.int32)
    high, low = (codes >> 7).to(tl.int8), (codes & 127).to(tl.int8)
    values = _load_tiled_values(v[0], first, count, variant)
    sums = tl.dot(values, tl.trans(high)) * 128 + tl.dot(values, tl.trans(low))
    top, offset, decay = raise_top(top, tile_top)
    gain = tl.exp2(tile_top - offset)
    # A scale that is not finite has no codes; here it spoils the row.
    total = total * decay + tl.sum(weights + scale * 0.0, 1) * gain
    acc = acc * decay[:, None] + tl.trans(sums).to(tl.float32) * gain[:, None]
    return acc, total, top


@triton.jit
def raise_top(top, candidate):
    """Of an online softmax: the new maximum, what to subtract for it, the factor of older sums.

    Before anything was seen the maximum is -inf, and exp2(-inf + inf) would be NaN: subtract 0.
    """
    new_top = tl.maximum(top, candidate)
    offset = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, offset, tl.exp2(top - offset)


@triton.jit
def _log2_roughly(x):
    """At most 0.0861 below log2 of x > 0: the bits of a float, read as a fixed-point number."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127


@triton.jit
def _load_vectors(
    part, first, count, kv_format: tl.constexpr, dot: tl.constexpr, variant: tl.constexpr
):
    """[tile, block_dim] in the type of a product."""
    per_byte: tl.constexpr = 2 if kv_format == "int4" else 1
    width: tl.constexpr = variant.head_dim // per_byte
    slot = tl.arange(0, variant.tile)[:, None]
    d = tl.arange(0, variant.block_dim // per_byte)[None, :]
    pointers = part + first * width + (slot * width + d)
    payload = _load_payload(pointers, slot, d, count, width, variant)
    if kv_format == "int4":
        both = tl.join(payload & 15, payload >> 4).to(tl.int8) - ZERO_NIBBLE
        vectors = tl.reshape(both, (variant.tile, variant.block_dim)).to(dot)
    elif kv_format == "fp8":
        # As the bits of fp16 with an exponent 8 too low: an A100 cannot convert fp8.
        bits = payload.to(tl.uint16)
        halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True)
        vectors = (halves * 256.0).to(dot)
    else:
        vectors = payload.to(dot)
    return vectors


@triton.jit
def _load_tiled_values(part, first, count, variant: tl.constexpr):
    """[block_dim, tile] codes.

    Whole words are read: up to 15 slots past count, whose weights are 0 whatever the codes are.
    """
    slot = tl.arange(0, variant.tile)[None, :]
    d = tl.arange(0, variant.block_dim)[:, None]
    tile: tl.constexpr = variant.tile
    within = tl.multiple_of(first % VALUE_TILE, tile) if tile < VALUE_TILE else 0
    start = tl.multiple_of((first - within) * variant.head_dim, VALUE_TILE)
    pointers = part + start + within + (d * VALUE_TILE + slot)
    if count is not None:
        count = tl.cdiv(count, VALUE_WORD) * VALUE_WORD
    return _load_payload(pointers, slot, d, count, variant.head_dim, variant)


@triton.jit
def _load_payload(pointers, slot, d, count, width: tl.constexpr, variant: tl.constexpr):
    """Zero past width and past count slots. Read once: it shall not displace what is reused."""
    if count is not None:
        mask = (slot < count) & (d < width)
        payload = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    elif variant.head_dim < variant.block_dim:
        mask = d < width
        payload = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    else:
        payload = tl.load(pointers, eviction_policy="evict_first")
    return payload


@triton.jit
def _load_scale(part, first, count, variant: tl.constexpr):
    """[tile] fp32; zero past count slots.

    Without count, in words of two: a bf16 value alone is too narrow to be copied ahead of its use.
    """
    if count is not None:
        slot = tl.arange(0, variant.tile)
        scale = tl.load(part + first + slot, mask=slot < count, other=0).to(tl.float32)
    else:
        words = (part + first).to(tl.pointer_type(tl.int32), bitcast=True)
        pairs = tl.load(words + tl.arange(0, variant.tile // 2))[:, None]
        # The bits of a bf16 value are the upper half of the same value's in fp32.
        bits = pairs >> (16 * tl.arange(0, 2))[None, :] << 16
        scale = tl.reshape(bits.to(tl.float32, bitcast=True), (variant.tile,))
    return scale
