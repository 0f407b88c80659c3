"""The header of a GGUF file: metadata and where each tensor lies.

Own code because gguf.GGUFReader makes several array objects per token of the vocabulary: 2.4 s and
165 MB for 49152 tokens and 48900 merges, against 0.1 s here. Every count, length and offset is
checked against the bytes that are left before anything is made from it. The format's numbers come
from the gguf library. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
SCALAR_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the file; shape in torch's order, offset from the file's start."""

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class HeaderReader:
    """Reads little-endian values one after the other."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def take(self, num_bytes: int) -> bytes:
        left = self.size - self.file.tell()
        if num_bytes > left:
            raise ValueError(f"{num_bytes} bytes of header announced where {left} are left")
        return self.file.read(num_bytes)

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(f"<{code}") * count))

    def number(self, code: str) -> int:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self) -> Any:
        """A typed value: number, bool, string, or a list of one of these."""
        kind = GGUFValueType(self.number("I"))
        if kind != GGUFValueType.ARRAY:
            return self.items(kind, 1)[0]
        item_kind = GGUFValueType(self.number("I"))
        return self.items(item_kind, self.number("Q"))

    def items(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind not in SCALAR_CODES:
            raise ValueError("arrays of arrays are not supported")
        return list(self.scalars(SCALAR_CODES[kind], count))

    def tensor(self) -> tuple[str, Entry]:
        """Name and place of a tensor, its offset still from the start of the tensor data."""
        name = self.string()
        num_dims = self.number("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed(self.scalars("Q", num_dims)))
        tensor_type = GGMLQuantizationType(self.number("I"))
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name} of shape {shape} is no whole number of blocks")
        num_bytes = math.prod(shape) // block_size * block_bytes
        return name, Entry(tensor_type, shape, self.number("Q"), num_bytes)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata as plain Python values, and the place of every tensor.

    Raises:
        ValueError: the header is cut off or contradicts itself, or a tensor ends behind the file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        reader = HeaderReader(file, path.stat().st_size)
        if reader.take(len(MAGIC)) != MAGIC:
            raise ValueError("is not a GGUF file")
        version = reader.number("I")
        if version not in VERSIONS:
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"is a {order} GGUF file, supported are little-endian 2 and 3")
        num_tensors, num_values = reader.scalars("Q", 2)
        values = unique([(reader.string(), reader.value()) for _ in range(num_values)])
        entries = unique([reader.tensor() for _ in range(num_tensors)])
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError("general.alignment is not a number of bytes")
        start = -(-file.tell() // alignment) * alignment
    return values, {name: placed(name, entries[name], start, reader.size) for name in entries}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return table


def placed(name: str, entry: Entry, start: int, size: int) -> Entry:
    """The entry with its offset from the start of the file, which must hold all of it."""
    offset = start + entry.offset
    if offset + entry.num_bytes > size:
        raise ValueError(f"tensor {name} ends at byte {offset + entry.num_bytes} of {size}")
    return Entry(entry.tensor_type, entry.shape, offset, entry.num_bytes)
