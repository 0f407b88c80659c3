"""How a weight is stored in 8 or 4 bits: the layouts by name, and a linear class per scheme.

A layout says what is stored of a matrix; the names of a file's kept blocks are layouts too. A
scheme makes such a weight from a dense one, in blocks of rows, so that its scratch stays small.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from kernels.huge_pages import Empty
from kernels.quantized import (
    TILE_ROWS,
    QuantizedWeight,
    pack_nibbles,
)
from model import Linear, Transformer
from model_config import ModelConfig
from stored_tensor import short_lived

ENCODED_ELEMENTS = 1 << 17  # at a time; scratch is some ten times so many fp32 numbers
SHARES_OF_RANGE, NUM_REFITS = (1.0, 0.9, 0.8), 2  # that int4 tries; the choice is in LOG.md
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Layout(NamedTuple):
    """What is stored of a matrix [N, C], in rows.

    Attributes:
        bits: of a code.
        group: channels that share a scale; 0: all of a row.
        scale_dtype: of scales and mins.
        has_mins: a group has a smallest value beside its scale.
    """

    bits: int
    group: int
    scale_dtype: torch.dtype
    has_mins: bool

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """Name, dtype and shape of each part, as `QuantizedWeight` has them."""
        num_rows, width = shape
        groups = (num_rows, width // self.group if self.group else 1)
        codes_dtype = torch.int8 if self.bits == 8 else torch.uint8
        parts = {"codes": (codes_dtype, (num_rows, width * self.bits // 8))}
        parts["scales"] = (self.scale_dtype, groups)
        return parts | ({"mins": parts["scales"]} if self.has_mins else {})

    def nbytes(self, shape: tuple[int, ...], *, in_tiles: bool = False) -> int:
        """Of all parts; tiles have rows of zeros past N."""
        num_rows = -(-shape[0] // TILE_ROWS) * TILE_ROWS if in_tiles else shape[0]
        parts = self.parts((num_rows, shape[1])).values()
        return sum(dtype.itemsize * rows * width for dtype, (rows, width) in parts)


class QuantizedLinear(nn.Module):
    """A weight of codes, and its product with all that surrounds it; a bias as `model.Linear`'s.

    Attributes:
        layout_name: of its weight, a key of `LAYOUTS`.
    """

    groups: ClassVar[tuple[int, ...]] = ()  # that a scheme offers, its default first
    codes: Tensor
    scales: Tensor
    mins: Tensor | None

    def __init__(
        self, weight: QuantizedWeight, layout_name: str, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.shape, self.layout_name, self.bias = weight.shape, layout_name, bias
        for name in ("codes", "scales", "mins"):
            self.register_buffer(name, getattr(weight, name))

    @classmethod
    def from_linear(cls, linear: Linear, group: int | None = None) -> Self:
        """The same layer in this scheme, on its device.

        Args:
            group: channels that share a scale; None: the scheme's default.
        """
        group = cls.groups[0] if group is None else group
        weight = encode(linear.weight, cls, group).laid_out_for(linear.weight.device)
        return cls(weight, cls.name_of(group), linear.bias)

    @classmethod
    def name_of(cls, group: int) -> str:
        """The name of its layout."""
        raise NotImplementedError

    @staticmethod
    def encode_groups(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Of fp32 groups [N, groups, channels]: codes alike, scales, mins [N, groups, 1].

        Codes are those that are best for scales and mins as they are stored.
        """
        raise NotImplementedError

    @property
    def weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.shape, self.codes, self.scales, self.mins)

    @property
    def nbytes(self) -> int:
        """Of the weight as stored."""
        return self.weight.nbytes

    forward = Linear.forward  # which takes the weight of either kind


class QuantizedEmbedding(nn.Module):
    """The look-up in a weight of codes [V, C]: only the rows of the ids are made dense.

    Args:
        linear: that holds the weight; a tied head is this very module.
        dtype: of the rows.
    """

    def __init__(self, linear: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = linear, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.linear.weight.take(tokens.flatten()).dequantize(self.dtype)
        return rows.unflatten(0, tokens.shape)


class Int8Linear(QuantizedLinear):
    """Symmetric int8, one fp32 scale per row, or an fp16 scale per group."""

    groups = (0, 32, 64, 128)

    @classmethod
    def name_of(cls, group: int) -> str:
        return f"int8:{group}" if group else "int8"

    @staticmethod
    def encode_groups(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
        scales = (weight.abs().amax(-1, keepdim=True) / 127).to(scale_dtype).float()
        return (weight * inverse(scales)).round().clamp(-127, 127), scales


class Int4Linear(QuantizedLinear):
    """Four bits, an fp16 scale and minimum per group, both searched for the least squared error.

    Ranges narrower than the weights' own are tried, each followed twice by the line through the
    codes that fits best: an outlier clipped costs less than a step too wide for all others.
    """

    groups = (32, 64, 128)

    @classmethod
    def name_of(cls, group: int) -> str:
        return f"int4:{group}"

    @staticmethod
    def encode_groups(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, ...]:
        low, high = weight.aminmax(dim=-1, keepdim=True)
        best = rounded(weight, (high - low) / 15, low, scale_dtype)
        for share in SHARES_OF_RANGE:
            margin = (high - low) * (1 - share) / 2
            fit = rounded(weight, (high - low) * share / 15, low + margin, scale_dtype)
            for _ in range(NUM_REFITS):
                best = best.or_better(fit)
                fit = rounded(weight, *line_through(weight, fit.codes), scale_dtype)
            best = best.or_better(fit)
        return best.codes, best.scales, best.mins


class Fit(NamedTuple):
    """Groups in four bits: codes [N, groups, channels] alike, the others [N, groups, 1]."""

    codes: Tensor
    scales: Tensor
    mins: Tensor
    errors: Tensor  # squared

    def or_better(self, other: "Fit") -> "Fit":
        """Of each group the one with the smaller error."""
        is_better = other.errors < self.errors
        return Fit(*(torch.where(is_better, b, a) for a, b in zip(self, other, strict=True)))


def rounded(weight: Tensor, scales: Tensor, mins: Tensor, dtype: torch.dtype) -> Fit:
    """The codes nearest to the weights, for scales and mins as `dtype` has them."""
    scales, mins = scales.to(dtype).float(), mins.to(dtype).float()
    codes = ((weight - mins) * inverse(scales)).round().clamp(0, 15)
    errors = (codes * scales + mins - weight).square().sum(-1, keepdim=True)
    return Fit(codes, scales, mins, errors)


def line_through(weight: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and mins of the least squared error for these codes."""
    centred = codes - codes.mean(-1, keepdim=True)
    scales = (centred * weight).sum(-1, keepdim=True) * inverse(
        centred.square().sum(-1, keepdim=True)
    )
    return scales, weight.mean(-1, keepdim=True) - scales * codes.mean(-1, keepdim=True)


def inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 of 0."""
    return torch.where(x == 0, 0.0, 1 / x)


def encode(weight: Tensor, scheme: type[QuantizedLinear], group: int) -> QuantizedWeight:
    """A dense matrix in a scheme, in rows on its device; errors as `encoded_blocks`."""
    return gathered(weight.shape[0], encoded_blocks(weight, scheme, group), short_lived)


def encoded_blocks(
    weight: Tensor, scheme: type[QuantizedLinear], group: int
) -> Iterator[QuantizedWeight]:
    """A dense matrix in a scheme, some tiles of rows at a time.

    Raises:
        ValueError: it is not finite, or out of the scales' range.
    """
    width = weight.shape[1]
    layout = LAYOUTS[scheme.name_of(group)]
    count = max(1, ENCODED_ELEMENTS // (width * TILE_ROWS)) * TILE_ROWS
    for block in weight.detach().split(count):
        dense = block.float()
        if not dense.abs().amax() <= torch.finfo(layout.scale_dtype).max:
            raise ValueError(f"its values are not finite, or too large for {layout.scale_dtype}")
        values, *around = scheme.encode_groups(
            dense.unflatten(1, (-1, group or width)), layout.scale_dtype
        )
        if layout.bits == 8:
            codes = values.flatten(1).to(torch.int8)
        else:
            codes = pack_nibbles(values.flatten(1).to(torch.uint8))
        parts = (part.squeeze(-1).to(layout.scale_dtype) for part in around)
        yield QuantizedWeight((len(block), width), codes, *parts)


def gathered(num_rows: int, blocks: Iterable[QuantizedWeight], empty: Empty) -> QuantizedWeight:
    """One weight of blocks of rows, all in one layout, in memory that `empty` gives.

    Args:
        num_rows: of all blocks; each but the last has whole tiles.
    """
    parts: list[Tensor] = []
    first = 0
    for block in blocks:
        height = TILE_ROWS if block.is_tiled else 1
        for part in block.parts[len(parts) :]:
            sizes = (-(-num_rows // height), *part.shape[1:])
            parts.append(empty(sizes, dtype=part.dtype, device=part.device))
        for part, values in zip(parts, block.parts, strict=True):
            part[first // height : first // height + len(values)] = values
        first += block.shape[0]
    return QuantizedWeight((num_rows, block.shape[1]), *parts)


def describe_formats(formats: Mapping[str, str]) -> str:
    """How a model's weights are stored, for a row: `bf16`, `int8`, or layers and head apart.

    Args:
        formats: of every matrix, by parameter name.
    """
    ends = {name: found for name, found in formats.items() if name in (EMBEDDING, HEAD)}
    layers = {name: found for name, found in formats.items() if name not in ends}
    names = ["+".join(sorted(set(part.values()))) for part in (layers, ends)]
    return ",".join(dict.fromkeys(filter(None, names)))


WEIGHT_FORMATS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
"""A weight format is a linear class with `from_linear`, `forward` and `nbytes`."""

FP16, FP32 = torch.float16, torch.float32
LAYOUTS = {
    "int8": Layout(8, 0, FP32, has_mins=False),
    **{f"int8:{group}": Layout(8, group, FP16, has_mins=False) for group in Int8Linear.groups[1:]},
    **{f"int4:{group}": Layout(4, group, FP16, has_mins=True) for group in Int4Linear.groups},
    "q8_0": Layout(8, 32, FP16, has_mins=False),
    "q4_0": Layout(4, 32, FP16, has_mins=False),
    "q4_1": Layout(4, 32, FP16, has_mins=True),
}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all parameters of a model, by name; a tied matrix once."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}


def stored_bytes(
    config: ModelConfig, formats: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """What each parameter of a model takes on a device.

    Args:
        formats: layouts of those that are held as codes, by name.
        dtype: of the others.
    """
    return {
        name: LAYOUTS[formats[name]].nbytes(shape, in_tiles=laid_out_in_tiles(device, shape[1]))
        if name in formats
        else math.prod(shape) * dtype.itemsize
        for name, shape in parameter_shapes(config).items()
    }


def laid_out_in_tiles(device: torch.device, width: int) -> bool:
    """Whether the kernels of a device want tiles of weights [N, width], seen from one row."""
    codes = torch.zeros(1, width, dtype=torch.int8)
    return QuantizedWeight((1, width), codes, torch.ones(1, 1)).laid_out_for(device).is_tiled
