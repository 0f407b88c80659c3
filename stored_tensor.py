"""Where a tensor lies in a file, and how it is read into memory of its own.

Files are read, not mapped: where a mapped file is cut by somebody else, the process dies of a
signal that Python cannot catch, and pages of a mapping stay resident until it is closed.
"""

import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 22  # read at a time by each reader
READERS = 4  # threads: while one waits for the disk, others get memory and copy; see LOG.md
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class StoredTensor:
    """A dense tensor in a file.

    Attributes:
        offset: of its first element, in bytes from the start of the file.
        strides: in elements; None: contiguous.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Of its elements, without gaps that strides leave between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """From the start of the first element to the end of the last."""
        if self.strides is None or not self.num_bytes:
            return self.num_bytes
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of their indices, without gaps."""
        if self.strides is None:
            return True
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def read_into(self, out: Tensor) -> None:
        """Fill `out`, a tensor of the same shape, of any dtype and on any device.

        Raises:
            OSError: it cannot be read, or the file changed since its header was.
        """
        if not (self.is_contiguous and out.is_contiguous()):
            out.copy_(self.read())
            return
        if out.dtype == self.dtype and out.device.type == "cpu":
            fill_in_parallel(self.file, self.offset, out)
            return
        size = READERS * BLOCK_BYTES // self.dtype.itemsize
        buffer = short_lived_tensor((size,), self.dtype)
        offset = self.offset
        for part in out.view(-1).split(size):
            read = buffer[: len(part)]
            fill_in_parallel(self.file, offset, read)
            part.copy_(read)
            offset += read.nbytes

    def read(self) -> Tensor:
        """The tensor, in memory that goes back to the system with it; errors as `read_into`."""
        flat = short_lived_tensor((self.span_bytes // self.dtype.itemsize,), self.dtype)
        fill_in_parallel(self.file, self.offset, flat)
        return flat.as_strided(self.shape, self.strides) if self.strides else flat.view(self.shape)


@contextmanager
def opened_at(file: Path, offset: int, num_bytes: int) -> Iterator[BinaryIO]:
    """A file at the position of a tensor, all of which the disk is told to fetch.

    Beside other programs that took a third off a cold load; on a quiet machine it changes nothing.
    """
    with file.open("rb") as opened:
        opened.seek(offset)
        if sys.platform == "linux":
            os.posix_fadvise(opened.fileno(), offset, num_bytes, os.POSIX_FADV_WILLNEED)
        yield opened


def fill_in_parallel(file: Path, offset: int, tensor: Tensor) -> None:
    """Read a contiguous tensor in CPU memory, several blocks of it at a time.

    One reader is slower than the disk: the first touch of each page of its memory, the page cache
    and the copy between them keep a core busy while the disk waits.
    """
    data = tensor.view(-1).view(torch.uint8)

    def read(start: int) -> None:
        block = data[start : start + BLOCK_BYTES]
        with opened_at(file, offset + start, len(block)) as opened:
            fill(opened, block)

    if len(data) <= BLOCK_BYTES:  # most tensors are: threads take longer to start than to read
        read(0)
        return
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(read, range(0, len(data), BLOCK_BYTES)):
            pass  # an error of a reader is raised here


def fill(opened: BinaryIO, tensor: Tensor) -> None:
    """Read a contiguous tensor in CPU memory from the file's position on."""
    data = tensor.view(-1).view(torch.uint8).numpy()
    if opened.readinto(data.data) != data.nbytes:  # type: ignore[attr-defined]
        raise OSError(f"{opened.name}: ends inside a tensor; it changed since it was opened")


def short_lived_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of its own, which goes back to the system with the tensor.

    malloc keeps what is freed between tensors that stay, which costs 40 % of a small model.
    """
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, dtype.itemsize * math.prod(shape))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def short_lived(sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Called like `torch.empty`: on the CPU as `short_lived_tensor`."""
    if torch.device(device).type == "cpu":
        return short_lived_tensor(tuple(sizes), dtype)
    return torch.empty(sizes, dtype=dtype, device=device)
