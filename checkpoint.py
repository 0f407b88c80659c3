"""Open a checkpoint of any supported format: its config, its tensors, its tokenizer.

The kind is found from the contents, never from a name: config.json makes a folder a Hugging Face
one, params.json a Meta one, and the first bytes make a file GGUF. See checkpoint_base.Checkpoint
for what all of them offer.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from checkpoint_base import Checkpoint
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_gguf_header import MAGIC
from checkpoint_hf import HFCheckpoint
from checkpoint_meta import MetaCheckpoint
from config import UserError

__all__ = ["Checkpoint", "model_sha", "open_checkpoint"]

HASHED_WHOLE_BYTES = 10**9
HASHED_HEAD_BYTES = 1 << 20
HASHED_BLOCKS = 64
HASHED_BLOCK_BYTES = 1 << 16


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint and check them against its config; no tensor data is read.

    Args:
        path: A Hugging Face or Meta folder, a folder with one .gguf file, or such a file.

    Raises:
        UserError: nothing of the kind, an unsupported architecture or setting, a damaged file, or
            tensors that are missing, unknown or of the wrong shape.
    """
    if path.is_file():
        return open_file(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check --checkpoint_path")
    if (path / "config.json").is_file():
        return HFCheckpoint(path)
    for folder in (path, path / "original"):
        if (folder / "params.json").is_file():
            return MetaCheckpoint(path, folder)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return open_file(gguf_files[0])
    if gguf_files:
        raise UserError(f"{path}: holds {len(gguf_files)} .gguf files; give the path of one")
    raise UserError(f"{path}: holds no config.json, params.json or .gguf file; copy them there")


def open_file(file: Path) -> Checkpoint:
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) == MAGIC:
            return GGUFCheckpoint(file)
    raise UserError(f"{file}: is not a GGUF file; for other formats give the folder that holds it")


def model_sha(files: Iterable[Path]) -> str:
    """Identity of a set of weights, whatever its path: 12 hex digits of SHA-256.

    Files are hashed in the order given. Below 1 GB together they are hashed whole; beyond, each
    gives its size, its first MiB, and 64 blocks of 64 KiB evenly spread from start to end.
    """
    files = list(files)
    digest = hashlib.sha256()
    is_whole = sum(file.stat().st_size for file in files) < HASHED_WHOLE_BYTES
    for file in files:
        with file.open("rb") as opened:
            if is_whole:
                while chunk := opened.read(HASHED_HEAD_BYTES):
                    digest.update(chunk)
                continue
            size = file.stat().st_size
            digest.update(str(size).encode())
            digest.update(opened.read(HASHED_HEAD_BYTES))
            for block in range(HASHED_BLOCKS):
                opened.seek(max(0, size - HASHED_BLOCK_BYTES) * block // (HASHED_BLOCKS - 1))
                digest.update(opened.read(HASHED_BLOCK_BYTES))
    return digest.hexdigest()[:12]
