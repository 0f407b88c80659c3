"""Weights of 8 and 4 bits: how they are stored, and products with them.

A weight is a code times the scale of its group, a run of `group` channels of one row, plus the
group's minimum if it has one:

    w[n, c] = scales[n, c // group] * codes[n, c] + mins[n, c // group]

With few rows of x the stored bytes are read once, by one call: C++ on the CPU, Triton on CUDA. With
more, or where neither is there, blocks of the weight are made dense and the library multiplies.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import many_rows, native
from kernels.linear import has_few_rows, rms_norm, surrounded

WORD = 4
"""Bytes of a row that stay together in every layout."""

TILE_ROWS = 16
"""Rows whose words lie side by side in tiles: one register holds a word of each."""

NAME = "kv_fast::quantized_linear"

torch.library.define(
    NAME,
    "(Tensor x, Tensor codes, Tensor scales, Tensor? mins, int out_features, Tensor? norm,"
    " float eps, Tensor? residual, bool swiglu) -> Tensor",
)

# A weight in tiles as a dense matrix [num_rows, width].
torch.library.define(
    "kv_fast::dequantize",
    "(Tensor codes, Tensor scales, Tensor? mins, int num_rows, int width, ScalarType dtype)"
    " -> Tensor",
)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix of codes.

    Attributes:
        shape: (N, C).
        codes: int8 [N, C] of value -128 .. 127; or uint8 [N, C / 2], two nibbles a byte as
            `pack_nibbles` has them, of value 0 .. 15, less 8 where there are no mins.
        scales: [N, C / group], fp32 or fp16.
        mins: like scales, or None.

    That is the layout of files and of most devices. In tiles, the layout of the C++ kernels, each
    part [N, count * width] is [N / 16, count, 16, width], with a width of 4 bytes of codes or one
    scale; rows past N are zeros.
    """

    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def zero(self) -> int:
        """The stored code of value 0."""
        return 8 if self.bits == 4 and self.mins is None else 0

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, scales and, if there are some, mins."""
        return tuple(part for part in (self.codes, self.scales, self.mins) if part is not None)

    @property
    def nbytes(self) -> int:
        """Of all that is stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_tiled(self) -> bool:
        """Whether it is in the layout of the C++ kernels."""
        return self.codes.dim() == 4

    def laid_out_for(self, device: torch.device) -> "QuantizedWeight":
        """On `device`, as its kernels want it."""
        fits = self.shape[1] % (2 * WORD) == 0
        if device.type == "cpu" and fits and native.load():
            return self.tiled()
        here = self.row_major()
        return QuantizedWeight(self.shape, *(part.to(device) for part in here.parts))

    def tiled(self) -> "QuantizedWeight":
        """In tiles."""
        if self.is_tiled:
            return self
        widths = (WORD, 1, 1)
        parts = (to_tiles(part, width) for part, width in zip(self.parts, widths, strict=False))
        return QuantizedWeight(self.shape, *parts)

    def row_major(self) -> "QuantizedWeight":
        """In rows."""
        if not self.is_tiled:
            return self
        rows = (part.transpose(1, 2).flatten(2).flatten(0, 1) for part in self.parts)
        return QuantizedWeight(self.shape, *(part[: self.shape[0]].contiguous() for part in rows))

    def block(self, first: int, last: int) -> "QuantizedWeight":
        """Rows first .. last - 1, a view; in tiles `first` is a multiple of 16."""
        shape = (last - first, self.shape[1])
        if self.is_tiled:
            first, last = first // TILE_ROWS, -(-last // TILE_ROWS)
        return QuantizedWeight(shape, *(part[first:last] for part in self.parts))

    def take(self, ids: Tensor) -> "QuantizedWeight":
        """The rows of the ids [R], in rows: an embedding's look-up."""
        if self.is_tiled:
            tile, row = ids // TILE_ROWS, ids % TILE_ROWS
            parts = [part[tile, :, row].flatten(1) for part in self.parts]
        else:
            parts = [part[ids] for part in self.parts]
        return QuantizedWeight((len(ids), self.shape[1]), *parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, C], computed in fp32 and rounded once."""
        if self.is_tiled:
            parts = (self.codes, self.scales, self.mins)
            return torch.ops.kv_fast.dequantize(*parts, *self.shape, dtype)
        num_groups = self.scales.shape[1]
        values = self.codes if self.bits == 8 else unpack_nibbles(self.codes)
        dense = values.unflatten(1, (num_groups, -1)).float()
        if self.mins is not None:
            return (dense * self.scales[..., None] + self.mins[..., None]).to(dtype).flatten(1)
        return ((dense - self.zero) * self.scales[..., None]).to(dtype).flatten(1)


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 [N, C] of 0 .. 15 -> [N, C / 2]; C is a multiple of 8.

    Of 8 channels the first four are the low nibbles of a word's bytes, the others the high ones:
    both are then four neighbouring channels, as the products of four bytes want them.
    """
    low, high = values.unflatten(1, (-1, 2, WORD)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """What `pack_nibbles` packed: uint8 [N, C / 2] -> [N, C]."""
    words = codes.unflatten(1, (-1, WORD))
    return torch.stack((words & 15, words >> 4), dim=2).flatten(1)


def to_tiles(part: Tensor, width: int) -> Tensor:
    """[N, count * width] -> [N / 16, count, 16, width], with zeros past N."""
    missing = -part.shape[0] % TILE_ROWS
    padded = F.pad(part, (0, 0, 0, missing)) if missing else part
    return (
        padded.unflatten(1, (-1, width)).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()
    )


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    *,
    swiglu: bool = False,
) -> Tensor:
    """Residual + act(norm(x) @ weight.T), as `kernels.linear.linear` with a weight of codes.

    Few rows of x are split into two digits of a byte each, 16 bits together, on processors with
    products of bytes.
    """
    num_rows = weight.shape[0]
    in_tiles = weight.is_tiled and not (swiglu and num_rows % (2 * TILE_ROWS))
    if has_few_rows(x) and (in_tiles or x.device.type == "cuda"):
        out_features = num_rows // 2 if swiglu else num_rows
        parts = (weight.codes, weight.scales, weight.mins)
        around = (*(norm or (None, 0.0)), residual, swiglu)
        if x.device.type == "cuda":
            from kernels import triton_linear  # noqa: PLC0415  (Triton exists only where CUDA does)

            return triton_linear.quantized_linear(x, *parts, out_features, *around)
        return torch.ops.kv_fast.quantized_linear(x, *parts, out_features, *around)
    y = dense_product(rms_norm(x, *norm) if norm else x, weight)
    return surrounded(y, residual, swiglu=swiglu)


def dense_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """[..., C] @ weight.T -> [..., N] by the library, from blocks of the weight made dense."""
    num_rows, width = weight.shape
    if weight.is_tiled:
        return many_rows.product_of_parts(x, weight.parts, num_rows)
    dtype = many_rows.product_dtype(x)
    count = max(1, many_rows.BLOCK_BYTES // (width * dtype.itemsize))
    blocks = [
        weight.block(first, min(first + count, num_rows)) for first in range(0, num_rows, count)
    ]
    operand = x.to(dtype)
    return torch.cat([F.linear(operand, b.dequantize(dtype)).to(x.dtype) for b in blocks], dim=-1)


@torch.library.register_fake("kv_fast::dequantize")
def _(
    codes: Tensor, _scales: Tensor, _mins: object, num_rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(num_rows, width, dtype=dtype)


@torch.library.register_fake(NAME)
def _(
    x: Tensor, _codes: Tensor, _scales: Tensor, _mins: object, out_features: int, *_: object
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)
