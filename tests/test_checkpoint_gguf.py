"""GGUF files: every kind of block, parts of a model, and headers that lie."""

import dataclasses
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_kinds import TOKENIZER, refusal, tiny
from gguf import GGMLQuantizationType, GGUFWriter

from checkpoint import open_checkpoint
from checkpoint_gguf import is_readable
from scripts.tiny_checkpoint import (
    TINY,
    gguf_settings,
    random_weights,
    tensor_names,
    tensor_shape,
    write_gguf,
)

# One layer whose rows are whole blocks of every kind: 256 values.
BLOCKS = dataclasses.replace(
    TINY, num_layers=1, num_heads=4, head_dim=64, hidden_size=256, intermediate_size=256
)
READABLE = [kind for kind in GGMLQuantizationType if is_readable(kind)]
UNREADABLE = [kind for kind in GGMLQuantizationType if kind not in READABLE]
PARTS = [f"tiny-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)]


def write_random_blocks(file: Path, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """A file whose matrices are random bytes in blocks of `kind`; gives these bytes by name."""
    generator = np.random.default_rng(kind.value)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = GGUFWriter(file, "llama")
    for key, value in gguf_settings(BLOCKS).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    blocks = {}
    for names in tensor_names(BLOCKS):
        shape = tensor_shape(BLOCKS, names.hf)
        if len(shape) == 1:
            writer.add_tensor(names.gguf, np.ones(shape, dtype=np.float32))
            continue
        row_bytes = shape[1] // block_size * block_bytes
        data = generator.integers(0, 256, (shape[0], row_bytes), dtype=np.uint8)
        writer.add_tensor(names.gguf, data, raw_dtype=kind)
        blocks[names.gguf] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 as integers; all NaN are one, as copying a signalling one makes it a quiet one."""
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(torch.int32)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_blocks_are_dequantised_as_the_library_does_bit_for_bit(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    blocks = write_random_blocks(tmp_path / "a.gguf", kind)
    loaded = open_checkpoint(tmp_path / "a.gguf")
    assert len(blocks) == 9
    for name, data in blocks.items():
        expected = torch.from_numpy(gguf.dequantize(data, kind))
        found = torch.empty_like(expected)
        loaded.read_into(name, found)
        assert torch.equal(bits(found), bits(expected)), name


def test_every_block_format_of_the_library_is_read() -> None:
    assert set(gguf.quants._type_traits) < set(READABLE)
    assert len(READABLE) >= 26


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_scales_that_are_not_finite_are_read_without_a_warning(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    write_random_blocks(tmp_path / "a.gguf", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dict(open_checkpoint(tmp_path / "a.gguf").weights("cpu", torch.float32))


@pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.name)
def test_other_types_are_named_with_those_that_are_read(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    write_random_blocks(tmp_path / "a.gguf", kind)
    refusal(tmp_path / "a.gguf", f"is stored as {kind.name}, supported are F32, F16, Q4_0,")


# Parts


@pytest.mark.parametrize("opened", ["", *PARTS])
def test_any_part_or_their_folder_opens_the_whole(opened: str, tmp_path: Path) -> None:
    loaded = open_checkpoint(tiny("gguf-parts", tmp_path) / opened)
    assert loaded.name == "tiny"
    assert loaded.config == TINY
    assert [file.name for file in loaded.weight_files] == PARTS
    assert len(dict(loaded.weights("cpu", torch.float32))) == 27
    assert loaded.tokenizer().bos_id == 260


def test_the_sha_of_parts_does_not_depend_on_the_one_that_was_opened(tmp_path: Path) -> None:
    folder = tiny("gguf-parts", tmp_path)
    assert len({open_checkpoint(folder / name).sha for name in ("", *PARTS)}) == 1


@pytest.mark.parametrize("missing", PARTS)
def test_missing_parts_are_named(missing: str, tmp_path: Path) -> None:
    folder = tiny("gguf-parts", tmp_path)
    (folder / missing).unlink()
    refusal(folder, f"1 of 4 parts are missing: {missing}")


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    file = tiny("gguf-parts", tmp_path) / PARTS[0]
    refusal(file.rename(tmp_path / "a.gguf"), "split.count is 4, but it is not named as a part")


def test_parts_under_each_others_names_are_refused(tmp_path: Path) -> None:
    folder = tiny("gguf-parts", tmp_path)
    (folder / PARTS[1]).rename(folder / "x")
    (folder / PARTS[2]).rename(folder / PARTS[1])
    (folder / "x").rename(folder / PARTS[2])
    refusal(folder, f"{PARTS[1]}: split.no is 2, not 1 as its name says")


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, other = tiny("gguf-parts", tmp_path), tmp_path / "other" / "tiny.gguf"
    config = dataclasses.replace(TINY, num_layers=3)
    write_gguf(other, config, random_weights(config), max_tensors=8)
    (other.parent / PARTS[3]).replace(folder / PARTS[3])
    refusal(folder, f"{PARTS[3]}: split.tensors.count is 30, not 39")


def test_parts_of_two_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    folder = tiny("gguf-parts", tmp_path)
    write_gguf(folder / "other.gguf", TINY, random_weights(TINY), max_tensors=20)
    refusal(folder, "holds 6 .gguf files")


# Headers that lie


def changed(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def descriptor(path: Path, name: str) -> tuple[bytes, bytes]:
    """What stands in the header for a tensor: all before its offset, and the offset."""
    data = path.read_bytes()
    start = data.index(text(name))
    num_dims = struct.unpack_from("<I", data, start + 8 + len(name))[0]
    end = start + 8 + len(name) + 4 + 8 * num_dims + 4
    return data[start:end], data[end : end + 8]


def move(path: Path, name: str, offset: Callable[[int], int]) -> Path:
    head, place = descriptor(path, name)
    moved = struct.pack("<Q", offset(struct.unpack("<Q", place)[0]))
    return changed(path, head + place, head + moved)


@pytest.mark.parametrize("value", [0, 3, 33, 0x80000000, -32, 32.0, "32", [32], True], ids=str)
def test_an_alignment_that_is_no_power_of_two_is_refused(value: object, tmp_path: Path) -> None:
    path = tiny("gguf", tmp_path)
    key = "llama.block_count"
    kinds = {int: "I", float: "f", bool: "?"}
    numbers = {"I": 4, "f": 6, "?": 7, "i": 5}
    if isinstance(value, str):
        new = struct.pack("<I", 8) + text(value)
    elif isinstance(value, list):
        new = struct.pack("<IIQI", 9, 4, 1, 32)
    else:
        code = "i" if value == -32 else kinds[type(value)]
        new = struct.pack(f"<I{code}", numbers[code], value)
    old = text(key) + struct.pack("<II", 4, TINY.num_layers)
    refusal(changed(path, old, text("general.alignment") + new), "general.alignment is")


def test_an_alignment_that_the_file_follows_is_taken(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", TINY, random_weights(TINY), fields={"general.alignment": 32}
    )
    assert open_checkpoint(path).config == TINY


@pytest.mark.parametrize(
    ("offset", "cause"),
    [
        (lambda at: at + 1, "is no multiple of 32"),
        (lambda at: at - 32, "overlap"),
        (lambda at: 0, "overlap"),
        (lambda at: 1 << 40, "ends at byte"),
        (lambda at: 2**64 - 32, "ends at byte"),
    ],
    ids=["misaligned", "overlapping", "the same", "behind the end", "wrapping"],
)
def test_a_tensor_in_the_wrong_place_is_named(
    offset: Callable[[int], int], cause: str, tmp_path: Path
) -> None:
    path = tiny("gguf", tmp_path)
    refusal(move(path, "blk.1.ffn_up.weight", offset), "blk.1.ffn_up.weight", cause)


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\x03\0\0\0", b"GGUF\x04\0\0\0", "version 4"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "big-endian"),
        (text("llama.block_count"), text("llama.vocab_width"), "block_count is missing"),
        (text("llama.block_count"), text("llama.head_countX")[:8] + b"\xff" * 17, "not UTF-8"),
        (text("llama.block_count"), struct.pack("<Q", 2**63) + b"llama.block_count", "a text of"),
        (text("llama.block_count"), struct.pack("<Q", 10**7) + b"llama.block_count", "cut off"),
        (
            text("llama.block_count") + struct.pack("<I", 4),
            text("llama.block_count") + struct.pack("<I", 13),
            "unknown type 13",
        ),
        (text("blk.1.ffn_up.weight"), text("blk.2.ffn_up.weight"), "blk.2.ffn_up.weight occurs"),
        (text("llama.context_length"), text("llama.rope.freq_base")[:28], "occurs twice"),
        (
            text("blk.1.ffn_norm.weight") + struct.pack("<I", 1),
            text("blk.1.ffn_norm.weight") + struct.pack("<I", 5),
            "has 5 dimensions",
        ),
        (
            text("blk.1.ffn_norm.weight") + struct.pack("<IQI", 1, 80, 0),
            text("blk.1.ffn_norm.weight") + struct.pack("<IQI", 1, 80, 4),
            "has the unknown type 4",
        ),
        (
            text("blk.1.ffn_norm.weight") + struct.pack("<IQI", 1, 80, 0),
            text("blk.1.ffn_norm.weight") + struct.pack("<IQI", 1, 80, 12),
            "no whole number of blocks of 256",
        ),
        (
            text("blk.1.ffn_norm.weight") + struct.pack("<IQ", 1, 80),
            text("blk.1.ffn_norm.weight") + struct.pack("<IQ", 1, 2**63),
            "overlap",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_lies_is_refused(old: bytes, new: bytes, cause: str, tmp_path: Path) -> None:
    refusal(changed(tiny("gguf", tmp_path), old, new), cause)


@pytest.mark.parametrize(
    ("kind", "count", "cause"),
    [(9, 1, "arrays of arrays"), (4, 1 << 40, "an array of"), (8, 1 << 21, "byte")],
    ids=["nested", "long", "longer than the file"],
)
def test_an_array_that_cannot_be_is_refused(
    kind: int, count: int, cause: str, tmp_path: Path
) -> None:
    path = tiny("gguf", tmp_path)
    num_tokens = len(TOKENIZER.gguf_fields["tokenizer.ggml.tokens"])
    old = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, num_tokens)
    refusal(changed(path, old, old[:-12] + struct.pack("<IQ", kind, count)), cause)


@pytest.mark.parametrize("kind", ["hf", "hf-shards", "meta", "gguf", "gguf-parts"])
def test_a_pipe_or_a_device_as_a_weight_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tiny(kind, tmp_path)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    file = next(f for f in files if f.suffix in (".safetensors", ".pth", ".gguf"))
    file.unlink()
    os.mkfifo(file)
    refusal(path, file.name)
    file.unlink()
    file.symlink_to("/dev/zero")
    refusal(path, file.name)


def test_a_device_is_no_checkpoint() -> None:
    refusal(Path("/dev/zero"), "is no regular file")
