"""quantized_linear in Triton: products of few rows with weights of codes, each byte read once.

The product is one kernel (triton_codes.py): a program multiplies some rows of the weight, over a
share of the channels, with all rows of x. What comes before and after is plain PyTorch: between two
products there is a kernel of the compiler in any case, and it takes norm, scaling, the sum over
shares, SwiGLU and residual along. Grid and workspace follow from shapes alone, and there are no
atomics.

With TRITON_INTERPRET=1 set before Triton is imported, the same code runs on CPU tensors.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.linear import rms_norm, surrounded
from kernels.triton_codes import product_kernel

INTERPRETED = triton.knobs.runtime.interpret

INTERPRETER_PROCESSORS = 4
"""SMs to assume without a GPU: enough for several shares."""

PROGRAMS_PER_PROCESSOR = 4
"""Aimed at; as many fit into an SM at once, and together ask for all that memory can deliver."""

BLOCK_ROWS, TILE, NUM_STAGES = 64, 256, 3
"""Rows of the weight per program, channels per step, and tiles in flight plus one.

One shape for all, by counting instructions: see LOG.md. It needs no tuning before a capture.
"""

NAME = "kv_fast::quantized_product"

torch.library.define(
    NAME, "(Tensor x, Tensor codes, Tensor scales, Tensor? mins, int num_shares) -> Tensor"
)


@dataclass(frozen=True)
class Variant:
    """What the kernel is specialised on.

    code_bits: 8 or 4.
    codes_per_word: 16 / code_bits; 1 for rows of an odd number of bytes, read byte by byte.
    group: channels per scale; 0: one scale per row, which is applied after the product.
    has_mins: nibbles are values as they are; else 8 above them.
    ragged: the last tile of a row is not whole.
    columns: rows of x, padded to a power of two, which are the columns of the product.
    """

    code_bits: int
    codes_per_word: int
    group: int
    has_mins: bool
    ragged: bool
    columns: int
    block_rows: int = BLOCK_ROWS
    tile: int = TILE
    interpreted: bool = INTERPRETED


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    swiglu: bool,
) -> Tensor:
    """See kernels.quantized.quantized_linear; at most 16 rows of x, codes in rows.

    Sums are fp32. Weights of groups are rounded to fp16 on the way, codes of one scale per row are
    exact; x in bf16 and fp16 is exact, in fp32 it keeps 22 bits of each row's largest element.
    Made to be traced: compiled, all but the product becomes a part of what is around it.
    """
    width, has_row_scales = x.shape[-1], scales.shape[1] == 1
    num_rows = out_features * (2 if swiglu else 1)
    rows = x.reshape(-1, width)
    if norm is not None:
        rows = rms_norm(rows, norm, eps)
    halves, factor = to_halves(rows)
    operand = in_word_order(halves, codes_per_word(codes, width)).flatten(0, 1)
    num_shares = choose_num_shares(x.device, num_rows, width)
    parts = torch.ops.kv_fast.quantized_product(operand, codes, scales, mins, num_shares)
    y = parts.sum(0).unflatten(0, halves.shape[:2]).sum(1) * factor
    if has_row_scales:
        y = y * scales[:, 0]
        if mins is not None:
            y = y + rows.float().sum(1, keepdim=True) * mins[:, 0]
    y = surrounded(y.reshape(*x.shape[:-1], num_rows), residual, swiglu=swiglu)
    return y.to(x.dtype)


def to_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """X [R, C] as a sum of fp16 digits [R, D, C] times factors [R, 1], powers of two.

    D is 1, or 2 of fp32. The largest element of a row gets an exponent of 14, just below fp16's
    end, so that small ones keep their bits. A row with an inf or NaN gets the factor inf and a NaN.
    """
    peak = x.abs().amax(1, keepdim=True).float()
    power = (peak.view(torch.int32) & 0x7F800000).view(torch.float32)  # its exponent alone
    factor = power.clamp(min=2.0**-100) * 2.0**-14
    digits = [x.float() / factor]
    if x.dtype == torch.float32:
        # By bits: of a cast to fp16 and back the compiler would leave nothing.
        high = (digits[0].view(torch.int32) & -(1 << 13)).view(torch.float32)
        digits = [high, digits[0] - high]
    return torch.stack(digits, 1).half(), factor


def in_word_order(x: Tensor, per_word: int) -> Tensor:
    """Channels [..., C] in the order of the kernel: first codes of all words, second codes, ..."""
    if per_word == 2:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    elif per_word == 4:
        # Channel 4 * half + 2 * word + byte of 8 is nibble 2 * byte + half of its word.
        x = x.unflatten(-1, (-1, 2, 2, 2)).movedim((-1, -3), (-4, -3)).flatten(-4)
    return x


def codes_per_word(codes: Tensor, width: int) -> int:
    """How many codes of a row of `width` channels are read as one integer."""
    if codes.dtype == torch.uint8:
        return 4
    return 2 if width % 2 == 0 else 1


def choose_variant(operand: Tensor, codes: Tensor, scales: Tensor, has_mins: bool) -> Variant:
    """The specialisation for x [R, C], in fp16 and word order, and codes in rows.

    Raises:
        ValueError: groups that do not fill a tile.
    """
    width, num_groups = operand.shape[1], scales.shape[1]
    group = 0 if num_groups == 1 else width // num_groups
    if group and TILE % group:
        raise ValueError(f"groups of {group} channels: divisors of {TILE} are supported")
    return Variant(
        code_bits=4 if codes.dtype == torch.uint8 else 8,
        codes_per_word=codes_per_word(codes, width),
        group=group,
        has_mins=has_mins,
        ragged=width % TILE > 0,
        columns=max(8, triton.next_power_of_2(operand.shape[0])),
    )


def choose_num_shares(device: torch.device, num_rows: int, width: int) -> int:
    """Programs among which the channels of a row are shared: more where there are few rows."""
    processors = INTERPRETER_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    shares = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, triton.cdiv(num_rows, BLOCK_ROWS))
    return min(shares, triton.cdiv(width, TILE))


@torch.library.register_fake(NAME)
def _(x: Tensor, codes: Tensor, _scales: Tensor, _mins: object, num_shares: int) -> Tensor:
    return x.new_empty(num_shares, x.shape[0], codes.shape[0], dtype=torch.float32)


def quantized_product(
    x: Tensor, codes: Tensor, scales: Tensor, mins: Tensor | None, num_shares: int
) -> Tensor:
    """Sums of x times weight over each share of the channels.

    Never waits for the device, and its workspace depends on shapes only: it can be captured.

    Args:
        x: [R, C] fp16 in word order, R <= 32.
        codes, scales, mins: of the weight, in rows; one scale per row is not applied.
        num_shares: see choose_num_shares.

    Returns:
        [num_shares, R, N] fp32.
    """
    variant = choose_variant(x, codes, scales, mins is not None)
    num_columns, num_rows = x.shape[0], codes.shape[0]
    out = x.new_empty(num_shares, num_columns, num_rows, dtype=torch.float32)
    num_words = x.shape[1] // variant.codes_per_word
    num_tiles = triton.cdiv(x.shape[1], TILE)
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), num_shares)
    with torch.cuda.device_of(x):
        product_kernel[grid](
            *(x.contiguous(), codes, scales, mins, out),
            *(num_columns, num_rows, num_words, scales.shape[1]),
            *(num_tiles, triton.cdiv(num_tiles, num_shares), variant),
            num_warps=2 if variant.columns <= 16 else 4,
            num_stages=NUM_STAGES,
            maxnreg=255,
        )
    return out


torch.library.impl(NAME, "CompositeExplicitAutograd", quantized_product)
