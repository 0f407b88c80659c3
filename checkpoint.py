"""Open a checkpoint of any supported format: its config, its tensors, its tokenizer.

    python checkpoint.py PATH [--json]      prints what the tool sees in it

The kind is found from the contents, never from a name: config.json makes a folder a Hugging Face
one, params.json a Meta one, the first bytes make a file GGUF, and the metadata of a safetensors
file alone in its folder make it one of quantize.py. See checkpoint_base.Checkpoint for what all of
them offer.
"""

import sys

from command import end_on_signals, notes_held, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import functools
import json
import logging
import os
from dataclasses import MISSING, dataclass
from pathlib import Path

import fetch
from checkpoint_base import Checkpoint, FileCheckpoint, model_sha
from checkpoint_fields import refusing
from checkpoint_gguf import GGUFCheckpoint, tokenizer_in
from checkpoint_gguf_header import MAGIC
from checkpoint_gguf_parts import first_of, read_parts
from checkpoint_hf import HFCheckpoint
from checkpoint_hf_files import holds_weights
from checkpoint_meta import MetaCheckpoint
from checkpoint_quantized import QuantizedCheckpoint
from checkpoint_random import RandomCheckpoint
from checkpoint_summary import as_text, summarize
from config import RANDOM_PREFIX, Faults, UserError, flag
from plain_files import check_regular, is_given, is_regular, is_there
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer
from tokenizer_trial import tried_tokenizer

log = logging.getLogger("kv_fast")

__all__ = ["Checkpoint", "model_sha", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint and check them against its config; no tensor data is read.

    Args:
        path: A Hugging Face or Meta folder, one that quantize.py wrote, a folder with one .gguf
            file, or such a file; or random:NAME.

    Raises:
        UserError: nothing of the kind, an unsupported architecture or setting, a damaged file, or
            tensors that are missing, unknown or of the wrong shape.
    """
    if str(path).startswith(RANDOM_PREFIX):
        return RandomCheckpoint(path)
    if is_there(path) and not path.is_dir():
        return open_file(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    check_folder(path)
    folders = (path, path / "original")
    meta_folder = next((each for each in folders if is_given(each / "params.json")), None)
    # Repositories of Llama 3 have config.json also where only original/ was fetched.
    if is_given(path / "config.json") and not (meta_folder and not holds_weights(path)):
        return HFCheckpoint(path)
    if meta_folder:
        return MetaCheckpoint(path, meta_folder)
    if file := gguf_file(path):
        return open_file(file)
    quantized_files = list(path.glob("*.safetensors"))
    if len(quantized_files) == 1:
        return QuantizedCheckpoint(path, quantized_files[0])
    raise UserError(f"{path}: holds no config.json, params.json or .gguf file; copy them there")


def check_folder(folder: Path) -> None:
    """Refuse a folder whose files cannot be listed or reached: it would seem to be empty."""
    with refusing(folder, (OSError,), "make it readable"), os.scandir(folder):
        os.stat(f"{folder}/.")  # noqa: PTH116  (Path drops the dot, and a folder has it inside)


def gguf_file(path: Path) -> Path | None:
    """The path itself where it is a file, else the one GGUF model of the folder, or none."""
    if not path.is_dir():
        return path if is_regular(path) else None
    files = sorted(path.glob("*.gguf"))
    file = first_of(files)
    if files and not file:
        raise UserError(f"{path}: holds {len(files)} .gguf files; give the path of one")
    return file


def open_file(file: Path) -> FileCheckpoint:
    check_regular([file])
    if is_gguf(file):
        return GGUFCheckpoint(file)
    raise UserError(f"{file}: is not a GGUF file; for other formats give the folder that holds it")


def is_gguf(file: Path) -> bool:
    with refusing(file, (OSError,), "make it readable"), file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def find_tokenizer(path: Path, checkpoint: Checkpoint | None, text: str) -> Tokenizer | None:
    """The tokenizer, tried with `text`; of a refused checkpoint too, where its kind can be told.

    Raises:
        UserError: there is none, it cannot be read, or it dies.
    """
    read = checkpoint.tokenizer if checkpoint else functools.partial(tokenizer_of, path)
    return tried_tokenizer(path, read, text)


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer, whatever else is wrong; None where no kind can be told.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    for folder, name in (
        (path, "config.json"),
        (path, "params.json"),
        (path / "original", "params.json"),
    ):
        if is_given(folder / name):
            return open_tokenizer(folder)
    file = gguf_file(path)
    return tokenizer_in(read_parts(file)[1], file) if file and is_gguf(file) else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Print what the tool sees in a checkpoint: architecture, shapes, rope, tensors, tokenizer."""

    path: str = flag(MISSING, help="as --checkpoint_path of generate.py")
    verify: bool = flag(False, help="read the weights and compare them with their known SHA-256")
    json: bool = flag(False, help="print one JSON document")
    debug: bool = flag(False, help="show the traceback of an error")


@notes_held()
def check(path: Path) -> tuple[Checkpoint, Tokenizer]:
    """A checkpoint and its tokenizer, both found right.

    Raises:
        UserError: all that is wrong with them, a line each.
    """
    faults = Faults()
    checkpoint = faults.check(open_checkpoint, path)
    tokenizer = faults.check(find_tokenizer, path, checkpoint, "a")
    faults.refuse()
    assert checkpoint and tokenizer
    return checkpoint, tokenizer


def main(config: CheckpointConfig) -> None:
    """Check headers and tokenizer, and print what they say.

    Raises:
        UserError: all that is wrong, a line each.
    """
    checkpoint, tokenizer = check(fetch.resolve(config.path))
    if config.verify:
        if not isinstance(checkpoint, FileCheckpoint):
            raise UserError(f"{checkpoint.name}: has no files; leave out --verify")
        fetch.check_hashes(checkpoint.weight_files)
        names = ", ".join(file.name for file in checkpoint.weight_files)
        log.info("SHA-256 as published: %s", names)
    document = summarize(checkpoint, tokenizer)
    print(json.dumps(document) if config.json else as_text(document))


if __name__ == "__main__":
    sys.exit(run(main, CheckpointConfig))
