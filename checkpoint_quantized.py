"""Our own quantised checkpoints: a folder with one safetensors file and the tokenizer's files.

The header's metadata holds one JSON object under `kv_fast`: a version, the config, and the layout
of each parameter that is held as codes. Such a parameter is there as NAME.codes, NAME.scales and
NAME.mins, in rows on whatever device it was made; the others stand under their own names.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from checkpoint_base import FileCheckpoint, Source, main_dtype
from checkpoint_fields import COMPLETE, Fields, parse_object, refusing
from checkpoint_gguf import tokenizer_in
from checkpoint_gguf_parts import read_one
from checkpoint_hf import folder_name
from checkpoint_safetensors_header import DTYPES, read_all
from config import UserError, printable
from kernels.quantized import QuantizedWeight
from model_config import ModelConfig, RopeScaling
from plain_files import DamagedFile, check_regular
from stored_tensor import DTYPES as DENSE_DTYPES
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer
from weight_formats import LAYOUTS, parameter_shapes

KEY, VERSION = "kv_fast", 1
WEIGHTS_FILE, TOKENIZER_FOLDER, TOKENIZER_GGUF = "model.safetensors", "tokenizer", "tokenizer.gguf"
DENSE_BYTES = 1 << 22  # of rows made dense at a time
ROPE_KINDS = ("linear", "llama3", "yarn", "factors")


class QuantizedCheckpoint(FileCheckpoint):
    """What quantize.py writes.

    Args:
        path: what was opened.
        file: the safetensors file, under any name.
    """

    names = {}
    interleaved_rope = False

    def __init__(self, path: Path, file: Path) -> None:
        self.path, self.file, self.weight_files = path, file, (file,)
        self.name = folder_name(file.parent)
        check_regular([file])
        with refusing(file, (DamagedFile, OSError), COMPLETE):
            self.stored, metadata = read_all(file)
            if KEY not in metadata:
                missing = "config.json, params.json or .gguf file"
                raise UserError(f"{path}: holds no {missing}; copy them there")
            fields = Fields(file, parse_object(metadata[KEY].encode(errors="replace")))
        if fields.integer("version") != VERSION:
            raise fields.error("version", f"this program reads {VERSION}")
        self.config = read_config(fields)
        self.kept = self._read_formats(fields)
        self.check(self._shapes())
        self._check_parts()
        self.dtype = main_dtype(
            [
                (t.dtype if t.dtype in DENSE_DTYPES else None, t.num_bytes)
                for t in self.stored.values()
            ]
        )

    def _read_formats(self, fields: Fields) -> dict[str, str]:
        formats = fields.section("formats")
        if formats is None:
            raise fields.error("formats", "an object is needed")
        for name, layout in formats.values.items():
            codes = self.stored.get(f"{name}.codes")
            if type(layout) is not str or layout not in LAYOUTS:
                raise formats.error(name, f"known are {', '.join(LAYOUTS)}")
            if codes is None or len(codes.shape) != 2:
                raise formats.error(name, f"but there is no matrix {printable(name)}.codes")
            width, group = codes.shape[1] * 8 // LAYOUTS[layout].bits, LAYOUTS[layout].group
            if group and width % group:
                raise formats.error(name, f"but {width} channels are no multiple of {group}")
            if name in self.stored:
                raise formats.error(name, "but it is there as a dense tensor too")
        return formats.values

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, those of codes as the matrices that they stand for."""
        parts = {f"{name}.{part}" for name in self.kept for part in ("codes", "scales", "mins")}
        shapes = {name: tensor.shape for name, tensor in self.stored.items() if name not in parts}
        for name, layout in self.kept.items():
            num_rows, num_bytes = self.stored[f"{name}.codes"].shape
            shapes[name] = (num_rows, num_bytes * 8 // LAYOUTS[layout].bits)
        return shapes

    def _check_parts(self) -> None:
        """Refuse parts that are not those of their layout, and dense tensors that are codes."""
        expected = {
            f"{name}.{part}": described
            for name, layout in self.kept.items()
            for part, described in LAYOUTS[layout].parts(self._shapes()[name]).items()
        }
        for name, tensor in self.stored.items():
            found = (tensor.dtype, tensor.shape)
            if name in expected:
                fits = expected.pop(name) == found
            else:
                fits = tensor.dtype in DENSE_DTYPES and name in self.sources()
            if not fits:
                cause = f"{printable(name)} is {found[0]} {list(found[1])}"
                raise UserError(f"{self.file}: {cause}, which is not its layout; {COMPLETE}")
        if expected:
            raise UserError(f"{self.file}: {next(iter(expected))} is missing; {COMPLETE}")

    def _sources_of(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        return [Source(name, shape)]

    def read_kept(self, name: str) -> QuantizedWeight:
        num_rows, num_bytes = self.stored[f"{name}.codes"].shape
        layout = LAYOUTS[self.kept[name]]
        shape = (num_rows, num_bytes * 8 // layout.bits)
        parts = [self.stored[f"{name}.{part}"].read() for part in layout.parts(shape)]
        return QuantizedWeight(shape, *parts)

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self.kept:
            self.stored[name].read_into(out)
            return
        weight = self.read_kept(name)
        count = max(1, DENSE_BYTES // (4 * weight.shape[1]))
        for first in range(0, weight.shape[0], count):
            last = min(first + count, weight.shape[0])
            out[first:last].copy_(weight.block(first, last).dequantize())

    def tokenizer(self) -> Tokenizer:
        folder = self.file.parent / TOKENIZER_FOLDER
        if not (folder / TOKENIZER_GGUF).is_file():
            return open_tokenizer(folder)
        values, _ = read_one(folder / TOKENIZER_GGUF)
        return tokenizer_in(values, folder / TOKENIZER_GGUF)


def read_config(fields: Fields) -> ModelConfig:
    """The config as `header_of` writes it."""
    section = fields.section("config")
    if section is None:
        raise fields.error("config", "an object is needed")
    values = read_settings(section, ModelConfig)
    scaling = section.section("rope_scaling")
    if scaling:
        values["rope_scaling"] = read_rope_scaling(scaling, values["head_dim"])
    return section.model_config(**values)


def read_rope_scaling(fields: Fields, head_dim: int) -> RopeScaling:
    values = read_settings(fields, RopeScaling)
    values["kind"] = fields.get("kind")
    if values["kind"] not in ROPE_KINDS:
        raise fields.error("kind", f"known are {', '.join(ROPE_KINDS)}")
    factors = fields.get("freq_factors", [])
    count = head_dim // 2 if values["kind"] == "factors" else 0
    if not isinstance(factors, list) or len(factors) != count or not all(map(is_factor, factors)):
        raise fields.error("freq_factors", f"{count} numbers above 0 are needed")
    return RopeScaling(**values, freq_factors=tuple(factors))


def is_factor(value: object) -> bool:
    return type(value) is float and 0 < value < math.inf


def read_settings(fields: Fields, cls: type) -> dict[str, Any]:
    """The numbers and truths of a dataclass; all must be there, and no others."""
    items = {item.name: item.type for item in dataclasses.fields(cls)}
    if unknown := fields.values.keys() - items:
        raise fields.error(min(unknown), "it is unknown")
    values: dict[str, Any] = {}
    for name, kind in items.items():
        if kind is bool:
            values[name] = fields.boolean(name, default=None)  # type: ignore[arg-type]
        elif kind in (int, float):
            values[name] = fields.integer(name) if kind is int else fields.number(name)
    return values


def write_weights(
    file: Path,
    config: ModelConfig,
    formats: Mapping[str, str],
    dense_dtypes: Mapping[str, torch.dtype],
    weights: Iterable[tuple[str, Tensor | QuantizedWeight]],
) -> None:
    """Write a safetensors file, each weight as it comes; nothing but the one is in memory.

    Args:
        formats: layouts of the parameters that come as codes, in rows.
        dense_dtypes: of the others.
    """
    shapes = parameter_shapes(config)
    parts = {name: (dtype, shapes[name]) for name, dtype in dense_dtypes.items()}
    for name, layout in formats.items():
        for part, described in LAYOUTS[layout].parts(shapes[name]).items():
            parts[f"{name}.{part}"] = described
    header, offsets = header_of(config, formats, parts)
    with file.open("wb") as opened:
        opened.write(header)
        for name, weight in weights:
            if isinstance(weight, Tensor):
                offset = offsets.pop(name)
                write_at(opened, len(header) + offset, weight.to(dense_dtypes[name]))
                continue
            for part in LAYOUTS[formats[name]].parts(weight.shape):
                offset = offsets.pop(f"{name}.{part}")
                write_at(opened, len(header) + offset, getattr(weight, part))
        assert not offsets
        opened.flush()
        os.fsync(opened.fileno())


def header_of(
    config: ModelConfig,
    formats: Mapping[str, str],
    parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int]]:
    """The start of a file, and where behind it each tensor lies: the widest first, so aligned."""
    settings = {"version": VERSION, "config": dataclasses.asdict(config), "formats": dict(formats)}
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(settings)}}
    codes = {dtype: code for code, dtype in DTYPES.items()}
    offsets, end = {}, 0
    for name in sorted(parts, key=lambda name: (-parts[name][0].itemsize, name)):
        dtype, shape = parts[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        offsets[name] = start
        header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def write_at(opened: BinaryIO, position: int, tensor: Tensor) -> None:
    opened.seek(position)
    opened.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
