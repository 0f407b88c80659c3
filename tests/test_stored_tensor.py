"""Reading a tensor out of a file: exact in every dtype and layout; a cut file ends no process."""

import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from checkpoint_kinds import every_format, tiny
from torch import Tensor

import stored_tensor
from checkpoint import open_checkpoint
from stored_tensor import DTYPES, StoredTensor

BASE = torch.randn(40, 30)


def stored(file: Path, dtype: torch.dtype, start: int = 0) -> StoredTensor:
    data = BASE.to(dtype).view(torch.uint8).numpy().tobytes()
    file.write_bytes(bytes(start) + data)
    return StoredTensor(file, dtype, tuple(BASE.shape), start)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_in_blocks_as_torch_converts_it(
    dtype: torch.dtype, out_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "BLOCK_BYTES", 256)  # several, the last one short
    tensor = stored(tmp_path / "a", dtype, start=13)
    out = torch.empty(BASE.shape, dtype=out_dtype)
    tensor.read_into(out)
    assert torch.equal(out, BASE.to(dtype).to(out_dtype))
    assert torch.equal(tensor.read(), BASE.to(dtype))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_as_many_blocks_as_there_are_readers_are_read_at_a_time(
    out_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = stored(tmp_path / "a", torch.float32)
    monkeypatch.setattr(stored_tensor, "BLOCK_BYTES", tensor.num_bytes // stored_tensor.READERS)
    together, fill = threading.Barrier(stored_tensor.READERS, timeout=20), stored_tensor.fill

    def fill_once_all_have_come(opened: BinaryIO, out: Tensor) -> None:
        together.wait()
        fill(opened, out)

    monkeypatch.setattr(stored_tensor, "fill", fill_once_all_have_come)
    out = torch.empty(BASE.shape, dtype=out_dtype)
    tensor.read_into(out)
    assert torch.equal(out, BASE.to(out_dtype))


def test_a_tensor_of_one_block_is_read_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "ThreadPoolExecutor", None)
    tensor = stored(tmp_path / "a", torch.float32)
    assert torch.equal(tensor.read(), BASE)
    empty = StoredTensor(tensor.file, torch.float32, (0, 5), 0)
    assert empty.read().shape == (0, 5)


def test_columns_of_a_larger_tensor_are_filled_and_no_others(tmp_path: Path) -> None:
    out = torch.zeros(40, 60)
    stored(tmp_path / "a", torch.float32).read_into(out[:, 30:])
    assert torch.equal(out, torch.cat([torch.zeros(40, 30), BASE], 1))


@every_format
def test_a_file_that_is_cut_while_it_is_read_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "BLOCK_BYTES", 512)  # by several readers
    loaded = open_checkpoint(tiny(kind, tmp_path))
    weights = loaded.weights("cpu", torch.bfloat16)
    next(weights)
    for file in loaded.weight_files:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(OSError, match="changed since it was opened") as caught:
        list(weights)
    assert str(loaded.weight_files[0].parent) in str(caught.value)
