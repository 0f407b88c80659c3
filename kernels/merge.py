"""The one merge of partial attention results, by log-sum-exp."""

import torch
from torch import Tensor


def merge_partials(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        a, b: (out [..., D], lse [...]): softmax-weighted values and the natural log of the sum of
            exp(scores). An empty set has lse = -inf and any `out`, NaN included.

    Returns:
        (out, lse) of the union, fp32; empty where both are.

    Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
    """
    (a_out, a_lse), (b_out, b_lse) = a, b
    lse = torch.logaddexp(a_lse.float(), b_lse.float())
    # Both empty: exp(-inf - 0) = 0 keeps the weights at zero where exp(-inf + inf) would be NaN.
    base = torch.where(lse == -torch.inf, 0.0, lse)
    return _weighted(a_out, a_lse, base) + _weighted(b_out, b_lse, base), lse


def _weighted(out: Tensor, lse: Tensor, base: Tensor) -> Tensor:
    weight = torch.exp(lse.float() - base).unsqueeze(-1)
    # Select, do not scale: 0 * NaN is NaN. A weight of NaN is no empty set and stays.
    return torch.where(weight == 0, 0.0, out.float() * weight)
