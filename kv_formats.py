"""How one key or value vector is stored: a class and a table entry per format.

A format declares its parts (what is allocated, counted and sliced) and gives `encode` and `decode`
in plain PyTorch: the prefill path, the reference of every kernel and the oracle of the tests are
this one definition. Slots are encoded one by one, so the order and the chunks in which they were
written never change what is stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """One stored tensor of a format: [B, Hkv, S, width]."""

    name: str
    width: int
    dtype: torch.dtype


class KVFormat:
    """Storage of vectors [..., D] as one or more parts [..., width]. Stateless.

    Attributes:
        kl_limits: mean KL, nats per token in fp32 arithmetic against vectors as they are, that is
            fine, and that shows a fault; None: the format changes nothing.
    """

    kl_limits: tuple[float, float] | None = None

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        """What is stored per vector: its data first, then what scales them."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] -> each part [..., width]."""
        raise NotImplementedError

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Parts [..., width] -> the vectors [..., D] that they stand for, in dtype."""
        raise NotImplementedError

    def bytes_per_vector(self, head_dim: int) -> int:
        return sum(part.width * part.dtype.itemsize for part in self.parts(head_dim))


class Plain(KVFormat):
    """The vectors themselves, in a floating dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return (Part("values", head_dim, self.dtype),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


def round_up_to_bf16(x: Tensor) -> Tensor:
    """The smallest bf16 values >= x, for x >= 0: bf16 is the upper half of fp32's bits.

    NaN stays: its bits may all be set, in compiled code they often are, and would wrap to zero.
    """
    x = x.float()
    bits = (x.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)


def round_down_to_bf16(x: Tensor) -> Tensor:
    """The largest bf16 values <= x; NaN stays."""
    magnitude = x.float().abs()
    towards_zero = (magnitude.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    return torch.where(x >= 0, towards_zero, -round_up_to_bf16(magnitude))


def scale_of(extent: Tensor, levels: int) -> Tensor:
    """The bf16 scale of codes 0 .. levels that reach `extent` >= 0; never 0.

    It is rounded up and the vector quantised with the rounded scale: rounding then costs no
    accuracy and no code exceeds `levels`.
    """
    return round_up_to_bf16(extent.clamp(min=1e-8) / levels)


class Symmetric(KVFormat):
    """Codes of either sign, always finite, with one bf16 scale per (token, KV head)."""

    def __init__(self, dtype: torch.dtype, largest: int, kl_limits: tuple[float, float]) -> None:
        self.dtype, self.largest, self.kl_limits = dtype, largest, kl_limits

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return Part("codes", head_dim, self.dtype), Part("scale", 1, torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        scale = scale_of(x.abs().amax(-1, keepdim=True), self.largest)
        codes = x / scale.float()
        codes = codes.nan_to_num(0.0) if self.dtype.is_floating_point else codes.round()
        return codes.to(self.dtype), scale

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return (codes.float() * scale.float()).to(dtype)


class Int4(KVFormat):
    """Codes 0 .. 15 upwards from the vector's minimum, two a byte, even channels in the low halves.

    One bf16 scale and one bf16 minimum, `zero`, per (token, KV head). The minimum is rounded down
    before the scale is chosen, so that rounding makes the steps wider by 1 % at most where
    channels have both signs, and no code leaves 0 .. 15.
    """

    kl_limits = (0.05, 0.2)

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        if head_dim % 2:
            raise ValueError(f"int4 packs pairs of channels: head_dim {head_dim} is odd")
        codes = Part("codes", head_dim // 2, torch.uint8)
        return codes, Part("scale", 1, torch.bfloat16), Part("zero", 1, torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        zero = round_down_to_bf16(x.amin(-1, keepdim=True))
        above = x - zero.float()
        scale = scale_of(above.amax(-1, keepdim=True), 15)
        codes = (above / scale.float()).round().to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4, scale, zero

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        packed, scale, zero = parts
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        return (codes.float() * scale.float() + zero.float()).to(dtype)


FORMATS: dict[str, KVFormat] = {
    "bf16": Plain(torch.bfloat16),
    "fp16": Plain(torch.float16),
    "fp32": Plain(torch.float32),
    "int8": Symmetric(torch.int8, 127, kl_limits=(0.002, 0.01)),
    "fp8": Symmetric(torch.float8_e4m3fn, 448, kl_limits=(0.01, 0.05)),
    "int4": Int4(),
}

PER_CHANNEL, ROTATED = "-channel", "-rotated"
"""Behind the name of a quantised format, the first of K: `channel_scales` come first, the second of
V: `rotated` does."""

LOSSY = tuple(name for name in FORMATS if FORMATS[name].kl_limits)
K_FORMATS = (*FORMATS, *(name + PER_CHANNEL for name in LOSSY))
V_FORMATS = (*FORMATS, *(name + ROTATED for name in LOSSY))


def base_name(name: str) -> str:
    """The name in FORMATS of how a format of K or V stores a vector."""
    return name.removesuffix(PER_CHANNEL).removesuffix(ROTATED)


def format_of(name: str) -> KVFormat:
    """How a format of K or V, by a name in K_FORMATS or V_FORMATS, stores a vector."""
    return FORMATS[base_name(name)]


def rotated(x: Tensor) -> Tensor:
    """Vectors [..., D] times a Hadamard matrix over sqrt(n): each channel becomes a mix of n.

    What is large in one channel is then spread over all, and a vector's one scale suits them
    better. The rotation is its own inverse. n is the largest power of two that divides D.

    Returns:
        [..., D] fp32, in a fixed order of additions: the C++ kernels store the same bits.
    """
    x, width = x.float(), x.shape[-1]
    size, step = width & -width, 1
    while step < size:
        pairs = x.unflatten(-1, (-1, 2, step))
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return x * size**-0.5


MAX_EXPONENT = 8
"""Of channel scales: 256 times as large as the usual channel, and fp16 is not left."""


def channel_scales(k: Tensor) -> Tensor:
    """What divides the channels of the keys, and multiplies those of the queries, of each KV head.

    Some channels of K are always large. Of a vector they set the one scale, which leaves the others
    few codes. Divided by how large its channels get, a vector is even.

    Args:
        k: [B, Hkv, T, D], the first keys of a prompt.

    Returns:
        [Hkv, D] fp32, powers of two: dividing and multiplying by them is exact in every floating
        dtype, so q . k stays what it was where K is not rounded.
    """
    largest = k.float().abs().amax((0, 2)).clamp(min=1e-8)
    exponents = largest.log2()
    exponents = (exponents - exponents.mean(-1, keepdim=True)).round()
    scales = exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2()
    return torch.where(scales.isfinite(), scales, 1)
