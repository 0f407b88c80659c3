"""Tensors in huge pages are tensors like any others."""

import gc
import mmap
import sys
import weakref

import pytest
import torch
from conftest import TINY

from config import UserError
from kernels import huge_pages
from kernels.huge_pages import ALIGNMENT, HUGE, empty_in_huge_pages
from kv_cache import bytes_per_token, make_caches

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for huge pages")

PARTS = [((3, 5, 7), torch.int8), ((1,), torch.bfloat16), ((1000, 3), torch.float32)]


def parts_of(empty):
    return [empty(sizes, dtype=dtype, device="cpu") for sizes, dtype in PARTS]


@linux
def test_each_part_is_zero_has_its_shape_and_is_no_view_of_another():
    num_bytes = sum(torch.Size(sizes).numel() * dtype.itemsize for sizes, dtype in PARTS)
    parts = parts_of(empty_in_huge_pages(num_bytes, len(PARTS), "cpu"))
    for part, (sizes, dtype) in zip(parts, PARTS, strict=True):
        assert part.shape == sizes and part.dtype == dtype and not part.any()
        assert part.data_ptr() % ALIGNMENT == 0
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    assert [set(part.flatten().tolist()) for part in parts] == [{1}, {2}, {3}]
    storages = {part.untyped_storage()._cdata for part in parts}
    assert len(storages) == len(PARTS)
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]


@linux
def test_parts_lie_side_by_side_from_the_start_of_a_huge_page():
    parts = parts_of(empty_in_huge_pages(1 << 20, len(PARTS), "cpu"))
    assert parts[0].data_ptr() % HUGE == 0
    assert parts[-1].data_ptr() - parts[0].data_ptr() == 2 * ALIGNMENT + ALIGNMENT


@linux
def test_more_than_was_asked_for_is_an_error_and_not_another_allocation():
    empty = empty_in_huge_pages(4096, 1, "cpu")
    with pytest.raises(ValueError, match="buffer"):
        empty((8192 + HUGE,), dtype=torch.uint8, device="cpu")


@linux
def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError("Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Plain)
    assert not empty_in_huge_pages(4096, 1, "cpu")((64,), dtype=torch.int8, device="cpu").any()


@linux
def test_what_the_system_refuses_is_told_with_its_size():
    with pytest.raises(UserError, match=r"^4611686018\.43 GB in one piece .*: .*; a smaller"):
        empty_in_huge_pages(1 << 62, 1, "cpu")


@linux
def test_memory_is_given_back_with_the_last_part():
    empty = empty_in_huge_pages(4096, 2, "cpu")
    memory = weakref.ref(empty.__self__.memory)
    first, second = (empty((8,), dtype=torch.int8, device="cpu") for _ in range(2))
    del empty, first
    gc.collect()
    assert memory() is not None and not second.any()
    del second
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(("platform", "device"), [("linux", "meta"), ("darwin", "cpu")])
def test_elsewhere_tensors_are_allocated_as_ever(platform, device, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert empty_in_huge_pages(64, 1, device) is torch.empty


@linux
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_all_layers_of_a_cache_share_one_mapping_of_the_promised_size(name):
    caches = make_caches(TINY, (name, name), 2, 384)
    parts = [part for cache in caches for part in cache.buffers()]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    span = max(ends) - min(part.data_ptr() for part in parts)
    promised = 2 * 384 * bytes_per_token(TINY, (name, name))
    assert not any(part.any() for part in parts)
    assert sum(part.nbytes for part in parts) == promised
    assert promised <= span < promised + len(parts) * ALIGNMENT
