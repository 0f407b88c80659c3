"""The header of a GGUF file: metadata and where each tensor lies.

Own code because gguf.GGUFReader makes several array objects per token of the vocabulary: 2.4 s and
165 MB for 49152 tokens and 48900 merges, against 0.1 s here. Every count, length and offset is
checked against the bytes that are left before anything is made from it. The format's numbers come
from the gguf library. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from plain_files import DamagedFile, start_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ITEMS = 1 << 22  # of an array; vocabularies have up to a sixteenth of it
MAX_STRING_BYTES = 64 << 20
ALIGNMENT = "general.alignment"
MAX_ALIGNMENT = 1 << 16  # the largest pages of a CPU
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
    """Where one tensor lies; shape in torch's order, offset from the start of its file."""

    file: Path
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class HeaderReader:
    """Reads little-endian values one after the other."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = path.stat().st_size

    def take(self, num_bytes: int) -> bytes:
        position = self.file.tell()
        if num_bytes > self.size - position:
            cause = f"{num_bytes} bytes announced at byte {position} of {self.size}"
            raise DamagedFile(f"its header is cut off: {cause}")
        return self.file.read(num_bytes)

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(f"<{code}") * count))

    def number(self, code: str) -> int:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        position = self.file.tell()
        num_bytes = self.number("Q")
        if num_bytes > MAX_STRING_BYTES:
            raise DamagedFile(f"a text of {num_bytes} bytes at byte {position}")
        try:
            return self.take(num_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedFile(f"a text at byte {position} is not UTF-8") from error

    def value(self) -> Any:
        """A typed value: number, bool, string, or a list of one of these."""
        kind = self.kind()
        if kind != GGUFValueType.ARRAY:
            return self.items(kind, 1)[0]
        item_kind, count = self.kind(), self.number("Q")
        if count > MAX_ITEMS:
            raise DamagedFile(f"an array of {count} items before byte {self.file.tell()}")
        return self.items(item_kind, count)

    def kind(self) -> GGUFValueType:
        number = self.number("I")
        if number not in list(GGUFValueType):
            raise DamagedFile(f"unknown type {number} of a value before byte {self.file.tell()}")
        return GGUFValueType(number)

    def items(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if kind not in SCALAR_CODES:
            raise DamagedFile("arrays of arrays are not supported")
        return list(self.scalars(SCALAR_CODES[kind], count))

    def tensor(self) -> tuple[str, Entry]:
        """Name and place of a tensor, its offset still from the start of the tensor data."""
        name = self.string()
        num_dims = self.number("I")
        if num_dims > MAX_DIMS:
            raise DamagedFile(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed(self.scalars("Q", num_dims)))
        number = self.number("I")
        if number not in list(GGMLQuantizationType):
            raise DamagedFile(f"tensor {name} has the unknown type {number}")
        tensor_type = GGMLQuantizationType(number)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if not shape or 0 in shape or shape[-1] % block_size:
            cause = f"of shape {shape} is no whole number of blocks of {block_size}"
            raise DamagedFile(f"tensor {name} {cause}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        return name, Entry(self.path, tensor_type, shape, self.number("Q"), num_bytes)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata as plain Python values, and the place of every tensor.

    Raises:
        DamagedFile: the header is cut off or contradicts itself or the file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        reader = HeaderReader(file, path)
        if reader.size < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
            raise DamagedFile(f"{start_of(file)}, not a GGUF file")
        version = reader.number("I")
        if version not in VERSIONS:
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise DamagedFile(f"is a {order} GGUF file, supported are little-endian 2 and 3")
        num_tensors, num_values = reader.scalars("Q", 2)
        values = unique((reader.string(), reader.value()) for _ in range(num_values))
        entries = unique(reader.tensor() for _ in range(num_tensors))
        alignment = values.get(ALIGNMENT, 32)
        if type(alignment) is not int or not is_alignment(alignment):
            raise DamagedFile(f"{ALIGNMENT} is {alignment!r}, a power of two is needed")
        start = -(-file.tell() // alignment) * alignment
    check_offsets(entries, alignment)
    return values, {name: placed(name, entries[name], start, reader.size) for name in entries}


def is_alignment(number: int) -> bool:
    return 0 < number <= MAX_ALIGNMENT and number.bit_count() == 1


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise DamagedFile(f"{name} occurs twice in the header")
        table[name] = value
    return table


def check_offsets(entries: dict[str, Entry], alignment: int) -> None:
    """Refuse tensors that share bytes or do not start where the format lets them."""
    end, previous = 0, ""
    for name in sorted(entries, key=lambda name: entries[name].offset):
        entry = entries[name]
        if entry.offset % alignment:
            cause = f"byte {entry.offset} of the data, which is no multiple of {alignment}"
            raise DamagedFile(f"tensor {name} starts at {cause}")
        if entry.offset < end:
            raise DamagedFile(f"tensors {previous} and {name} overlap")
        end, previous = entry.offset + entry.num_bytes, name


def placed(name: str, entry: Entry, start: int, size: int) -> Entry:
    """The entry with its offset from the start of the file, which must hold all of it."""
    offset = start + entry.offset
    if offset + entry.num_bytes > size:
        raise DamagedFile(f"tensor {name} ends at byte {offset + entry.num_bytes} of {size}")
    return replace(entry, offset=offset)
