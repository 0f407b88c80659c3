"""Which weights of a checkpoint are held in 8 or 4 bits, and a command that writes them so.

python quantize.py SRC DST --quantization int4
"""

import sys

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFValueType
from torch import Tensor

import fetch
from checkpoint import Checkpoint, check
from checkpoint_base import FileCheckpoint
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_quantized import (
    TOKENIZER_FOLDER,
    TOKENIZER_GGUF,
    WEIGHTS_FILE,
    QuantizedCheckpoint,
    write_weights,
)
from config import UserError, flag, printable
from durable import check_new_folder, new_folder
from kernels.huge_pages import Empty
from kernels.quantized import TILE_ROWS, QuantizedWeight
from stored_tensor import short_lived
from weight_formats import (
    EMBEDDING,
    HEAD,
    LAYOUTS,
    WEIGHT_FORMATS,
    encoded_blocks,
    gathered,
    parameter_shapes,
)

__all__ = ["WEIGHT_FORMATS", "Scheme", "load_weights", "parse_scheme", "planned_formats"]

BLOCK_BYTES = 1 << 20  # of a weight at a time
NONE = "none"
CPU = torch.device("cpu")
TOKENIZER_FILES = (  # what tokenizer.py and tokenizer_files.py read, and what tells the kind
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "config.json",
    "params.json",
)
HEAD_OF = {"int4": "int8"}  # unless it is named: a head loses more by four bits than it saves


@dataclass(frozen=True)
class Scheme:
    """What --quantization asks for.

    Attributes:
        layers, head: a name in `LAYOUTS`, or none; the head's holds for the embedding too.
    """

    layers: str
    head: str


def parse_scheme(spec: str) -> Scheme:
    """`LAYERS[,HEAD]`, each `int8`, `int4`, one of these with `:GROUP`, or `none`.

    Raises:
        UserError: not of this form.
    """
    layers, *rest = spec.split(",")
    if len(rest) > 1:
        raise UserError(f"--quantization {printable(spec)}: give LAYERS or LAYERS,HEAD")
    head = rest[0] if rest else HEAD_OF.get(layers.partition(":")[0], layers)
    return Scheme(*(layout_name(word, spec) for word in (layers, head)))


def layout_name(word: str, spec: str) -> str:
    """The layout that one word of --quantization names; `none` stays."""
    kind, colon, group = word.partition(":")
    scheme = WEIGHT_FORMATS.get(kind)
    names = [scheme.name_of(n) for n in scheme.groups] if scheme else [NONE]
    if scheme and not colon:
        return names[0]
    if word in names:
        return word
    known = [name for each in WEIGHT_FORMATS.values() for name in map(each.name_of, each.groups)]
    shown = printable(spec)
    raise UserError(
        f"--quantization {shown}: {printable(word)!r} is not a weight format;"
        f" known: {', '.join(dict.fromkeys([*WEIGHT_FORMATS, *known, NONE]))}"
    )


def planned_formats(checkpoint: Checkpoint, scheme: Scheme | None) -> dict[str, str]:
    """The layout of each parameter that is to be held as codes, by name.

    Args:
        scheme: None: those that the checkpoint's files hold so.

    Raises:
        UserError: the channels of a matrix are no multiple of the group.
    """
    if scheme is None:
        return dict(checkpoint.kept)
    formats = {}
    for name, shape in parameter_shapes(checkpoint.config).items():
        layout = scheme.head if name in (EMBEDDING, HEAD) else scheme.layers
        if len(shape) == 2 and layout != NONE:
            check_group(name, shape, layout)
            formats[name] = layout
    return formats


def check_group(name: str, shape: tuple[int, ...], layout: str) -> None:
    group = LAYOUTS[layout].group
    if group and shape[1] % group:
        scheme = WEIGHT_FORMATS[layout.partition(":")[0]]
        fitting = (scheme.name_of(n) for n in scheme.groups if n and shape[1] % n == 0)
        cure = next(fitting, "int8")
        raise UserError(
            f"--quantization {layout}: {name} is {list(shape)}, and {shape[1]} channels are no"
            f" multiple of {group}; take {cure}"
        )


def load_weights(
    checkpoint: Checkpoint,
    formats: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype,
    empty: Empty,
    *,
    in_rows: bool = False,
) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
    """Each parameter once, dense in `dtype` or as codes in the layout of `formats`, on `device`.

    Beside what was given there is one dense matrix at a time, in 16 bits if the file's has so few,
    and the scratch of some of its rows.

    Args:
        empty: gives the memory, called like `torch.empty(sizes, dtype=, device=)`.
        in_rows: codes as files have them, instead of as the device's kernels want them.

    Raises:
        UserError: the checkpoint cannot be read, or a weight not be quantised.
    """

    def placed(num_rows: int, blocks: Iterable[QuantizedWeight]) -> QuantizedWeight:
        laid_out = blocks if in_rows else (block.laid_out_for(device) for block in blocks)
        return gathered(num_rows, laid_out, empty)

    kept = [name for name, layout in formats.items() if checkpoint.kept.get(name) == layout]
    for name in kept:
        weight = checkpoint.read_kept(name)
        yield name, placed(weight.shape[0], blocks_of(weight))
    source_dtype = checkpoint.dtype or torch.float16  # as the scales of blocks are
    passing = {name: None if name in kept else source_dtype for name in formats}
    for name, dense in checkpoint.weights(device, dtype, empty, passing):
        if name not in formats:
            yield name, dense
            continue
        with refusing_weights(checkpoint, name, formats[name]):
            scheme = WEIGHT_FORMATS[formats[name].partition(":")[0]]
            group = LAYOUTS[formats[name]].group
            codes = placed(len(dense), encoded_blocks(dense, scheme, group))
        del dense  # or it stays until the next one is there
        yield name, codes


def blocks_of(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """A weight in rows, some tiles of them at a time: each is laid out anew, in scratch."""
    num_rows = weight.shape[0]
    step = max(1, BLOCK_BYTES * num_rows // (weight.nbytes * TILE_ROWS)) * TILE_ROWS
    for first in range(0, num_rows, step):
        yield weight.block(first, min(first + step, num_rows))


@contextmanager
def refusing_weights(checkpoint: Checkpoint, name: str, layout: str) -> Iterator[None]:
    """Turn what a scheme cannot hold into one line for the user."""
    try:
        yield
    except ValueError as error:
        cause = f"{name} cannot be quantised to {layout}: {error}"
        raise UserError(f"{checkpoint.path}: {cause}; leave out --quantization") from error


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Write a checkpoint with quantised weights, which generate.py loads as any other."""

    source: str = flag(MISSING, help="checkpoint to read, as --checkpoint_path of generate.py")
    target: Path = flag(MISSING, help="folder to write, new or empty")
    quantization: str = flag("int8", help="LAYERS[,HEAD], each int8, int4[:GROUP] or none")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


def main(config: QuantizeConfig) -> None:
    """Check everything, then write the folder whole or not at all; prints its path.

    Raises:
        UserError: a bad flag, a checkpoint that cannot be read, or a target that is in use.
    """
    scheme = parse_scheme(config.quantization)
    check_new_folder(config.target)
    source, _ = check(fetch.resolve(config.source))
    if not isinstance(source, FileCheckpoint):
        raise UserError(f"{source.name}: has no files; give generate.py --quantization instead")
    formats = planned_formats(source, scheme)
    if not formats:
        raise UserError(f"--quantization {config.quantization}: leaves nothing to quantise")
    with new_folder(config.target) as folder:
        write_tokenizer(source, folder / TOKENIZER_FOLDER)
        write_checkpoint(source, formats, folder / WEIGHTS_FILE)
    print(config.target)


def write_checkpoint(source: FileCheckpoint, formats: Mapping[str, str], file: Path) -> None:
    """The weights of a checkpoint in the layouts of `formats`; the others as exact as they are."""
    left_out = dict.fromkeys(formats)
    dense = source.weights(CPU, torch.float32, passing=left_out)
    dtypes = {name: narrowest_dtype(weight) for name, weight in dense}
    weights = load_weights(source, formats, CPU, torch.float32, short_lived, in_rows=True)
    write_weights(file, source.config, formats, dtypes, weights)


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """That holds every value of an fp32 tensor."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).float(), weight):
            return dtype
    return torch.float32


def write_tokenizer(source: FileCheckpoint, folder: Path) -> None:
    """The tokenizer's files, or the tokenizer's part of a GGUF header."""
    if isinstance(source, QuantizedCheckpoint):
        shutil.copytree(source.file.parent / TOKENIZER_FOLDER, folder)
        return
    folder.mkdir()
    if isinstance(source, GGUFCheckpoint):
        write_gguf_header(folder / TOKENIZER_GGUF, source.fields.values)
        return
    origin = Path(source.tokenizer().source).parent
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def write_gguf_header(file: Path, values: Mapping[str, Any]) -> None:
    """A GGUF file of the tokenizer's keys alone."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in values.items():
        if not key.startswith("tokenizer.") or value == []:  # the library writes no empty list
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=widest_type(value))
        else:
            writer.add_key_value(key, value, widest_type([value]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widest_type(values: Sequence[Any]) -> GGUFValueType:
    """A type of GGUF that holds each value exactly; all are of one type of Python."""
    kind = type(values[0])
    if kind is int:
        fits = max(values) < 1 << 63
        return GGUFValueType.INT64 if fits else GGUFValueType.UINT64
    return {str: GGUFValueType.STRING, bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT64}[kind]


if __name__ == "__main__":
    sys.exit(run(main, QuantizeConfig))
