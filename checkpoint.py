"""Open a checkpoint of any supported format: its config, its tensors, its tokenizer.

The kind is found from the contents, never from a name: config.json makes a folder a Hugging Face
one, params.json a Meta one, and the first bytes make a file GGUF. See checkpoint_base.Checkpoint
for what all of them offer.
"""

from pathlib import Path

from checkpoint_base import Checkpoint, FileCheckpoint, model_sha
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_gguf_header import MAGIC
from checkpoint_gguf_parts import first_of
from checkpoint_hf import HFCheckpoint
from checkpoint_hf_files import holds_weights
from checkpoint_meta import MetaCheckpoint
from checkpoint_random import RandomCheckpoint
from config import RANDOM_PREFIX, UserError
from stored_tensor import check_regular
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer

__all__ = ["Checkpoint", "model_sha", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint and check them against its config; no tensor data is read.

    Args:
        path: A Hugging Face or Meta folder, a folder with one .gguf file, or such a file; or
            random:NAME.

    Raises:
        UserError: nothing of the kind, an unsupported architecture or setting, a damaged file, or
            tensors that are missing, unknown or of the wrong shape.
    """
    if str(path).startswith(RANDOM_PREFIX):
        return RandomCheckpoint(path)
    if path.exists() and not path.is_dir():
        return open_file(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check --checkpoint_path")
    folders = (path, path / "original")
    meta_folder = next((each for each in folders if (each / "params.json").is_file()), None)
    # Repositories of Llama 3 have config.json also where only original/ was fetched.
    if (path / "config.json").is_file() and not (meta_folder and not holds_weights(path)):
        return HFCheckpoint(path)
    if meta_folder:
        return MetaCheckpoint(path, meta_folder)
    gguf_files = sorted(path.glob("*.gguf"))
    if file := first_of(gguf_files):
        return open_file(file)
    if gguf_files:
        raise UserError(f"{path}: holds {len(gguf_files)} .gguf files; give the path of one")
    raise UserError(f"{path}: holds no config.json, params.json or .gguf file; copy them there")


def open_file(file: Path) -> FileCheckpoint:
    check_regular([file])
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) == MAGIC:
            return GGUFCheckpoint(file)
    raise UserError(f"{file}: is not a GGUF file; for other formats give the folder that holds it")


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder, whatever its weights are; None where no kind can be told.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    for folder, file in (
        (path, "config.json"),
        (path, "params.json"),
        (path / "original", "params.json"),
    ):
        if (folder / file).is_file():
            return open_tokenizer(folder)
    return None
