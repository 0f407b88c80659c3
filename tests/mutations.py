"""Seeded damage to the files of a tiny checkpoint, and what must hold whatever the damage is.

    PYTHONPATH=. python tests/mutations.py KIND FIRST END

runs the cases FIRST .. END - 1 of a kind in an address space that is little larger than they need.
It prints each number before the case, so that the last one names what a process died of.
"""

import dataclasses
import faulthandler
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import safetensors
import torch
from checkpoint_kinds import tiny
from damage import damage_bytes, damage_json, damage_quantized, damage_safetensors
from other_readers import read_bin, read_gguf, read_pth, read_quantized, read_safetensors
from torch import Tensor

from checkpoint import Checkpoint, open_checkpoint
from checkpoint_quantized import KEY
from config import UserError, describe
from model_config import ModelConfig, RopeScaling
from rope import rope_frequencies
from scripts.tiny_checkpoint import (
    TINY,
    gguf_settings,
    hf_config,
    interleaved_rows,
    tensor_names,
    weights_of,
)

SMALL = replace(TINY, num_layers=1, hidden_size=16, intermediate_size=8, head_dim=4)
# All matrices have rows of whole blocks of 32 channels.
BLOCKS = replace(SMALL, hidden_size=32, intermediate_size=32, num_heads=8, num_kv_heads=2)
LIMIT_S = 5.0
SPARE_BYTES = 64 << 20  # beside twice the file


def check_json(file: Path, expected: Mapping[str, object]) -> None:
    """What was read of a config is what stands in it, where it stands there."""
    check_values(json.loads(file.read_text()), expected)


def check_values(values: Mapping[str, Any], expected: Mapping[str, object]) -> None:
    not_given = [("vocab_size", -1), ("model_type", values.get("model_type"))]
    for key, value in expected.items():
        found = values.get(key)
        if isinstance(value, dict) and isinstance(found, dict):
            check_values(found, value)
        elif found is not None and (key, found) not in not_given:
            assert found == value or float(found) == value, key


def check_gguf(file: Path, expected: Mapping[str, object]) -> None:
    fields = gguf.GGUFReader(file).fields
    for key, value in expected.items():
        if key in fields:
            found = fields[key].contents()
            assert found == value or abs(found - value) < 1e-6 * abs(value), key


@dataclass(frozen=True)
class Kind:
    """A file of a format: how it is damaged, and how the same weights are read by others.

    Attributes:
        spread: elements that one byte can change.
    """

    format: str
    file: str
    damage: Callable[[bytes, Random], bytes]
    read: Callable[[Path], dict[str, Tensor]]
    config: ModelConfig = SMALL
    spread: int = 1


HF_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
KINDS = {
    "safetensors": Kind("hf", "model.safetensors", damage_safetensors, read_safetensors),
    "shard": Kind(
        "hf-shards", "model-00002-of-00003.safetensors", damage_safetensors, read_safetensors
    ),
    "index": Kind("hf-shards", "model.safetensors.index.json", damage_json, read_safetensors),
    "bin": Kind("hf-bin", "pytorch_model.bin", damage_bytes, read_bin),
    "bin-index": Kind("hf-bin-shards", "pytorch_model.bin.index.json", damage_json, read_bin),
    "pth": Kind("meta", "consolidated.00.pth", damage_bytes, read_pth),
    "params.json": Kind("meta", "params.json", damage_json, read_pth),
    "tokenizer.model": Kind("meta", "tokenizer.model", damage_bytes, read_pth),
    "gguf": Kind("gguf", "tiny.gguf", damage_bytes, read_gguf),
    "gguf-part": Kind("gguf-parts", "tiny-00001-of-00002.gguf", damage_bytes, read_gguf),
    **{name: Kind("hf", name, damage_json, read_safetensors) for name in HF_FILES},
    **{
        f"config.json-{scaling.kind}": Kind(
            "hf", "config.json", damage_json, read_safetensors, replace(SMALL, rope_scaling=scaling)
        )
        for scaling in (
            RopeScaling(kind="llama3", factor=8.0),
            RopeScaling(kind="yarn", factor=4.0),
        )
    },
    **{
        f"gguf-{name}": Kind(f"gguf-{name}", "tiny.gguf", damage_bytes, read_gguf, BLOCKS, 32)
        for name in ("q8_0", "q4_0", "q4_1")
    },
    "quantized": Kind(
        "quantized", "model.safetensors", damage_quantized, read_quantized, BLOCKS, 32
    ),
    "quantized-tokenizer": Kind(
        "quantized-gguf", "tokenizer/tokenizer.gguf", damage_bytes, read_quantized, BLOCKS
    ),
}


class Case:
    """A small checkpoint of one kind, ready to be damaged again and again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.kind = name, KINDS[name]
        self.path = tiny(self.kind.format, folder, self.kind.config)
        self.folder = self.path.parent if self.path.is_file() else self.path
        self.file = self.folder / self.kind.file
        self.data = self.file.read_bytes()
        self.num_refused = self.num_damaged = 0
        self.original: Mapping[str, Tensor] = {}
        undamaged = open_checkpoint(self.path)
        self.original = weights_of(undamaged)
        assert not first_other(
            self.as_stored(undamaged, self.original), self.kind.read(self.folder)
        )
        assert (self.fault(self.data), self.num_refused) == ("", 0)

    def run(self, number: int) -> str:
        """What is wrong with the answer to case `number`; '' for nothing."""
        return self.fault(self.kind.damage(self.data, Random(f"{self.name} {number}")))

    def fault(self, data: bytes) -> str:
        self.file.write_bytes(data)
        is_in_place = len(data) == len(self.data)
        pairs = zip(data, self.data, strict=True) if is_in_place else ()
        self.num_damaged = sum(new != old for new, old in pairs)
        start, start_bytes = time.process_time(), peak_bytes(reset=True)
        answer = self.answer()
        seconds, used = time.process_time() - start, peak_bytes() - start_bytes
        if seconds > LIMIT_S:
            return f"{seconds:.1f} s"
        if used > 2 * len(data) + SPARE_BYTES:
            return f"{used} bytes for a file of {len(data)}"
        return answer

    def answer(self) -> str:
        """What is wrong with loading all of the checkpoint, or with the line that refuses it."""
        try:
            loaded = open_checkpoint(self.path)
            weights = weights_of(loaded)
            kept = {name: loaded.read_kept(name).dequantize() for name in loaded.kept}
            tokenizer = loaded.tokenizer()
            tokenizer.decode(tokenizer.encode("Hello 12\n  thé 🦙"))
        except UserError as error:
            self.num_refused += 1
            line = describe(error)
            is_named = str(self.folder) in line and "\n" not in line
            return "" if is_named else f"names no file: {line}"
        except Exception as error:  # any other is a traceback
            return f"{type(error).__name__}: {error}"
        return self.difference(loaded, weights) or first_other(kept, in_bf16(loaded))

    def difference(self, loaded: Checkpoint, weights: Mapping[str, Tensor]) -> str:
        """Where the config or a tensor is not what others read out of the same files.

        Others may refuse, or read wrongly, what does no harm here: then no more elements than bytes
        may be other than before the damage.
        """
        try:
            self.check_config(loaded)
        except Exception as error:
            return f"config: {type(error).__name__}: {error}"
        if self.num_changed(weights) <= self.kind.spread * self.num_damaged:
            return ""
        try:
            others = self.kind.read(self.folder)
        except Exception as error:
            return f"taken, though others do not: {type(error).__name__}: {error}"
        return first_other(self.as_stored(loaded, weights), others)

    def as_stored(self, loaded: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the format's own names, with its order of rows."""
        family = self.kind.format.partition("-")[0]
        if family == "quantized":
            return in_bf16(loaded)
        rows = interleaved_rows if family in ("meta", "gguf") else lambda weight, *_: weight
        return {
            getattr(names, family): rows(weights[names.hf], loaded.config, names.hf)
            for names in tensor_names(loaded.config)
        }

    def num_changed(self, weights: Mapping[str, Tensor]) -> float:
        """How many elements differ from those of the undamaged file."""
        if {n: w.shape for n, w in weights.items()} != {
            n: w.shape for n, w in self.original.items()
        }:
            return float("inf")
        pairs = ((bits(w), bits(self.original[name])) for name, w in weights.items())
        return sum(int((found != original).sum()) for found, original in pairs)

    def check_config(self, loaded: Checkpoint) -> None:
        assert rope_frequencies(loaded.config).isfinite().all(), "rope"
        if self.kind.file == "config.json":
            expected = hf_config(loaded.config)
            if self.name == "config.json-yarn":  # which extends the length that stands there
                del expected["max_position_embeddings"]
            check_json(self.file, expected)
        if self.name == "params.json":
            ours = {"dim": "hidden_size", "n_layers": "num_layers", "n_heads": "num_heads"}
            ours |= {"n_kv_heads": "num_kv_heads"}
            ours |= {key: key for key in ("vocab_size", "norm_eps", "rope_theta", "max_seq_len")}
            check_json(self.file, {key: getattr(loaded.config, ours[key]) for key in ours})
        if self.name.startswith("gguf"):
            check_gguf(self.file, gguf_settings(loaded.config))
        if self.name == "quantized":
            with safetensors.safe_open(self.file, "pt") as opened:
                values = json.loads(opened.metadata()[KEY])["config"]
            check_values(values, dataclasses.asdict(loaded.config))


def in_bf16(loaded: Checkpoint) -> dict[str, Tensor]:
    """All weights under our own names."""
    return dict(loaded.weights("cpu", torch.bfloat16))


def first_other(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Names the first tensor that is not, rounded to bf16, the one expected."""
    for name, weight in found.items():
        if not torch.equal(bits(weight.bfloat16()), bits(expected[name].bfloat16())):
            return f"{name} differs"
    return ""


def bits(weight: Tensor) -> Tensor:
    return weight.masked_fill(weight.isnan(), torch.nan).view(torch.int16)


def peak_bytes(*, reset: bool = False) -> int:
    """The largest resident memory since the last reset; 0 where Linux does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(name: str, first: int, end: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, Path(folder))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2 * len(case.data) + 4 * SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in range(first, end):
            print(number, end=" ", flush=True)
            faulthandler.dump_traceback_later(20 * LIMIT_S, exit=True)
            if fault := case.run(number):
                print(f"\nFAULT {name} {number}: {fault}", flush=True)
        faulthandler.cancel_dump_traceback_later()
    print(f"\n{case.num_refused} of {end - first} refused")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
