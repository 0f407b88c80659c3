"""Quantised weights made from chosen codes, with the dense fp64 matrix they stand for."""

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight, pack_nibbles

SHAPES = [(16, 64, 32), (20, 40, 40), (33, 256, 128), (96, 128, 64), (64, 576, 576), (5, 96, 32)]
"""Of tests: (N, C, group); one group per row is int8's own."""

KINDS = [(8, False), (8, True), (4, False), (4, True)]
"""(bits, with mins)."""

ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Errors of results of about 1, where dense weights are rounded to the dtype as x and y are."""


def seeded_weight(
    shape: tuple[int, int], group: int, bits: int, with_mins: bool
) -> tuple[QuantizedWeight, Tensor]:
    """A random weight in rows, of entries about 1 / sqrt(C), and its value [N, C] in fp64."""
    generator = torch.Generator().manual_seed(5)
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, shape, generator=generator)
    codes = values.to(torch.int8) if bits == 8 else pack_nibbles((values + limit).to(torch.uint8))
    if bits == 4 and with_mins:
        values += limit  # their nibbles are values as they are
    dtype = torch.float32 if group == shape[1] else torch.float16
    groups = (shape[0], shape[1] // group)
    step = 2 / limit / shape[1] ** 0.5
    scales = (step * (0.5 + torch.rand(groups, generator=generator))).to(dtype)
    mins = (-limit * step * torch.rand(groups, generator=generator)).to(dtype)
    parts = (scales, mins) if with_mins else (scales,)
    each = [part.double().repeat_interleave(group, dim=1) for part in parts]
    dense = values * each[0] + (each[1] if with_mins else 0)
    return QuantizedWeight(shape, codes, *parts), dense
