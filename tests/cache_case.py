"""Random caches, and fp64 attention over what they hold."""

import math

import pytest
import torch
from attention_case import overwrite_

from kernels import native, ops
from kv_cache import KVCache
from kv_formats import FORMATS

INSTRUCTION_SETS = native.load_all()

reads_fours_here = pytest.mark.skipif(
    not (INSTRUCTION_SETS and native.reads_fours()), reason="the best kernels here read no fours"
)


def tolerance(implementation, name):
    """Absolute error allowed for vectors of unit variance.

    fp32 sums: a few roundings of 2^-24. Two digits: queries are rounded to 1 / (2 * 127 * 254) of
    their largest channel, about 4 here, weights to 1 / (2 * 255 * 255) of the tile's largest; the
    score's error of 64 channels is then about 4 / 64516 * sqrt(64 / 3) * sm_scale = 4e-5, of which
    a few hundred results see four standard deviations. Shorts carry queries as well, weights to
    1 / (2 * 32767): where one slot of a tile has nearly all the weight, 63 others are off by up to
    that, times a code of up to 127 and a scale of 3 / 127, whose sum has a deviation of
    3 / 65534 / sqrt(3) * sqrt(63 / 3) = 1e-4 and is seen to be three times that. Codes of int4 are
    multiplied less 8, so that they too are about as large as the vectors.
    """
    by_integers = {"avx512vnni": 2e-4, "avx2": 4e-4}
    return by_integers.get(implementation, 1e-5) if name in ("int8", "int4") else 1e-5


def oracle(q, k, v, lengths):
    """fp64 attention of q [B, Hq, T, D] over k, v [B, Hkv, S, D], row b's query t over lengths."""
    group = q.shape[1] // k.shape[1]
    out, lse = [], []
    for b in range(q.shape[0]):
        k_row, v_row = (x[b].double().repeat_interleave(group, 0) for x in (k, v))
        scores = q[b].double() @ k_row.mT / math.sqrt(q.shape[-1])  # [Hq, T, S]
        slots = torch.arange(k.shape[2])
        scores = scores.masked_fill(slots >= lengths[b][:, None], -torch.inf)
        weights = torch.softmax(scores, -1)
        weights = weights.nan_to_num(0)  # a query without any slot
        out.append(weights @ v_row)
        lse.append(torch.logsumexp(scores, -1))
    return torch.stack(out), torch.stack(lse)


def filled_cache(k_format, v_format, shape, seed=0):
    """A cache of random vectors in all slots, and what they decode to in fp32."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(k_format, v_format, shape)
    decoded = []
    for parts, name in ((cache.k_parts, k_format), (cache.v_parts, v_format)):
        encoded = FORMATS[name].encode(torch.randn(shape, generator=generator))
        for part, new in zip(parts, encoded, strict=True):
            overwrite_(part, new)
        decoded.append(FORMATS[name].decode(encoded, torch.float32))
    return cache, *decoded


def stored_attention(cache, q, start_pos):
    sm_scale = 1 / math.sqrt(q.shape[-1])
    return ops.stored_attention(
        q, cache.k_parts, cache.v_parts, start_pos, cache.k_format, cache.v_format, sm_scale
    )
