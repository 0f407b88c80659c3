"""The header of a safetensors file: as the library reads it, or what is wrong with it."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from checkpoint_safetensors_header import DTYPES, read_header
from plain_files import DamagedFile


def written(file: Path, header: bytes, num_bytes: int = 8) -> Path:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return file


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def refused(file: Path) -> str:
    with pytest.raises(DamagedFile) as caught:
        read_header(file)
    return str(caught.value)


def test_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {str(i): torch.ones(2, i + 1).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    tensors["number"], tensors["none"] = torch.tensor(3.0), torch.ones(0, 4)
    safetensors.torch.save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    header = read_header(tmp_path / "a")
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = header[name].read()
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.numel() == 0 or torch.equal(found.float(), tensor.float())


def test_blanks_around_the_header_are_taken(tmp_path: Path) -> None:
    assert "a" in read_header(written(tmp_path / "a", json.dumps({"a": entry()}).encode() + b"   "))


@pytest.mark.parametrize("num_bytes", range(8))
def test_a_file_without_a_header_is_refused(num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(num_bytes))
    assert refused(tmp_path / "a") == f"{num_bytes} bytes, too short for a header"


def test_another_kind_of_file_is_told_by_its_start(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"<html><body>404 Not Found</body></html>")
    assert "starts with b'<html><b', not a safetensors file" in refused(tmp_path / "a")


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        (b"", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        pytest.param(b"[" * 100_000, "is not JSON", id="nested 100,000 deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b'{"a": {}}', "a has not dtype, shape and data_offsets"),
        (b'{"__metadata__": {"a": 1}}', "__metadata__ is no table of texts"),
        (b'{"a": 1, "a": 1}', '"a" occurs twice'),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', '"dtype" occurs twice'),
        ({"a": entry(extra=1)}, "a has not dtype, shape and data_offsets"),
        ({"a": entry(dtype="F31")}, "a has dtype 'F31', known are"),
        ({"a": entry(dtype=["F32"])}, "a has dtype ['F32']"),
        ({"a": entry(shape=[-2])}, "a has shape [-2]"),
        ({"a": entry(shape=[2.0])}, "a has shape [2.0]"),
        ({"a": entry(shape=[True, 2])}, "a has shape [True, 2]"),
        ({"a": entry(shape=2)}, "a has shape 2"),
        ({"a": entry(shape=[2**62, 2**62])}, "takes"),
        ({"a": entry(shape=[3])}, "a of shape [3] in F32 takes 12 bytes"),
        ({"a": entry(data_offsets=[8, 0])}, "takes 8 bytes, not those [8, 0]"),
        ({"a": entry(data_offsets=[0])}, "a has shape"),
        ({"a": entry(data_offsets=[4, 12])}, "a starts at byte"),
        ({"a": entry(), "b": entry()}, "b starts at byte"),
        ({"a": entry(), "b": entry(data_offsets=[16, 24])}, "b starts at byte"),
        ({"a": entry(shape=[1], data_offsets=[0, 4])}, "its header says"),
        ({"a": entry(shape=[20], data_offsets=[0, 80])}, "its header says"),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(
    header: bytes | dict[str, object], cause: str, tmp_path: Path
) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    assert cause in refused(written(tmp_path / "a", data))


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes((10**9).to_bytes(8, "little") + b"{}")
    assert "its header is cut off at byte 10 of 1000000008" in refused(tmp_path / "a")
