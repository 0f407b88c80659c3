"""All layers of a decode step in one call, where C++ kernels run: on the CPU, with few rows.

In a model of 135M parameters and 4 bits a layer takes 80 us; calls, their arguments and the waking
of threads took a third of it when each operation was a call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.product import Weight, is_ready, parts_of
from kernels.quantized import TILE_ROWS

NAME = "kv_fast::decode_layers"

torch.library.define(
    NAME,
    "(Tensor x, Tensor cos, Tensor sin, Tensor start_pos, Tensor[] weights, int[] num_parts,"
    " Tensor[] norms, float eps, Tensor[] qkv_biases, Tensor[] o_biases, Tensor[] head_norms,"
    " Tensor[] k_channels, bool rotates_v,"
    " Tensor(a!)[] k, Tensor(b!)[] v, int num_heads, int intermediate_size) -> Tensor",
)


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """What all layers of a model have, layer after layer; I is intermediate_size.

    Attributes:
        weights: qkv_proj [(Hq + 2 * Hkv) * D, C], o_proj [C, Hq * D], gate_up_proj [2 * I, C] with
            the gates first, down_proj [C, I].
        norms: weights [C] before attention and before the MLP.
        eps: of all norms.
        qkv_biases, o_biases: of these two projections, or none.
        head_norms: weights [D] of the norms of q and of k, or none.
        num_heads: of queries.
    """

    weights: list[Weight]
    norms: list[Tensor]
    eps: float
    qkv_biases: list[Tensor]
    o_biases: list[Tensor]
    head_norms: list[Tensor]
    num_heads: int

    @property
    def intermediate_size(self) -> int:
        return self.weights[2].shape[0] // 2


@dataclass(frozen=True)
class Basis:
    """What is done with K and V of all layers before they are stored.

    Attributes:
        k_channels: scales [Hkv, D] fp32 of each layer's K, see `KVCache.k_channels`; or none.
        rotates_v: V goes through `kv_formats.rotated`.
    """

    k_channels: list[Tensor]
    rotates_v: bool


def runs_in_one_call(x: Tensor, layers: LayerTensors) -> bool:
    """Whether `decode_layers` can answer for as many rows as x has."""
    whole_gates = layers.intermediate_size % TILE_ROWS == 0
    return whole_gates and all(is_ready(x, weight) for weight in layers.weights)


def decode_layers(
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    start_pos: Tensor,
    layers: LayerTensors,
    k: list[Tensor],
    v: list[Tensor],
    basis: Basis,
) -> Tensor:
    """The bits of `model.Block` for each layer in turn, K and V stored on the way.

    With norms of heads the sums of squares are added in another order.

    Args:
        x: [B, T, C], B * T <= 16.
        rope: cos and sin [B, T, D / 2] fp32.
        start_pos: [B] integers; row b's tokens fill slots start_pos[b] + 0 .. T - 1.
        layers: the model.
        k, v: all parts of the layers' caches, layer after layer; mutated.
        basis: in which they are stored.

    Returns:
        [B, T, C] in x's dtype.

    Raises:
        ValueError: tensors that do not fit each other, or a cache without room.
    """
    parts = [parts_of(weight) for weight in layers.weights]
    return torch.ops.kv_fast.decode_layers(
        x,
        *rope,
        start_pos,
        [part for of_one in parts for part in of_one],
        [len(of_one) for of_one in parts],
        layers.norms,
        layers.eps,
        layers.qkv_biases,
        layers.o_biases,
        layers.head_norms,
        basis.k_channels,
        basis.rotates_v,
        k,
        v,
        layers.num_heads,
        layers.intermediate_size,
    )


@torch.library.register_fake(NAME)
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
