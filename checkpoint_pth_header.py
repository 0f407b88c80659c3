"""What a file of torch.save holds: the place of every tensor. No code out of it ever runs.

Such a file is a zip archive of stored (not compressed) records: `NAME/data.pkl` is a pickle of the
table of tensors, `NAME/data/KEY` are the bytes of a storage, of which a tensor is a strided view.
The pickle is walked here by a machine that knows no more than such a table needs: globals are
names on its stack, and the three that may be called are functions of this file. Opcodes and their
arguments: the standard library's pickletools. The table: torch/_utils.py, torch/serialization.py.
"""

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from plain_files import DamagedFile, start_of
from stored_tensor import StoredTensor

RESAVE = "re-save its tensors as safetensors in the Hugging Face layout"
"""The cure for a file that cannot be read here."""

ZIP_MAGIC = b"PK\x03\x04"
LOCAL_HEADER_BYTES = 30
MAX_PICKLE_BYTES = 100_000_000
MAX_DIMS = 8
STORAGE_DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch DoubleStorage": torch.float64,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Record:
    """The bytes of one record of the archive."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Storage:
    """Memory that tensors are views of: the record `key`."""

    dtype: torch.dtype
    key: str
    num_elements: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a .pth or .bin file, by name; kilobytes are read.

    Raises:
        DamagedFile: anything else than a table of dense tensors, or one that the file cannot hold.
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        if opened.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
            raise DamagedFile(f"{start_of(opened)}, not a zip file of torch.save")
        records = find_records(opened)
        root = archive_root(records)
        if read_record(opened, records.get(f"{root}/byteorder"), b"little") != b"little":
            raise DamagedFile("its numbers are not little-endian")
        data = read_record(opened, records[f"{root}/data.pkl"])
    storages = {
        name.removeprefix(f"{root}/data/"): record
        for name, record in records.items()
        if name.startswith(f"{root}/data/")
    }
    return named_tensors(Machine(file, storages).run(data))


def find_records(opened: BinaryIO) -> dict[str, Record]:
    """The directory of the archive. Whatever zipfile makes of a damaged one is damage."""
    try:
        with zipfile.ZipFile(opened) as archive:
            infos = archive.infolist()
    except OSError:
        raise
    except Exception as error:
        raise DamagedFile(f"its zip directory is damaged ({error})") from error
    size = opened.seek(0, 2)
    records = {info.filename: locate(opened, info, size) for info in infos}
    if len(records) != len(infos):
        raise DamagedFile("a record occurs twice in its zip directory")
    return records


def locate(opened: BinaryIO, info: zipfile.ZipInfo, size: int) -> Record:
    """Where a record's bytes lie: behind a header of its own, whose length varies."""
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if not is_plain or info.compress_size != info.file_size:
        raise DamagedFile(f"record {info.filename} is compressed or encrypted")
    opened.seek(max(0, info.header_offset))
    header = opened.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(ZIP_MAGIC):
        raise DamagedFile(f"record {info.filename} is not where the zip directory says")
    name_bytes, extra_bytes = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    offset = info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if offset + info.file_size > size:
        raise DamagedFile(f"record {info.filename} ends at {offset + info.file_size} of {size}")
    return Record(offset, info.file_size)


def archive_root(records: dict[str, Record]) -> str:
    roots = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise DamagedFile(f"has {len(roots)} records data.pkl, a file of torch.save has one")
    return roots[0]


def read_record(opened: BinaryIO, record: Record | None, default: bytes = b"") -> bytes:
    if record is None:
        return default
    if record.num_bytes > MAX_PICKLE_BYTES:
        raise DamagedFile(f"its table of tensors has {record.num_bytes} bytes")
    opened.seek(record.offset)
    return opened.read(record.num_bytes)


def named_tensors(table: object) -> dict[str, StoredTensor]:
    if not isinstance(table, dict):
        raise DamagedFile("is not a table of tensors")
    for name, tensor in table.items():
        if not isinstance(tensor, StoredTensor):
            raise DamagedFile(f"{name} is no tensor")
    return table


class Machine:
    """Runs the pickle of one file: a stack, and a memo of values to use again."""

    def __init__(self, file: Path, records: dict[str, Record]) -> None:
        self.file = file
        self.records = records
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                OPERATIONS.get(opcode.name, refuse_opcode(opcode.name))(self, argument)
            (result,) = self.stack
        except DamagedFile:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise DamagedFile(f"its pickle is damaged ({error})") from error
        return result

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        """The topmost values, which must lie above the last mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError("stack is empty")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_to_mark(self) -> list[Any]:
        values = self.stack[self.marks[-1] :]
        del self.stack[self.marks.pop() :]
        return values

    def push_global(self, name: str) -> None:
        if name not in CALLABLE and name not in STORAGE_DTYPES:
            raise DamagedFile(f'refuses "{name.replace(" ", ".")}", which is more than a tensor')
        self.push(Global(name))

    def push_storage(self) -> None:
        """('storage', type, key, device, number of elements) becomes a Storage."""
        tag, kind, key, _, num_elements = self.pop(1)[0]
        if tag != "storage" or not isinstance(kind, Global) or not isinstance(key, str):
            raise TypeError("no storage")
        self.push(Storage(STORAGE_DTYPES[kind], key, whole(num_elements)))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise TypeError("no call of a function")
        self.push(CALLABLE[function](self, *arguments))

    def set_items(self, pairs: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict or len(pairs) % 2:
            raise TypeError("no pairs for a table")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str):
                raise TypeError("a name is no text")
            if name in table:
                raise DamagedFile(f"tensor {name} occurs twice")
            table[name] = value

    def drop_attributes(self) -> None:
        """State of the value below: a table has some about its modules, nothing else has any."""
        self.pop(1)
        if type(self.stack[-1]) is not dict:
            raise TypeError("no table")

    def tensor(
        self, storage: Any, start: Any, shape: Any, strides: Any, *_: object
    ) -> StoredTensor:
        """What torch._utils._rebuild_tensor_v2 makes, if the storage is whole and has room."""
        if not isinstance(storage, Storage) or not len(shape) == len(strides) <= MAX_DIMS:
            raise TypeError("no tensor")
        record, width = self.records[storage.key], storage.dtype.itemsize
        needed = storage.num_elements * width
        if record.num_bytes != needed:
            raise DamagedFile(f"record {storage.key} has {record.num_bytes} bytes of {needed}")
        shape, strides = tuple(map(whole, shape)), tuple(map(whole, strides))
        offset = record.offset + whole(start) * width
        tensor = StoredTensor(self.file, storage.dtype, shape, offset, strides)
        end = whole(start) * width + tensor.span_bytes
        if tensor.num_bytes > tensor.span_bytes or end > needed:
            raise DamagedFile(f"a tensor of shape {shape} is no dense part of its storage")
        return tensor

    def parameter(self, tensor: Any, *_: object) -> StoredTensor:
        if not isinstance(tensor, StoredTensor):
            raise TypeError("no parameter")
        return tensor

    def table(self, *pairs: object) -> dict[str, Any]:
        if pairs:
            raise TypeError("no empty table")
        return {}


class Global(str):
    """The name of a global, as pickletools gives it: module and name with a blank between."""

    __slots__ = ()


def whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("no size")
    return value


def refuse_opcode(name: str) -> Callable[[Machine, Any], NoReturn]:
    def refuse(machine: Machine, argument: Any) -> NoReturn:
        raise DamagedFile(f"its pickle has {name}, which no table of tensors needs")

    return refuse


CALLABLE: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": Machine.tensor,
    "torch._utils _rebuild_parameter": Machine.parameter,
    "collections OrderedDict": Machine.table,
}
OPERATIONS: dict[str, Callable[[Machine, Any], object]] = {
    "PROTO": lambda machine, version: None,
    "STOP": lambda machine, _: None,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "GLOBAL": Machine.push_global,
    "BINPERSID": lambda machine, _: machine.push_storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.drop_attributes(),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.stack[-2].append(machine.pop(1)[0]),
    "APPENDS": lambda machine, _: machine.stack[machine.marks[-1] - 1].extend(
        machine.pop_to_mark()
    ),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, i: m.memo.update({i: m.stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, i: m.push(m.memo[i])),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"),
        Machine.push,
    ),
}
