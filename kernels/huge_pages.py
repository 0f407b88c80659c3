"""CPU memory in huge pages, for what decoding reads whole with every token: weights and caches.

With 4 KiB pages looking up addresses takes a sixth of the read bandwidth of a core; see LOG.md.
"""

import contextlib
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config import UserError

HUGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with 4 KiB base pages, on AArch64."""

ALIGNMENT = 64
"""Of each tensor: a cache line."""

Empty = Callable[..., Tensor]
"""Called like `torch.empty(sizes, dtype=, device=)`."""


def empty_in_huge_pages(num_bytes: int, num_tensors: int, device: torch.device | str) -> Empty:
    """What allocates up to `num_tensors` tensors of together at most `num_bytes`.

    They lie side by side in one mapping, which asks Linux for huge pages. Each has a storage of its
    own, or torch.compile would take writes to one for writes to all. Not on the CPU of a Linux:
    plain `torch.empty`.

    Raises:
        UserError: the system refuses so much memory.
    """
    if torch.device(device).type != "cpu" or sys.platform != "linux" or not num_bytes:
        return torch.empty
    return _Mapping(num_bytes + num_tensors * ALIGNMENT).empty


class _Mapping:
    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self.memory = mmap.mmap(-1, num_bytes + HUGE, flags=flags)
        except OSError as error:
            needed = f"{num_bytes / 1e9:.2f} GB in one piece for weights or KV cache"
            raise UserError(
                f"{needed}: {error.strerror}; a smaller model or cache needs less"
            ) from None
        with contextlib.suppress(OSError):  # a kernel without them
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = -torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr() % HUGE

    def empty(
        self, sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """A tensor, which keeps the whole mapping alive; its pages come when they are written."""
        count = torch.Size(sizes).numel()
        if not count:
            return torch.empty(sizes, dtype=dtype, device=device)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.used)
        self.used += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        return flat.view(torch.Size(sizes))
