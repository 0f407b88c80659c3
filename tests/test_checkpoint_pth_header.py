"""Files of torch.save: what torch reads of them, and that nothing else than tensors passes."""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_pth_header import read_header
from plain_files import DamagedFile


def saved(tmp_path: Path, table: object) -> Path:
    torch.save(table, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def refused(file: Path) -> str:
    with pytest.raises(DamagedFile) as caught:
        read_header(file)
    return str(caught.value)


def rewritten(file: Path, change: Callable[[str, bytes], bytes], kind: int = 0) -> Path:
    """The archive again with every record's bytes changed."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))
    return file


def with_pickle(file: Path, pickled: bytes) -> Path:
    return rewritten(file, lambda name, data: pickled if name.endswith("data.pkl") else data)


BASE = torch.randn(6, 10)
TABLES = {
    "plain": {"a": torch.ones(3), "b": torch.randn(2, 3).half(), "c": torch.zeros(2).bfloat16()},
    "views": {"a": BASE, "b": BASE[2:4], "c": BASE[1:, 3:7], "d": BASE.T, "e": BASE[0, 9]},
    "parameters": torch.nn.Linear(3, 5).state_dict(),
    "parameter": {"a": torch.nn.Parameter(torch.ones(2, 2))},
    "ordered": OrderedDict(a=torch.ones(2)),
    "integers": {"a": torch.arange(5), "b": torch.ones(3, dtype=torch.uint8)},
    "many": {f"layers.{i}": torch.full((2,), i).float() for i in range(1500)},
}


@pytest.mark.parametrize("kind", TABLES)
def test_tensors_are_those_that_torch_reads(kind: str, tmp_path: Path) -> None:
    file = saved(tmp_path, TABLES[kind])
    expected = torch.load(file, weights_only=True)
    header = read_header(file)
    assert list(header) == list(expected)
    for name, tensor in expected.items():
        found = header[name].read()
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor), name


class Call:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced

    def __repr__(self) -> str:  # the name of a test, the same in all processes
        return f"Call({self.reduced})"


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({"a": Call(os.system, "touch mark")}, 'refuses "posix.system"'),
        ({"a": Call(eval, "1")}, 'refuses "__builtin__.eval"'),
        ({"a": Call(getattr, "a", "upper")}, 'refuses "__builtin__.getattr"'),
        ({"a": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"a": torch.nn.Linear(2, 2)}, 'refuses "torch.nn.modules.linear.Linear"'),
        ({"a": torch.ones(1).expand(10**6)}, "a tensor of shape (1000000,) is no dense part"),
        ({"a": 3}, "a is no tensor"),
        ({"a": {"b": torch.ones(2)}}, "a is no tensor"),
        ({1: torch.ones(2)}, "a name is no text"),
        ([torch.ones(2)], "is not a table of tensors"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, 'refuses "torch.ComplexFloatStorage"'),
    ],
    ids=str,
)
def test_more_than_dense_tensors_is_named_and_never_runs(
    table: object, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cause in refused(saved(tmp_path, table))
    assert not (tmp_path / "mark").exists()


def test_the_forms_before_zip_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    assert "not a zip file of torch.save" in refused(file)
    file.write_bytes(b"<html>404")
    assert "starts with b'<html>40'" in refused(file)


@pytest.mark.parametrize(("change", "size"), [(lambda d: d[:-4], 396), (lambda d: d * 2, 800)])
def test_a_record_shorter_or_longer_than_its_storage_is_refused(
    change: Callable[[bytes], bytes], size: int, tmp_path: Path
) -> None:
    file = saved(tmp_path, {"a": torch.ones(100), "b": torch.ones(100)})
    rewritten(file, lambda name, data: change(data) if name.endswith("data/0") else data)
    assert refused(file) == f"record 0 has {size} bytes of 400"


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(100)})
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read("a/data.pkl")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
    assert "'0'" in refused(file)


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.zeros(100)})
    rewritten(file, lambda name, data: data, zipfile.ZIP_DEFLATED)
    assert "is compressed" in refused(file)


def test_numbers_of_another_byte_order_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.zeros(100)})
    rewritten(file, lambda name, data: b"big" if name.endswith("byteorder") else data)
    assert "little-endian" in refused(file)


def nested(depth: int) -> bytes:
    """Two to the power of `depth` leaves: who compares, hashes or prints it never comes back."""
    deeper = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(depth))
    return b"\x80\x02}X\x01\x00\x00\x00a)" + deeper


HUGE_TEXT = b"X" + struct.pack("<I", 2**32 - 1)
PICKLES = {
    "empty": b"",
    "stop": b".",
    "no stop": b"\x80\x02}",
    "stack": b"\x80\x02}s.",
    "mark": b"\x80\x02u.",
    "two values": b"\x80\x02}}.",
    "huge text": b"\x80\x02" + HUGE_TEXT,
    "unknown memo": b"\x80\x02j\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
    "instance": b"(iposix\nsystem\n.",
    "text": pickle.dumps("a", 2),
    "nested value": nested(100) + b"s.",
    "nested name": nested(100) + b"Ns.",
    "nested storage": nested(100) + b"Q.",
    "nested call": nested(100) + b"R.",
    "build": b"\x80\x02cposix\nsystem\n}b.",
    "build on text": b"\x80\x02X\x01\x00\x00\x00a}b.",
    "twice": b"\x80\x02}X\x01\x00\x00\x00aNsX\x01\x00\x00\x00aNs.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_damaged_pickle_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(2)})
    assert len(refused(with_pickle(file, PICKLES[kind]))) < 300


def test_an_index_of_the_memo_costs_nothing(tmp_path: Path) -> None:
    file = saved(tmp_path, {"a": torch.ones(2)})
    assert read_header(with_pickle(file, b"\x80\x02}r\xff\xff\xff\xff.")) == {}


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (97, (4,), (1,)),
        (-1, (4,), (1,)),
        (0, (101,), (1,)),
        (0, (2**40,), (0,)),
        (0, (2**62, 4), (1, 1)),
        (0, (10, 10), (10,)),
        (0, (4,), (-1,)),
        (0, (4.0,), (1,)),
        (0, (True,), (1,)),
        (2**70, (1,), (1,)),
        (0, (1,) * 200, (1,) * 200),
    ],
    ids=str,
)
def test_a_view_outside_its_storage_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Path
) -> None:
    class View:
        def __reduce__(self) -> tuple[object, ...]:
            storage = torch.ones(100).untyped_storage()
            typed = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=torch.float32, _internal=True
            )
            arguments = (typed, offset, shape, strides, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    refused(saved(tmp_path, {"a": View()}))
