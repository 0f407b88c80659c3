"""What follows attention in a layer: three products, in one call where that is faster.

    h = x + attended @ o_proj.T
    h + (silu(gate) * up) @ down_proj.T    with gate, up = norm(h) @ gate_up_proj.T

With few rows on the CPU, calls and the waking of threads are a tenth of a small model's time.
"""

import torch
from torch import Tensor

from kernels.linear import linear, runs_in_cpp
from kernels.quantized import TILE_ROWS, QuantizedWeight, quantized_linear

Weight = Tensor | QuantizedWeight

NAME = "kv_fast::block_tail"

torch.library.define(
    NAME,
    "(Tensor attended, Tensor x, Tensor[] o_proj, Tensor norm, float eps, Tensor[] gate_up_proj,"
    " Tensor[] down_proj, int intermediate_size) -> Tensor",
)


def block_tail(
    attended: Tensor,
    x: Tensor,
    o_proj: Weight,
    norm: tuple[Tensor, float],
    gate_up_proj: Weight,
    down_proj: Weight,
) -> Tensor:
    """The output of a layer, the same bits in one call as in three.

    Args:
        attended: [..., Hq * D].
        x: [..., C], the layer's input.
        o_proj, gate_up_proj, down_proj: [C, Hq * D], [2 * I, C] with the gates first, [C, I].
        norm: weight [C] and eps of the RMSNorm before gate_up_proj.

    Returns:
        [..., C] in x's dtype.
    """
    weights, intermediate_size = (o_proj, gate_up_proj, down_proj), gate_up_proj.shape[0] // 2
    if intermediate_size % TILE_ROWS == 0 and all(is_ready(x, weight) for weight in weights):
        o_parts, gate_up_parts, down_parts = map(parts_of, weights)
        around = (norm[0], norm[1], gate_up_parts, down_parts, intermediate_size)
        return torch.ops.kv_fast.block_tail(attended, x, o_parts, *around)
    h = product(attended, o_proj, residual=x)
    return product(product(h, gate_up_proj, norm, swiglu=True), down_proj, residual=h)


def product(
    x: Tensor,
    weight: Weight,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    *,
    swiglu: bool = False,
) -> Tensor:
    """`linear` or `quantized_linear`, as the weight is."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, norm, residual, swiglu=swiglu)
    return linear(x, weight, norm, residual, swiglu=swiglu)


def is_ready(x: Tensor, weight: Weight) -> bool:
    """Whether the C++ kernels multiply as many rows as x has with this weight."""
    is_laid_out = weight.is_tiled if isinstance(weight, QuantizedWeight) else True
    return is_laid_out and runs_in_cpp(x, parts_of(weight)[0])


def parts_of(weight: Weight) -> list[Tensor]:
    """The tensors of a weight."""
    return list(weight.parts) if isinstance(weight, QuantizedWeight) else [weight]


@torch.library.register_fake(NAME)
def _(_attended: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
