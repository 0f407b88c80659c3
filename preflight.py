"""Everything that can be wrong with a run, looked at before any weight is read, told together."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import accounting
import fetch
import machine
from checkpoint import Checkpoint, find_tokenizer, open_checkpoint
from command import notes_held
from config import RANDOM_PREFIX, Faults, UserError
from durable import check_writable
from generate_config import GenerateConfig
from quantize import planned_formats
from reporting.plot_timeline import check_picture
from request import Request, read_inputs, resolve_request
from summary import size_text
from tokenizer_base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that was found right.

    Attributes:
        weight_formats: layouts of the weights held as codes, by name.
        expected_bytes: what it will hold, by part, beside the program.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    request: Request
    device: torch.device
    weight_formats: Mapping[str, str]
    expected_bytes: Mapping[str, int]


Finder = Callable[[Faults, str | None, str], tuple[Checkpoint | None, Tokenizer | None]]


def find_model(
    faults: Faults, checkpoint_path: str | None, text: str
) -> tuple[Checkpoint | None, Tokenizer | None]:
    """The checkpoint and its tokenizer, tried with `text`, as far as they can be had."""
    path, checkpoint = find_checkpoint(faults, checkpoint_path)
    return checkpoint, faults.check(find_tokenizer, path, checkpoint, text) if path else None


@notes_held()
def preflight(config: GenerateConfig) -> Plan:
    """Check the flags, the machine, the checkpoint's headers, the tokenizer, lengths and memory.

    Headers alone are read, and no tensor is allocated. What can be looked at without what is wrong
    is looked at.

    Raises:
        UserError: all that is wrong, a line each.
    """
    faults = Faults()
    plan = make_plan(config, faults)
    faults.check(check_memory, plan.expected_bytes, plan.checkpoint.path, plan.device)
    faults.refuse()
    return plan


def make_plan(config: GenerateConfig, faults: Faults, find: Finder = find_model) -> Plan:
    """The plan of a request, whether or not it fits into memory; faults that leave one are noted.

    Args:
        faults: notes what is wrong.
        find: finds the model; a sweep keeps what it found for the next case.

    Raises:
        UserError: all that is wrong, a line each, where there can be no plan.
    """
    if config.write_result:
        faults.check(check_writable, config.write_result)
    if config.memory_profile:
        faults.check(check_picture, config.memory_profile)
    device = faults.check(machine.prepare_device, config.device, config.threads)
    inputs = faults.check(read_inputs, config)
    text = inputs.text if inputs else ""
    checkpoint, tokenizer = find(faults, config.checkpoint_path, text)
    request = formats = None
    if checkpoint and inputs:
        faults.check(check_apart, config.write_result, checkpoint)
        formats = faults.check(planned_formats, checkpoint, inputs.scheme)
    if checkpoint and inputs and tokenizer:
        request = faults.check(resolve_request, config, inputs, checkpoint.config, tokenizer)
    if not (checkpoint and tokenizer and request and device) or formats is None:
        faults.refuse()
    assert checkpoint and tokenizer and request and device and formats is not None
    expected_bytes = accounting.expected_bytes(
        request, checkpoint.config, getattr(torch, config.dtype), formats, device
    )
    return Plan(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        request=request,
        device=device,
        weight_formats=formats,
        expected_bytes=expected_bytes,
    )


def find_checkpoint(
    faults: Faults, checkpoint_path: str | None
) -> tuple[Path | None, Checkpoint | None]:
    """The checkpoint and where it is, as far as they can be had; only its headers are read.

    Raises:
        UserError: all that is wrong so far, where something is and the checkpoint is not here yet.
    """
    if not is_here(checkpoint_path):
        faults.refuse()  # before anything is fetched
    path = faults.check(fetch.resolve, checkpoint_path)
    return path, faults.check(open_checkpoint, path) if path else None


def is_here(checkpoint_path: str | None) -> bool:
    """Whether the checkpoint is asked for by path, so that nothing has to be fetched."""
    if checkpoint_path is None:
        return False
    return checkpoint_path.startswith(RANDOM_PREFIX) or os.path.exists(checkpoint_path)  # noqa: PTH110


def check_apart(write_result: Path | None, checkpoint: Checkpoint) -> None:
    """Refuse to append a row to a checkpoint's own files."""
    if write_result and checkpoint.path.resolve() in (
        write_result.resolve(),
        write_result.resolve().parent,
    ):
        raise UserError(f"--write_result {write_result}: is part of the checkpoint; name another")


FEWER_SLOTS = "fewer slots (--cache_size, --max_new_tokens) or --kv_cache_quantization need less"


def check_memory(
    parts: Mapping[str, int], path: Path, device: torch.device, cure: str = FEWER_SLOTS
) -> None:
    """Refuse a run that cannot fit, with the numbers."""
    free = machine.free_bytes(device)
    if sum(parts.values()) > free:
        raise UserError(
            f"{path}: needs {accounting.describe_bytes(parts)}, {size_text(free / 1e9)} free;"
            f" {cure}"
        )
