"""The matrix product of a layer with a weight of either kind: dense, or of codes."""

from torch import Tensor

from kernels.linear import linear, runs_in_cpp
from kernels.quantized import QuantizedWeight, quantized_linear

Weight = Tensor | QuantizedWeight


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
