"""Where a tensor lies in a file, and how it is read into memory of its own.

Files are read, not mapped: where a mapped file is cut by somebody else, the process dies of a
signal that Python cannot catch, and pages of a mapping stay resident until it is closed.
"""

import math
import mmap
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from config import UserError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DamagedFile(ValueError):
    """What is wrong with a file, for the line that names it."""


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

    def read(self) -> Tensor:
        """The tensor, in memory that goes back to the system with it.

        Raises:
            OSError: it cannot be read, or the file changed since its header was.
        """
        flat = short_lived_tensor((self.span_bytes // self.dtype.itemsize,), self.dtype)
        with self.file.open("rb") as opened:
            opened.seek(self.offset)
            read_into(opened, flat)
        return flat.as_strided(self.shape, self.strides) if self.strides else flat.view(self.shape)


def read_into(opened: BinaryIO, tensor: Tensor) -> None:
    """Fill a contiguous tensor in CPU memory from the file's position."""
    data = tensor.view(-1).view(torch.uint8).numpy()
    if opened.readinto(data.data) != data.nbytes:  # type: ignore[attr-defined]
        raise OSError(f"{opened.name}: ends inside a tensor; it changed since it was opened")


def short_lived_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of its own, which goes back to the system with the tensor.

    malloc keeps what is freed between tensors that stay, which costs 40 % of a small model.
    """
    memory = mmap.mmap(-1, max(1, dtype.itemsize * math.prod(shape)))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def start_of(opened: BinaryIO) -> str:
    """What a file that is of another kind than its name says begins with."""
    opened.seek(0)
    data = opened.read(8)
    return f"starts with {data!r}" if data else "is empty"


def check_regular(files: Iterable[Path]) -> None:
    """Refuse what is no regular file: opening a pipe waits for ever, a device may be endless."""
    for file in files:
        if file.exists() and not stat.S_ISREG(file.stat().st_mode):
            raise UserError(f"{file}: is no regular file; give the path of a copy in a folder")
