"""A synthetic fill stores what a prefill could have stored, and nothing else."""

import dataclasses

import pytest
import torch
from attention_case import as_rows, use_reference, use_tiles
from conftest import TINY

from kv_cache import fill_synthetic_, make_caches
from kv_formats import FORMATS


@pytest.mark.parametrize("layout", [use_reference, use_tiles])
@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_a_synthetic_fill_stores_normal_vectors_below_the_depth_and_nothing_behind(
    k_format, v_format, layout, monkeypatch
):
    layout(monkeypatch)
    monkeypatch.setattr("kv_cache.PREFILL_BLOCK", 30)
    config = dataclasses.replace(TINY, num_layers=2)
    caches, again = (make_caches(config, (k_format, v_format), 1, 256) for _ in range(2))
    fill_synthetic_(caches, 200)
    fill_synthetic_(again, 200)
    vectors = []
    for cache in caches:
        for parts, name in ((cache.k_parts, k_format), (cache.v_parts, v_format)):
            vectors.append(FORMATS[name].decode(tuple(map(as_rows, parts)), torch.float32))
    for filled in vectors:
        assert bool((filled[:, :, 200:] == 0).all())
        assert filled[:, :, :200].std() == pytest.approx(1, abs=0.03)
        assert filled[:, :, :200].mean() == pytest.approx(0, abs=0.05)
    assert len({filled.sum().item() for filled in vectors}) == 4  # layers and sides differ
    for one, other in zip(caches.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other)
