"""Products of many rows: what reading the weights costs is shared, and the library multiplies.

On the CPU, weights that the processor cannot multiply as they are stored are made dense block by
block, in a dtype that it can: codes, and bf16 or fp16 where it has no products of them. There the
library takes five to eight times as long with them as with fp32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native

BLOCK_BYTES = 1 << 21
"""Of the scratch in which a block of a weight is made dense: it stays in the processor's caches."""

NAME = "kv_fast::many_rows"

# The parts of a weight of `out_features` rows are itself, or its codes, scales and mins in tiles.
torch.library.define(
    NAME,
    "(Tensor x, Tensor[] weight, int out_features, ScalarType dtype, int block_bytes) -> Tensor",
)


def emulated_dtypes() -> set[torch.dtype]:
    """What this processor cannot multiply as it is stored."""
    halves = {torch.bfloat16, torch.float16}
    if not torch.backends.mkldnn.is_available():
        return halves
    ops = torch.ops.mkldnn
    supported = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return {dtype for dtype in halves if not supported[dtype]}


EMULATED = emulated_dtypes()


def product_dtype(x: Tensor) -> torch.dtype:
    """In which the library is to multiply x with a weight, for a result in x's dtype."""
    return torch.float32 if x.device.type == "cpu" and x.dtype in EMULATED else x.dtype


def dense_product(x: Tensor, weight: Tensor) -> Tensor:
    """[..., C] @ weight.T of a weight [N, C] in x's dtype -> [..., N] in x's dtype."""
    trains = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    if product_dtype(x) == x.dtype or trains or not native.is_loaded():
        return F.linear(x, weight)
    return product_of_parts(x, [weight], weight.shape[0])


def product_of_parts(x: Tensor, parts: Sequence[Tensor], out_features: int) -> Tensor:
    """The same with a weight as the C++ kernels read it: itself, or its parts in tiles.

    Raises:
        ValueError: they are no such weight.
    """
    dtype = product_dtype(x)
    return torch.ops.kv_fast.many_rows(x, parts, out_features, dtype, BLOCK_BYTES)


@torch.library.register_fake(NAME)
def _(x: Tensor, _weight: object, out_features: int, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)
