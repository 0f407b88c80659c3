"""How faults of a checkpoint are made, for the table of them in fault_rows.py."""

import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_kinds import TOKENIZER, edit_json, tiny
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from test_checkpoint_gguf import changed, text

import generate
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf

Make = Callable[[Path], object]


def nothing(path: Path) -> None:
    """A checkpoint without a fault."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        id: names a row of the table of faults, and a case of it behind a blank.
        words: what the line says; {} stands for the folder of the checkpoint.
        kind: format of the checkpoint.
        make: breaks the checkpoint at a path.
        flags: of the command.
        code: exit code.
        during: what happens in the process before the command begins.
    """

    id: str
    words: tuple[str, ...] | str
    make: Make = nothing
    kind: str = "hf"
    flags: tuple[str, ...] = ()
    code: int = 2
    during: Make = nothing


# How faults are made


def write(name: str, data: bytes | str) -> Make:
    content = data if isinstance(data, bytes) else data.encode()
    return lambda path: (path / name).write_bytes(content)


def remove(name: str) -> Make:
    return lambda path: (path / name).unlink()


def settings(name: str = "config.json", **changes: object) -> Make:
    return lambda path: edit_json(path / name, **changes)


def cut(name: str, num_bytes: int) -> Make:
    return lambda path: write(name, (path / name).read_bytes()[:num_bytes])(path)


def header(change: Callable[[str], str | bytes]) -> Make:
    """The header of model.safetensors changed, as text."""

    def make(path: Path) -> None:
        file = path / "model.safetensors"
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        new = change(data[8:end].decode())
        new = new.encode() if isinstance(new, str) else new
        file.write_bytes(len(new).to_bytes(8, "little") + new + data[end:])

    return make


def swap(old: str, new: str) -> Make:
    """One place of the header of model.safetensors."""
    return header(lambda found: found.replace(old, new, 1))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Make:
    def make(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        change(weights)
        save_file(weights, path / "model.safetensors")

    return make


def shard_of_another_revision(path: Path) -> None:
    other = tiny("hf-shards", path.parent / "other", replace(TINY, intermediate_size=96))
    name = "model-00002-of-00003.safetensors"
    (other / name).replace(path / name)


def link_loop(path: Path) -> None:
    file = path / "model-00002-of-00003.safetensors"
    file.unlink()
    file.symlink_to(file.name)


def pickled(table: object, **options: bool) -> Make:
    return lambda path: torch.save(table, path / "consolidated.00.pth", **options)


def quantised(path: Path) -> None:
    pickled({"norm.weight": torch.quantize_per_tensor(torch.ones(80), 0.1, 0, torch.qint8)})(path)


def nested(path: Path) -> None:
    pickled({"norm.weight": torch.nested.nested_tensor([torch.ones(80)])})(path)


def packed(path: Path) -> None:
    file = path / "consolidated.00.pth"
    file.rename(path / "weights")
    with tarfile.open(file, "w") as archive:
        archive.add(path / "weights", "weights")


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.script(Scripted()), path / "consolidated.00.pth")


def bytes_of(old: bytes, new: bytes) -> Make:
    return lambda path: changed(path, old, new)


def metadata(**fields: object) -> Make:
    """A key of GGUF metadata; its dots are written as double underscores."""
    named = {key.replace("__", "."): value for key, value in fields.items()}
    all_fields = {**TOKENIZER.gguf_fields, **named}
    return lambda path: write_gguf(path, TINY, random_weights(TINY), fields=all_fields)


def tokenizer_json(**changes: Any) -> Make:
    return lambda path: edit_json(path / "tokenizer.json", **changes)


def without_line(number: int, *new: bytes) -> Make:
    def make(path: Path) -> None:
        lines = (path / "tokenizer.model").read_bytes().splitlines(keepends=True)
        (path / "tokenizer.model").write_bytes(
            b"".join([*lines[:number], *new, *lines[number + 1 :]])
        )

    return make


def template(source: str) -> Make:
    return lambda path: (path / "chat_template.jinja").write_text(source)


def change_while_loading(change: Callable[[Path], object], path: Path) -> None:
    """Changes the weights between the check of the request and the reading of them."""
    load, file = generate.load_model, path / "model.safetensors"

    def changed_and_loaded(*arguments: Any) -> Any:
        change(file)
        return load(*arguments)

    generate.load_model = changed_and_loaded


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rewrite(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))


NORM_GGUF = text("blk.1.ffn_norm.weight")


def unreadable(path: Path, kind: GGMLQuantizationType) -> None:
    """A whole block of another type in place of a norm."""
    size = GGML_QUANT_SIZES[kind][0]
    changed(
        path,
        NORM_GGUF + struct.pack("<IQI", 1, 80, 0),
        NORM_GGUF + struct.pack("<IQI", 1, size, kind.value),
    )
