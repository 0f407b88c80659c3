"""The matrix product of a layer together with what surrounds it: norm, SwiGLU, residual.

With few rows on the CPU it is one C++ call: in decode each weight is read once, so the product runs
at memory speed, and what is small costs no call of its own. Elsewhere it is plain PyTorch, which
the compiler fuses as it likes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native
from kernels.many_rows import dense_product

MAX_ROWS = 16
"""Rows up to which reading the weights decides; above, the library's blocked products win."""

NAME = "kv_fast::linear"

torch.library.define(
    NAME,
    "(Tensor x, Tensor weight, Tensor? norm, float eps, Tensor? residual, bool swiglu) -> Tensor",
)


def linear(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    *,
    swiglu: bool = False,
) -> Tensor:
    """Residual + act(norm(x) @ weight.T), each part where it is asked for.

    Args:
        x: [..., C].
        weight: [N, C] in x's dtype; with swiglu [2 * N, C], the gates first.
        norm: weight [C] and eps of an RMSNorm of x.
        residual: [..., N].
        swiglu: silu(gate) * up of the product's two halves.

    Returns:
        [..., N] in x's dtype. Sums are fp32; the C++ call keeps what is between them in fp32 too.
    """
    if runs_in_cpp(x, weight):
        return torch.ops.kv_fast.linear(x, weight, *(norm or (None, 0.0)), residual, swiglu)
    y = dense_product(rms_norm(x, *norm) if norm else x, weight)
    return surrounded(y, residual, swiglu=swiglu)


def has_few_rows(x: Tensor) -> bool:
    """Whether x [..., C] has as few rows as the calls take that read a weight once."""
    return x.numel() <= MAX_ROWS * x.shape[-1]


def runs_in_cpp(x: Tensor, weight: Tensor) -> bool:
    """Whether the C++ kernels multiply x with a weight: few rows, on the CPU, without gradients."""
    trains = torch.is_grad_enabled() and weight.requires_grad
    return x.device.type == "cpu" and has_few_rows(x) and not trains and native.is_loaded()


def surrounded(y: Tensor, residual: Tensor | None, *, swiglu: bool) -> Tensor:
    """What comes after a product: SwiGLU of y [..., 2 * N], and the residual [..., N] added."""
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of x [..., C], over its root mean square, times weight [C].

    Source: https://arxiv.org/abs/1910.07467; rounded to x's dtype before the weight, as Llama does.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.to(x.dtype) * weight


@torch.library.register_fake(NAME)
def _(x: Tensor, weight: Tensor, _norm: object, _eps: float, _add: object, swiglu: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if swiglu else 1))
