"""How a weight is stored in 8 or 4 bits: the layouts by name, and a linear class per scheme.

A layout says what is stored of a matrix; the names of a file's kept blocks are layouts too. A
scheme makes such a weight from a dense one, in blocks of rows, so that its scratch stays small.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from kernels.quantized import (
    TILE_ROWS,
    QuantizedWeight,
    pack_nibbles,
    quantized_linear,
)
from model import Linear, ModelConfig, RMSNorm, Transformer

ENCODED_ELEMENTS = 1 << 17  # at a time; scratch is some ten times so many fp32 numbers
SHARES_OF_RANGE = (1.0, 0.9, 0.8)  # that int4 tries
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
    def encode_groups(weight: Tensor) -> tuple[Tensor, ...]:
        """Of fp32 groups [N, groups, channels]: codes alike, scales, mins [N, groups, 1]."""
        raise NotImplementedError

    @property
    def weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.shape, self.codes, self.scales, self.mins)

    @property
    def nbytes(self) -> int:
        """Of the weight as stored."""
        return self.weight.nbytes

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        *,
        swiglu: bool = False,
    ) -> Tensor:
        parts = None if norm is None else (norm.weight, norm.eps)
        y = quantized_linear(x, self.weight, parts, residual, swiglu=swiglu)
        return y if self.bias is None else y + self.bias


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
    """Symmetric int8, one fp32 scale per row."""

    groups = (0,)

    @classmethod
    def name_of(cls, group: int) -> str:
        return "int8"

    @staticmethod
    def encode_groups(weight: Tensor) -> tuple[Tensor, ...]:
        scales = weight.abs().amax(-1, keepdim=True) / 127
        return (weight * inverse(scales)).round().clamp(-127, 127), scales


class Int4Linear(QuantizedLinear):
    """Four bits, an fp16 scale and minimum per group, both searched for the least squared error.

    Ranges narrower than the weights' own are tried, each followed by the line through the codes
    that fits best: an outlier clipped costs less than a step too wide for all others.
    """

    groups = (32, 64, 128)

    @classmethod
    def name_of(cls, group: int) -> str:
        return f"int4:{group}"

    @staticmethod
    def encode_groups(weight: Tensor) -> tuple[Tensor, ...]:
        low, high = weight.aminmax(dim=-1, keepdim=True)
        best = rounded(weight, (high - low) / 15, low)
        for share in SHARES_OF_RANGE:
            margin = (high - low) * (1 - share) / 2
            tried = rounded(weight, (high - low) * share / 15, low + margin)
            for fit in (tried, rounded(weight, *line_through(weight, tried.codes))):
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


def rounded(weight: Tensor, scales: Tensor, mins: Tensor) -> Fit:
    """The codes nearest to the weights, for scales and mins as fp16 has them."""
    scales, mins = scales.half().float(), mins.half().float()
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
    """A dense matrix in a scheme, in rows on its device.

    Raises:
        ValueError: it is not finite, or out of the scales' range.
    """
    num_rows, width = weight.shape
    layout = LAYOUTS[scheme.name_of(group)]
    parts = {
        name: torch.empty(shape, dtype=dtype, device=weight.device)
        for name, (dtype, shape) in layout.parts((num_rows, width)).items()
    }
    count = max(1, ENCODED_ELEMENTS // width)
    each = (weight.detach(), *parts.values())
    for block, codes, *around in zip(*(part.split(count) for part in each), strict=True):
        dense = block.float()
        if not dense.abs().amax() <= torch.finfo(layout.scale_dtype).max:
            raise ValueError(f"its values are not finite, or too large for {layout.scale_dtype}")
        values, *rest = scheme.encode_groups(dense.unflatten(1, (-1, group or width)))
        whole = values.flatten(1).to(codes.dtype)
        codes.copy_(whole if layout.bits == 8 else pack_nibbles(whole))
        for part, found in zip(around, rest, strict=False):
            part.copy_(found.squeeze(-1))
    return QuantizedWeight((num_rows, width), **parts)


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
    in_tiles = laid_out_in_tiles(device)
    return {
        name: LAYOUTS[formats[name]].nbytes(shape, in_tiles=in_tiles)
        if name in formats
        else math.prod(shape) * dtype.itemsize
        for name, shape in parameter_shapes(config).items()
    }


def laid_out_in_tiles(device: torch.device) -> bool:
    """Whether the kernels of a device want tiles, seen from a small weight."""
    codes = torch.zeros(1, 32, dtype=torch.int8)
    return QuantizedWeight((1, 32), codes, torch.ones(1, 1)).laid_out_for(device).is_tiled
