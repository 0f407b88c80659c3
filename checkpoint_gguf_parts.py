"""GGUF files in parts, as llama.cpp's split tool writes them: NAME-00001-of-00003.gguf and so on.

The first part has the metadata of the whole, the others have numbers that say which part they are.
Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.
"""

import re
from pathlib import Path
from typing import Any

from checkpoint_base import listed
from checkpoint_fields import COMPLETE, refusing
from checkpoint_gguf_header import Entry, read_header
from config import Faults, UserError, printable
from plain_files import DamagedFile, check_regular

PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
COUNT, NUMBER, NUM_TENSORS = "split.count", "split.no", "split.tensors.count"

Header = tuple[dict[str, Any], dict[str, Entry]]


def model_name(file: Path) -> str:
    """The file's name without what says that it is a GGUF file, and which part."""
    match = PART_NAME.fullmatch(file.name)
    return match["name"] if match else file.name.removesuffix(".gguf")


def first_of(files: list[Path]) -> Path | None:
    """The one file, or the first of the parts of one; None where there is more than one model."""
    models = {model_name(file) for file in files}
    are_parts = all(PART_NAME.fullmatch(file.name) for file in files)
    return min(files) if len(files) == 1 or (len(models) == 1 and are_parts) else None


def read_parts(path: Path) -> tuple[tuple[Path, ...], dict[str, Any], dict[str, Entry]]:
    """All files of the model that `path` is one of, its metadata and the place of every tensor.

    Raises:
        UserError: a part is missing, of another model, or damaged.
    """
    values, entries = read_one(path)
    count = values.get(COUNT, 1)
    if count == 1:
        return (path,), values, entries
    files = part_files(path, count)
    headers = read_all(files)
    for number, (file, (part_values, _)) in enumerate(zip(files, headers, strict=True)):
        check_part(file, part_values, number, headers[0][0])
    merged: dict[str, Entry] = {}
    for file, (_, part) in zip(files, headers, strict=True):
        if twice := merged.keys() & part.keys():
            raise UserError(f"{file}: {printable(min(twice))} is in another part too; {COMPLETE}")
        merged |= part
    total = headers[0][0].get(NUM_TENSORS, len(merged))
    if total != len(merged):
        cause = f"{NUM_TENSORS} is {total!r}, its parts hold {len(merged)}"
        raise UserError(f"{files[0]}: {cause}; {COMPLETE}")
    return files, headers[0][0], merged


def read_all(files: tuple[Path, ...]) -> list[Header]:
    """The header of each part; all that are refused are told together."""
    faults = Faults()
    headers = [faults.check(read_one, file) for file in files]
    faults.refuse()
    return [header for header in headers if header is not None]


def read_one(file: Path) -> Header:
    check_regular([file])
    with refusing(file, (DamagedFile, OSError), COMPLETE):
        return read_header(file)


def part_files(path: Path, count: object) -> tuple[Path, ...]:
    """The parts beside `path`, whose name says which they are."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        cause = f"{COUNT} is {count!r}, but it is not named as a part of so many"
        raise UserError(f"{path}: {cause} (NAME-00001-of-00003.gguf); give it its name back")
    numbers = range(1, int(match["count"]) + 1)
    total = match["count"]
    files = tuple(path.with_name(f"{match['name']}-{n:05}-of-{total}.gguf") for n in numbers)
    missing = [file for file in files if not file.exists()]
    if missing:
        cause = f"{len(missing)} of {len(files)} parts are missing: {listed(missing)}"
        raise UserError(f"{path}: {cause}; {COMPLETE}")
    return files


def check_part(file: Path, values: dict[str, Any], number: int, first: dict[str, Any]) -> None:
    """Refuse a file under the name of another part, or of another model's."""
    expected = {NUMBER: number, COUNT: first.get(COUNT), NUM_TENSORS: first.get(NUM_TENSORS)}
    for key, value in expected.items():
        if values.get(key) != value:
            cause = f"{key} is {printable(repr(values.get(key)))}, not {value!r} as its name says"
            raise UserError(f"{file}: {cause}; take all parts of one model")
