"""The kernel of triton_linear.py: codes made into fp16 weights, and their product with x.

It runs on the tensor cores in fp16, where codes are exact and cheap to make: two in one register,
from pairs of bytes. Converting them one by one would issue more instructions than the memory has
time for. In every function: variant is a triton_linear.Variant, row [block_rows, 1] the rows of the
weight, word the 16-bit integers that its codes are read in.

Source: codes as the low bits of a float of known exponent, https://arxiv.org/abs/2211.10017.
"""

# mypy: disable-error-code=no-untyped-def
# The arguments of a kernel are Triton's own values, which have no useful static types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns", "num_rows", "num_tiles", "share"])
def product_kernel(
    x,
    codes,
    scales,
    mins,
    out,
    num_columns,
    num_rows,
    num_words,
    num_groups,
    num_tiles,
    share,
    variant: tl.constexpr,
):
    """Block_rows rows of the weight times all columns, over `share` tiles of the channels."""
    row = tl.program_id(0) * variant.block_rows + tl.arange(0, variant.block_rows)[:, None]
    row = row.to(tl.int64)  # 64 bits for every address
    column = tl.arange(0, variant.columns)[None, :]
    per_word: tl.constexpr = variant.codes_per_word
    tile_words: tl.constexpr = variant.tile // per_word
    word = tl.arange(0, tile_words)
    first_tile = tl.program_id(1) * share
    acc = tl.full([variant.block_rows, variant.columns], 0.0, tl.float32)
    for tile in range(first_tile, tl.minimum(first_tile + share, num_tiles)):
        start = tile * tile_words
        words = _load_words(codes, row, start + word[None, :], num_rows, num_words, variant)
        scale, least = _load_groups(scales, mins, row, tile, num_rows, num_groups, variant)
        for i in tl.static_range(per_word):
            pointers = x + (column * per_word + i) * num_words + (start + word[:, None])
            mask = column < num_columns
            if variant.ragged:
                mask &= start + word[:, None] < num_words
            operand = tl.load(pointers, mask=mask, other=0)
            acc = tl.dot(_weights(words, i, scale, least, variant), operand, acc)
    column = column.to(tl.int64) + tl.program_id(1) * num_columns
    exists = (row < num_rows) & (tl.arange(0, variant.columns)[None, :] < num_columns)
    tl.store(out + column * num_rows + row, acc, mask=exists)


@triton.jit
def _load_words(codes, row, word, num_rows, num_words, variant: tl.constexpr):
    """[block_rows, words of a tile]. Read once: they shall not displace what is reused."""
    if variant.codes_per_word > 1:
        codes = codes.to(tl.pointer_type(tl.int16), bitcast=True)
    mask = row < num_rows
    if variant.ragged:
        mask &= word < num_words
    return tl.load(
        codes + row * num_words + word, mask=mask, other=0, eviction_policy="evict_first"
    )


@triton.jit
def _load_groups(scales, mins, row, tile, num_rows, num_groups, variant: tl.constexpr):
    """Scales and mins of a tile, [block_rows, groups, 1] fp16, or None."""
    scale, least = None, None
    if variant.group > 0:
        groups: tl.constexpr = variant.tile // variant.group
        group = tile * groups + tl.arange(0, groups)[None, :]
        mask = row < num_rows
        if variant.ragged:
            mask &= group < num_groups
        at = row * num_groups + group
        scale = tl.load(scales + at, mask=mask, other=0).to(tl.float16)[:, :, None]
        if variant.has_mins:
            least = tl.load(mins + at, mask=mask, other=0).to(tl.float16)[:, :, None]
    return scale, least


@triton.jit
def _weights(words, i: tl.constexpr, scale, least, variant: tl.constexpr):
    """The codes of place i in their words, as weights in fp16: [block_rows, words]."""
    values = _codes(words, i, variant)
    if variant.group > 0:
        group_words: tl.constexpr = variant.group // variant.codes_per_word
        groups: tl.constexpr = variant.tile // variant.group
        values = tl.reshape(values, (variant.block_rows, groups, group_words)) * scale
        if variant.has_mins:
            values += least
        values = tl.reshape(values, (variant.block_rows, groups * group_words))
    return values


@triton.jit
def _codes(words, i: tl.constexpr, variant: tl.constexpr):
    """Code i of each word, low bits first, in fp16.

    As the low bits of the mantissa of 1024, where its unit is 1, or the middle ones of 64: `code +
    1024`, less that. A signed byte with its upper bit flipped is its value plus 128.
    """
    if variant.codes_per_word == 1:
        values = words.to(tl.float16)
    elif variant.code_bits == 8:
        values = _masked_halves(words, 8 * i, 0xFF, 0x6480, variant) - 1152.0
    else:
        zero: tl.constexpr = 0 if variant.has_mins else 8
        if i % 2 == 0:
            values = _masked_halves(words, 4 * i, 0xF, 0x6400, variant) - (1024.0 + zero)
        else:
            values = _masked_halves(words, 4 * i - 4, 0xF0, 0x5400, variant) - (64.0 + zero)
    return values


@triton.jit
def _masked_halves(
    words, shift: tl.constexpr, mask: tl.constexpr, flip: tl.constexpr, variant: tl.constexpr
):
    """The bits `words >> shift & mask ^ flip` as fp16.

    Compiled, two neighbouring words in one register, which the compiler by itself takes apart.
    """
    if variant.interpreted:
        halves = (((words >> shift) & mask) ^ flip).to(tl.float16, bitcast=True)
    else:
        if shift > 0:
            words = tl.inline_asm_elementwise(
                f"shr.b32 $0, $1, {shift};", "=r,r", [words], tl.int16, is_pure=True, pack=2
            )
        both_masks: tl.constexpr = mask * 0x10001
        both_flips: tl.constexpr = flip * 0x10001
        # 0x6A: the table of `a & b ^ c`, which is 0xF0 & 0xCC ^ 0xAA.
        halves = tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, {both_masks}, {both_flips}, 0x6A;",
            "=r,r",
            [words],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    return halves
