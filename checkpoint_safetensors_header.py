"""The header of a safetensors file: a JSON object that says where each tensor lies.

Own code because the library answers with the last of several tensors of one name, and maps the
file. The rules are the library's: tensors lie side by side in the rest of the file, without gaps,
and fill it. Specification: https://github.com/huggingface/safetensors#format.
"""

import math
from pathlib import Path
from typing import Any

import torch

from checkpoint_fields import parse_object
from plain_files import DamagedFile, start_of
from stored_tensor import StoredTensor

MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The places of all tensors, by name; errors as `read_all`."""
    return read_all(file)[0]


def read_all(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The places of all tensors, by name, and the metadata.

    Raises:
        DamagedFile: the header is cut off, or contradicts itself or the size of the file.
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        header_bytes = int.from_bytes(opened.read(8), "little")
        if size < 8:
            raise DamagedFile(f"{size} bytes, too short for a header")
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            cause = f"{start_of(opened)}, not a safetensors file, or its header is cut off"
            raise DamagedFile(f"{cause} at byte {size} of {8 + header_bytes}")
        header = parse_object(opened.read(header_bytes))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedFile("__metadata__ is no table of texts")
    start = 8 + header_bytes
    tensors = {name: stored_tensor(file, name, header[name], start) for name in header}
    check_filled(tensors, start, size)
    return tensors, metadata


def stored_tensor(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """The tensor that one entry of the header describes; its data begins at `start`."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedFile(f"{name} has not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedFile(f"{name} has dtype {dtype!r}, known are {', '.join(DTYPES)}")
    if not (are_sizes(shape) and are_sizes(offsets) and len(offsets) == 2):
        raise DamagedFile(f"{name} has shape {shape!r} at {offsets!r}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        cause = f"shape {shape} in {dtype} takes {needed} bytes, not those {offsets}"
        raise DamagedFile(f"{name} of {cause}")
    return StoredTensor(file, DTYPES[dtype], tuple(shape), start + offsets[0])


def are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def check_filled(tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Refuse gaps, overlaps and a file that is cut off or goes on behind the last tensor."""
    end = start
    for name in sorted(tensors, key=lambda name: (tensors[name].offset, tensors[name].num_bytes)):
        if tensors[name].offset != end:
            raise DamagedFile(f"{name} starts at byte {tensors[name].offset}, not at {end}")
        end += tensors[name].num_bytes
    if end != size:
        raise DamagedFile(f"has {size} bytes, its header says {end}")
