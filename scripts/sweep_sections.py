"""What `benchmarks.sh` runs: its sections, and the commands of each. Imports no torch."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX = "max"
"""As a value: what the checkpoint's context has room for beside the other flags."""

Grid = Mapping[str, tuple[str, ...]]
"""Values of flags; each combination is a case, the last flag changes fastest."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Cases of one program.

    Attributes:
        flags: of every case, as in a shell.
        models: checkpoints by type of device, where none was asked for.
    """

    about: str
    flags: str
    grids: tuple[Grid, ...]
    program: str = "generate.py"
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One command: the program and its flags; `MAX` may stand among the values."""

    section: str | None
    program: str
    flags: tuple[str, ...]


GREEDY = "--temperature 0 --ignore_eos"
SHAPE = f"--prompt_tokens 512 --max_new_tokens 128 {GREEDY} --num_samples 5 --quantization none"
CACHES = ("bf16", "int8")
LOSSY_CACHES = (
    *(
        "int8-channel",
        "int8",
        "fp8",
        "int8-channel,int4-rotated",
        "int8,int4",
        "int4-channel",
        "int4",
    ),
)
MATRIX = ("random:llama-2-7b", "random:llama-3-8b", "random:llama-3.1-8b")

SECTIONS = {
    "quick": Section(
        about="does all of it work here: under a minute with the default checkpoint",
        flags=f"--prompt_tokens 64 --max_new_tokens 32 {GREEDY} --num_samples 3"
        " --quantization none",
        grids=({"depth": ("0", "256"), "kv_cache_quantization": CACHES},),
    ),
    "kv": Section(
        about="what a quantised cache gives at growing depth",
        flags=SHAPE,
        grids=(
            {
                "depth": ("0", "1024", "4096", "16384", "65536", MAX),
                "kv_cache_quantization": CACHES,
            },
        ),
    ),
    "cache": Section(
        about="slots that are never filled: time must not move, memory must follow the formula",
        flags=SHAPE,
        grids=(
            {
                "cache_size": ("1024", "8192", "32768", "131072"),
                "kv_cache_quantization": CACHES,
            },
        ),
    ),
    "long": Section(
        about="4096 new tokens",
        flags=f"--prompt_tokens 512 --max_new_tokens 4096 {GREEDY} --num_samples 3"
        " --quantization none",
        grids=({"kv_cache_quantization": CACHES},),
    ),
    "prefill": Section(
        about="prompts and the chunks they are cut into",
        flags=f"--max_new_tokens 2 {GREEDY} --num_samples 5 --quantization none",
        grids=tuple(
            {"prompt_tokens": (length,), "prefill_chunk": chunks, "kv_cache_quantization": CACHES}
            for length, chunks in (
                ("512", ("512",)),
                ("2048", ("512", "2048")),
                ("8192", ("512", "2048", "8192")),
                (MAX, ("512", "2048", "8192")),
            )
        ),
    ),
    "weights": Section(
        about="weights of 16, 8 and 4 bits, each with both caches",
        flags=f"--prompt_tokens 512 --max_new_tokens 128 {GREEDY} --num_samples 5",
        grids=(
            {
                "depth": ("0", "4096"),
                "quantization": ("none", "int8", "int4"),
                "kv_cache_quantization": CACHES,
            },
        ),
    ),
    "quality": Section(
        about="what caches and weights of 8 and 4 bits cost in accuracy",
        flags="",
        grids=(
            {
                "": ("kl",),
                "context": ("512",),
                "kv_cache_quantization": LOSSY_CACHES,
            },
            {
                "": ("kl",),
                "context": ("2048", "8192", "32768", MAX),
                "kv_cache_quantization": ("int8", "int8-channel"),
            },
            {"": ("needle",), "context": ("512", "2048"), "kv_cache_quantization": ("int8",)},
            {
                "": ("kl",),
                "reference": ("weights",),
                "context": ("512",),
                "quantization": ("int8", "int4"),
            },
        ),
        program="eval.py",
    ),
    "legacy": Section(
        about="the matrix of torchao's Llama benchmark: three models, growing cache sizes",
        flags="--max_new_tokens 200 --ignore_eos --num_samples 5",
        grids=(
            {
                "cache_size": ("8192", "16384", "32768", "65536", "131072"),
                "kv_cache_quantization": CACHES,
            },
        ),
        models={"cuda": MATRIX, "cpu": ("random:smollm2-135m", *MATRIX)},
    ),
    "million": Section(
        about="contexts up to a million tokens: peak memory and speed (filled with random K, V)",
        flags=f"--prompt_tokens 16 --max_new_tokens 32 {GREEDY} --num_samples 3"
        " --depth_fill synthetic",
        grids=(
            {
                "depth": ("100000", "200000", "500000", "1000000"),
                "kv_cache_quantization": CACHES,
            },
        ),
        models={"cuda": ("random:llama-3.1-8b",), "cpu": ("random:smollm2-4-layers",)},
    ),
}


def section_cases(
    name: str, device: str, common: Mapping[str, str], extra: Sequence[str] = ()
) -> Iterator[Case]:
    """The cases of a section, in the order of its grids.

    Args:
        device: type of the one they will run on.
        common: flags of every case; a checkpoint_path there replaces those of the section.
        extra: words behind all flags.
    """
    section = SECTIONS[name]
    models = section.models.get(device, section.models.get("cpu", ()))
    every = [{"checkpoint_path": model, **common} for model in models] or [{**common}]
    if "checkpoint_path" in common:
        every = [{**common}]
    fixed = (*shlex.split(section.flags), *extra)
    for flags, grid in itertools.product(every, section.grids):
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True)) | flags
            yield Case(name, section.program, (*words(chosen), *fixed))


def words(flags: Mapping[str, str]) -> Iterator[str]:
    """Flags as words of a command line; the one without a name is a word alone."""
    for name, value in flags.items():
        yield from (f"--{name}", value) if name else (value,)
