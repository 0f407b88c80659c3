"""What a checkpoint is, and what file formats share: names, shapes, stacked rows, one rope layout.

A format says which tensors its files hold, under which names, and how one of them is read
(checkpoint_hf.py, checkpoint_meta.py, checkpoint_gguf.py). Everything else is here, once.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from checkpoint_fields import COMPLETE, refusing
from config import Faults, UserError, printable
from kernels.quantized import QuantizedWeight
from model import Transformer
from model_config import ModelConfig
from plain_files import DamagedFile, check_regular
from stored_tensor import DTYPES, StoredTensor, short_lived, short_lived_tensor
from tokenizer_base import Tokenizer

NUM_LISTED = 3
HASHED_WHOLE_BYTES = 10**9
HASHED_HEAD_BYTES = 1 << 20
HASHED_BLOCKS = 64
HASHED_BLOCK_BYTES = 1 << 16
NO_NAMES: Mapping[str, torch.dtype | None] = MappingProxyType({})


def half_split_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection from Meta's rope layout to Hugging Face's.

    Rope turns D / 2 pairs of channels of a head by D / 2 angles. Which channels form pair i is a
    convention, and the rows of the projection that makes them follow it:

        interleaved (Meta, GGUF): channels 2i and 2i + 1
        half-split (Hugging Face): channels i and i + D / 2

    So row 2i of each head moves to i, and row 2i + 1 to i + D / 2. Scores are sums over channels,
    hence the same in both layouts. GGUF files of the llama architecture are interleaved because
    llama.cpp's converter permutes Hugging Face's rows on the way in.

    Args:
        weight: [num_heads * D, C].
        num_heads: Hq for q, Hkv for k: with the wrong one rows move between heads.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Source:
    """A tensor of the file that becomes some rows of one of ours; num_heads is for q and k only."""

    name: str
    shape: tuple[int, ...]
    num_heads: int | None = None


class Checkpoint(ABC):
    """One model, wherever its weights come from.

    Attributes:
        path: What was opened.
        name: For result rows.
        config: Shapes and constants.
        dtype: The dtype most bytes are stored in; None when they are quantised blocks.
        kept: Layout of each parameter that the files hold as codes, by name; see weight_formats.
    """

    path: Path
    name: str
    config: ModelConfig
    dtype: torch.dtype | None
    kept: Mapping[str, str] = MappingProxyType({})

    @property
    @abstractmethod
    def sha(self) -> str:
        """Identity of the weights, whatever their path: 12 hex digits of SHA-256."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the weights."""

    @abstractmethod
    def weights(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        empty: Callable[..., Tensor] = torch.empty,
        passing: Mapping[str, torch.dtype | None] = NO_NAMES,
    ) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of `Transformer` once, by name, made when it is asked for.

        Args:
            device, dtype: of the weights.
            empty: gives their memory, called like `torch.empty(sizes, dtype=, device=)`.
            passing: those that are wanted for a moment, in another dtype and in memory that goes
                back to the system with them; None: those that are not wanted.

        Yields:
            name, tensor in memory of its own. A tied head does not appear.
        """

    def read_kept(self, name: str) -> QuantizedWeight:
        """One of `kept` as it is stored, in rows in CPU memory."""
        raise KeyError(name)


class FileCheckpoint(Checkpoint):
    """A model in files, of any format.

    Attributes:
        name: Of the folder, or of the file without ".gguf".
        weight_files: The files the tensors come from, in reading order.
        stamps: What tells a file of these from a changed one.
    """

    # Our parameter without its last part (weight, bias) and with {} for the layer -> tensors of
    # the file, stacked.
    names: ClassVar[Mapping[str, Sequence[str]]]
    interleaved_rope: bool
    cure: ClassVar[str] = COMPLETE  # for tensors that are not those of the config

    weight_files: tuple[Path, ...]
    stamps: Mapping[Path, tuple[int, int]]

    @property
    def sha(self) -> str:
        return model_sha(self.weight_files)

    @abstractmethod
    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, of its shape but any dtype, with a tensor under the file's name."""

    def weights(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        empty: Callable[..., Tensor] = torch.empty,
        passing: Mapping[str, torch.dtype | None] = NO_NAMES,
    ) -> Iterator[tuple[str, Tensor]]:
        """As `Checkpoint.weights`, read straight into their memory where the dtype is the file's.

        The order is not that of the model: embedding and head are the largest, and what is needed
        beside them costs least while little else is loaded.
        """
        sources = self.sources()
        for name in sorted(sources, key=lambda name: name.startswith("layers.")):
            wanted, make = passing.get(name, dtype), short_lived if name in passing else empty
            if wanted is None:
                continue
            rows = [source.shape[0] for source in sources[name]]
            weight = make((sum(rows), *sources[name][0].shape[1:]), dtype=wanted, device=device)
            for source, part in zip(sources[name], weight.split(rows), strict=True):
                self._fill(part, source)
            yield name, weight
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse weights of which some are of another file than the header that was checked.

        Raises:
            OSError: a file was written, replaced or removed meanwhile.
        """
        for file, stamp in self.stamps.items():
            if stamp_of(file) != stamp:
                raise OSError(f"{file}: changed since its header was checked; run it again")

    def _fill(self, rows: Tensor, source: Source) -> None:
        if source.num_heads is None:
            self.read_into(source.name, rows)
            return
        weight = short_lived_tensor(source.shape, rows.dtype)
        self.read_into(source.name, weight)
        rows.copy_(half_split_rows(weight, source.num_heads))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse files whose headers are not exactly the model that the config describes.

        Args:
            shapes: Of all tensors in the files, except those that are left out on purpose.
        """
        self.stamps = {file: stamp_of(file) for file in self.weight_files}
        if self.config.num_layers > len(shapes):
            cause = f"{self.config.num_layers} layers, but only {len(shapes)} tensors"
            raise UserError(f"{self.path}: {cause}; {self.cure}")
        expected = {s.name: s.shape for sources in self.sources().values() for s in sources}
        faults = {
            "missing": [name for name in expected if name not in shapes],
            "unknown": [name for name in shapes if name not in expected],
            "of the wrong shape": [
                f"{name} {shapes[name]}, not {shape}"
                for name, shape in expected.items()
                if name in shapes and shapes[name] != shape
            ],
        }
        causes = [
            f"tensors {fault} ({len(names)}): {', '.join(printable(name) for name in names[:3])}"
            for fault, names in faults.items()
            if names
        ]
        if causes:
            raise UserError(f"{self.path}: {'; '.join(causes)}; {self.cure}")

    def sources(self) -> dict[str, list[Source]]:
        """For each parameter of our model the tensors of the file that are stacked into it."""
        errors = (RuntimeError, TypeError, OverflowError)  # sizes beyond 64 bits
        with refusing(self.path, errors, COMPLETE), torch.device("meta"):
            parameters = dict(Transformer(self.config).named_parameters())
        return {name: self._sources_of(name, tuple(p.shape)) for name, p in parameters.items()}

    def _sources_of(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        layer = re.search(r"\d+", name)
        stem, _, leaf = name.rpartition(".")  # leaf: weight or bias
        template = re.sub(r"\d+", "{}", stem)
        names = [
            f"{file_name.format(layer and layer[0])}.{leaf}" for file_name in self.names[template]
        ]
        heads = [self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads]
        if template.endswith("qkv_proj"):
            reorder = [*heads[:2], None] if self.interleaved_rope else [None] * 3
            shapes = [(count * self.config.head_dim, *shape[1:]) for count in heads]
            return [Source(*each) for each in zip(names, shapes, reorder, strict=True)]
        return [Source(each, (shape[0] // len(names), *shape[1:])) for each in names]


def load_headers(
    files: Iterable[Path], read_header: Callable[[Path], dict[str, StoredTensor]], cure: str
) -> list[dict[str, StoredTensor]]:
    """`load_header` of each file; all that are refused are told together."""
    faults = Faults()
    headers = [faults.check(load_header, file, read_header, cure) for file in files]
    faults.refuse()
    return [header for header in headers if header is not None]


def load_header(
    file: Path, read_header: Callable[[Path], dict[str, StoredTensor]], cure: str
) -> dict[str, StoredTensor]:
    """The places of all tensors in one file; none is read, and no code out of it runs.

    Args:
        read_header: of the file's kind; refuses with DamagedFile.
        cure: for a file that cannot be read.

    Raises:
        UserError: the file is damaged, or holds anything but dense tensors of `DTYPES`.
    """
    check_regular([file])
    with refusing(file, (DamagedFile, OSError), cure):
        header = read_header(file)
    for name, tensor in header.items():
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(dtype) for dtype in DTYPES)
            raise UserError(
                f"{file}: {printable(name)} is {tensor.dtype}; convert it to one of {kinds}"
            )
    return header


def stamp_of(file: Path) -> tuple[int, int]:
    """What changes when a file is written or replaced: its size, and its time in ns."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def listed(files: Sequence[Path]) -> str:
    """The names of some files on one line, however many there are."""
    names = ", ".join(printable(file.name) for file in files[:NUM_LISTED])
    return f"{names} and {len(files) - NUM_LISTED} more" if len(files) > NUM_LISTED else names


def main_dtype(sizes: Sequence[tuple[torch.dtype | None, int]]) -> torch.dtype | None:
    """The dtype that most of the (dtype, bytes) pairs have, by bytes."""
    totals: Counter[torch.dtype | None] = Counter()
    for dtype, num_bytes in sizes:
        totals[dtype] += num_bytes
    return totals.most_common(1)[0][0]


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
