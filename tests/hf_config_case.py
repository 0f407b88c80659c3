"""Rope scalings of config.json and variants of the tiny model, for tests."""

import dataclasses
import math

from model_config import ModelConfig, RopeScaling
from scripts.tiny_checkpoint import TINY

ORIGINAL = 64  # the context before scaling; texts go far beyond it
LINEAR = RopeScaling(kind="linear", factor=4.0)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=ORIGINAL)
YARN = RopeScaling(
    kind="yarn",
    factor=4.0,
    original_max_seq_len=ORIGINAL,
    attention_factor=0.1 * math.log(4.0) + 1.0,
)


def spoken(scaling: RopeScaling, **other: object) -> dict[str, object]:
    """A rope object as config.json has it, with what transformers would fill in left out."""
    values: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return values | other


def changed(**changes: object) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
