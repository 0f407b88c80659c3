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
        """What is stored per vector."""
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


class Int8(KVFormat):
    """Symmetric int8, one bf16 scale per (token, KV head).

    The scale is rounded up and the vector quantised with the rounded scale: rounding then costs no
    accuracy and no code exceeds 127.
    """

    kl_limits = (0.002, 0.01)

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return Part("codes", head_dim, torch.int8), Part("scale", 1, torch.bfloat16)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        scale = round_up_to_bf16(x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127)
        return (x / scale.float()).round().to(torch.int8), scale

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return (codes.float() * scale.float()).to(dtype)


FORMATS: dict[str, KVFormat] = {
    "bf16": Plain(torch.bfloat16),
    "fp16": Plain(torch.float16),
    "fp32": Plain(torch.float32),
    "int8": Int8(),
}
