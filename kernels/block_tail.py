"""What follows attention in a layer: three products in one call, where that is faster.

    h = x + attended @ o_proj.T
    h + (silu(gate) * up) @ down_proj.T    with gate, up = norm(h) @ gate_up_proj.T

With few rows on the CPU the calls and the waking of threads are a tenth of a small model's time.
"""

import torch
from torch import Tensor

NAME = "kv_fast::block_tail"

torch.library.define(
    NAME,
    "(Tensor attended, Tensor x, Tensor[] o_proj, Tensor norm, float eps, Tensor[] gate_up_proj,"
    " Tensor[] down_proj, int intermediate_size) -> Tensor",
)


def block_tail(
    attended: Tensor,
    x: Tensor,
    o_proj: list[Tensor],
    norm: tuple[Tensor, float],
    gate_up_proj: list[Tensor],
    down_proj: list[Tensor],
    intermediate_size: int,
) -> Tensor:
    """The output of a layer, by the C++ kernels; rounded between the products as three calls do.

    Args:
        attended: [..., Hq * D], at most 16 rows.
        x: [..., C], the layer's input.
        o_proj, gate_up_proj, down_proj: parts of a weight: [weight], or those of a QuantizedWeight
            in tiles.
        norm: weight [C] and eps of the RMSNorm before gate_up_proj.
        intermediate_size: of the gates.

    Returns:
        [..., C] in x's dtype.
    """
    return torch.ops.kv_fast.block_tail(
        attended, x, o_proj, *norm, gate_up_proj, down_proj, intermediate_size
    )


@torch.library.register_fake(NAME)
def _(_attended: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
