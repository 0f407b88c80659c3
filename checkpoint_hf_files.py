"""Which files of a Hugging Face folder hold its weights, and where each tensor lies in them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import checkpoint_pth_header
import checkpoint_safetensors_header
from checkpoint_base import listed
from checkpoint_fields import COMPLETE, Fields
from checkpoint_pth_header import RESAVE
from config import UserError, printable
from plain_files import is_given, is_there
from stored_tensor import StoredTensor

log = logging.getLogger("kv_fast")

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf")


@dataclass(frozen=True)
class Layout:
    """A kind of weight files: one that holds all tensors, or shards that an index names.

    Attributes:
        single, index: their usual names.
        pattern: of a single file with a name of its own.
        read_header: what lies where in such a file.
        cure: for a file that cannot be read.
    """

    single: str
    index: str
    pattern: str
    read_header: Callable[[Path], dict[str, StoredTensor]]
    cure: str


SAFETENSORS = Layout(
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    checkpoint_safetensors_header.read_header,
    COMPLETE,
)
PICKLES = Layout(
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model*.bin",
    checkpoint_pth_header.read_header,
    RESAVE,
)
LAYOUTS = (SAFETENSORS, PICKLES)
"""The first one of which a folder has any file is read."""


def find_weights(folder: Path) -> tuple[Layout, tuple[Path, ...]]:
    """The one set of files that holds the model; where there are others, a note says so.

    Raises:
        UserError: there is no set, or it is incomplete; nothing of a file but an index is read.
    """
    for layout in LAYOUTS:
        if files := files_of(folder, layout):
            note_choice(folder, files)
            return layout, files
    for layout in LAYOUTS:
        check_complete(folder / layout.index, named_files(folder / layout.index))
    raise UserError(f"{folder}: holds no safetensors file, nor pytorch_model.bin; {COMPLETE}")


def holds_weights(folder: Path) -> bool:
    """Whether there is any file of a layout, or an index; none is opened."""
    return any(
        any(folder.glob(layout.pattern)) or (folder / layout.index).exists() for layout in LAYOUTS
    )


def files_of(folder: Path, layout: Layout) -> tuple[Path, ...]:
    """Those of one layout, none where the folder has none of them."""
    found = sorted(folder.glob(layout.pattern))
    index = folder / layout.index
    if folder / layout.single in found:
        return (folder / layout.single,)
    if is_given(index):
        shards = named_files(index)
        if not any(map(is_there, shards)):
            return ()  # an index alone comes with "*.json"
        check_complete(index, shards)
        return shards
    if len(found) > 1:
        raise UserError(f"{folder}: {len(found)} {layout.pattern} files, no {index.name}; add it")
    return tuple(found)


def named_files(index: Path) -> tuple[Path, ...]:
    """The shards that an index names, there or not; none where there is no index."""
    if not is_given(index):
        return ()
    weight_map = Fields.from_json(index).section("weight_map")
    names = list(weight_map.values.values()) if weight_map else []
    if not names:
        raise UserError(f"{index}: names no file; {COMPLETE}")
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: {printable(repr(name))} is no plain file name; {COMPLETE}")
    return tuple(index.parent / name for name in sorted(set(names)))


def check_complete(index: Path, shards: Sequence[Path]) -> None:
    missing = [shard for shard in shards if not is_there(shard)]
    if missing:
        cause = f"{len(missing)} files it names are missing: {listed(missing)}"
        raise UserError(f"{index}: {cause}; {COMPLETE}")


def note_choice(folder: Path, files: Sequence[Path]) -> None:
    found = {file for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)}
    others = sorted(found.difference(files))
    if others:
        log.info("%s: reads %s, not %s", folder, listed(files), listed(others))
