"""The plan of a sweep: what each case will hold and take. A process of its own, asked by sweep.py.

    python scripts/sweep_plan.py < ORDER      JSON both ways: see sweep_cases.py

Reads headers of checkpoints, tokenizers and earlier rows; no weights.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import eval_plan
import machine
import preflight
from accounting import PROGRAM, describe_bytes
from checkpoint import Checkpoint
from config import RANDOM_PREFIX, Faults, UserError, flag, parse, printable, repro_command
from eval_config import EvalConfig
from generate import open_memory
from generate_config import GenerateConfig
from programs import PROGRAMS
from request import PLAIN_FORMAT
from results import Row, read_rows
from scripts.sweep_cases import FITS, Order, Plan, Planned, read_order
from scripts.sweep_rough import quality_s, speed_s
from scripts.sweep_sections import MAX, Case, section_cases
from scripts.sweep_time import Work, from_rows, rows_alike
from summary import size_text
from tokenizer_base import Tokenizer
from weight_formats import describe_formats, parameter_shapes

MAX_TILE = 128
"""`MAX` is a multiple of it."""

Config = GenerateConfig | EvalConfig


@dataclass(frozen=True, kw_only=True)
class SweepPlanConfig:
    """Plan the order on stdin; JSON both ways."""

    debug: bool = flag(False, help="show the traceback of an error")


class LeftOut(Exception):
    """The checkpoint has no such case."""


def make_plan(order: Order) -> Plan:
    """Look at all cases of an order."""
    planned: dict[str, Planned] = {}
    left_out: dict[str, int] = {}
    rows = read_rows(Path(order.results)) if Path(order.results).is_file() else []
    for case in all_cases(order):
        try:
            found = plan_case(case, rows)
            planned.setdefault(f"{len(planned)}" if case.section is None else found.repro, found)
        except LeftOut as cause:
            line = f"{case.section}: {cause}"
            left_out[line] = left_out.get(line, 0) + 1
    lines = (f"left out of {line} ({count} cases)" for line, count in left_out.items())
    return Plan(cases=tuple(planned.values()), left_out=tuple(lines))


def all_cases(order: Order) -> Iterator[Case]:
    device = machine.pick_device(order.common.get("device")).type
    for name in order.sections:
        yield from section_cases(name, device, order.common, order.extra)
    yield from order.cases


def plan_case(case: Case, rows: list[Row]) -> Planned:
    """One case; what is wrong with it stands in `refused`.

    Raises:
        LeftOut: it is beyond the checkpoint.
    """
    words, repro = case.flags, ""
    try:
        if case.section is not None:
            words = resolve_max(case)
        config: Any = parse(PROGRAMS[case.program], words)
        repro = repro_command(case.program, config)
        look = look_at_speed if isinstance(config, GenerateConfig) else look_at_quality
        found = look(config, rows)
    except UserError as error:
        found = {"refused": "; ".join(error.args), "columns": least_columns(case)}
    return Planned(
        section=case.section, program=case.program, words=tuple(words), repro=repro, **found
    )


def least_columns(case: Case) -> dict[str, Any]:
    """Columns of the row of a case that its checkpoint does not allow; none of a wrong request."""
    try:
        config: Any = parse(PROGRAMS[case.program], case.flags)
        checkpoint, _ = found_model(config.checkpoint_path)
    except UserError:
        return {}
    device = machine.pick_device(config.device)
    return {
        "kind": kind_of(config),
        "model": printable(checkpoint.name),
        **system(device),
    }


def kind_of(config: Config) -> str:
    """Of the row."""
    if isinstance(config, GenerateConfig):
        return "speed"
    return "quality" if config.command == "kl" else "needle"


def resolve_max(case: Case) -> tuple[str, ...]:
    """The flags with a number for `MAX`.

    Raises:
        LeftOut: more tokens or slots than the checkpoint's context.
    """
    least: Any = parse(
        PROGRAMS[case.program], ["1" if word == MAX else word for word in case.flags]
    )
    context = found_model(least.checkpoint_path)[0].config.max_seq_len
    if MAX in case.flags and (least.checkpoint_path or "").startswith(RANDOM_PREFIX):
        raise LeftOut(f"random weights have no trained context to fill: {MAX}")
    room = (context - tokens_of(least) + 1) // MAX_TILE * MAX_TILE
    words = tuple(str(room) if word == MAX else word for word in case.flags)
    config: Any = parse(PROGRAMS[case.program], words) if room > 0 else least
    slots = config.cache_size or 0 if isinstance(config, GenerateConfig) else 0
    if room <= 0 or max(tokens_of(config), slots) > context:
        raise LeftOut(f"more than the checkpoint's context of {context} tokens")
    return words


def tokens_of(config: Any) -> int:
    """That a case asks for, a text not counted."""
    if isinstance(config, EvalConfig):
        return eval_plan.longest(config)
    return config.depth + (config.prompt_tokens or 0) + config.max_new_tokens


@functools.cache
def found_model(checkpoint_path: str | None) -> tuple[Checkpoint, Tokenizer]:
    """What `preflight.find_model` finds; cases of one checkpoint open it once.

    Raises:
        UserError: all that is wrong with it.
    """
    faults = Faults()
    checkpoint, tokenizer = preflight.find_model(faults, checkpoint_path, "")
    faults.refuse()
    assert checkpoint and tokenizer
    return checkpoint, tokenizer


def find_model(faults: Faults, checkpoint_path: str | None, text: str) -> tuple[Any, Any]:
    return faults.check(found_model, checkpoint_path) or (None, None)


def look_at_speed(config: GenerateConfig, rows: list[Row]) -> dict[str, Any]:
    """Fields of `Planned` for a case of generate.py."""
    faults = Faults()
    plan = preflight.make_plan(config, faults, find_model)
    faults.refuse()
    request = plan.request
    sizes = {**plan.expected_bytes, PROGRAM: program_bytes(config, plan)}
    columns = {
        **columns_of(plan, config, request.formats, sizes),
        "depth": request.depth,
        "batch_size": 1,
        "prompt_len": len(request.prompt_ids),
        "cache_len": request.cache_len,
        "prefill_chunk": request.prefill_chunk,
        "depth_fill": request.depth_fill,
        "ignore_eos": config.ignore_eos,
        "compile": config.compile,
        "prompt_sha": request.prompt_sha,
    }
    work = Work(
        fill=len(request.depth_ids),
        prompt_len=len(request.prompt_ids),
        depth=request.depth,
        new_tokens=request.new_tokens,
        num_samples=config.num_samples,
        load_gb=sizes["weights"] / 1e9,
        compiles=config.compile,
    )
    told_s = from_rows(work, rows_alike(rows, columns))
    time = {"seconds": speed_s(work, plan, config) if told_s is None else told_s}
    return fields(plan.device, columns, sizes) | time | {"is_rough": told_s is None}


def look_at_quality(config: EvalConfig, _rows: list[Row]) -> dict[str, Any]:
    """Fields of `Planned` for a case of eval.py."""
    plan = eval_plan.make_plan(config, find_model)
    sizes = dict(plan.expected_bytes)
    columns = {
        **columns_of(plan, config, plan.formats, sizes),
        "reference": config.reference,
        "context": config.context,
        "prefill_chunk": config.prefill_chunk,
        "cache_len": plan.cache_len,
    }
    return fields(plan.device, columns, sizes) | {"seconds": quality_s(config, plan, sizes)}


def columns_of(
    plan: Any, config: Config, formats: tuple[str, str], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Columns of the row of any kind, before it ran."""
    dense = PLAIN_FORMAT[config.dtype]
    shapes = parameter_shapes(plan.checkpoint.config)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    return {
        "kind": kind_of(config),
        "model": printable(plan.checkpoint.name),
        "k_format": formats[0],
        "v_format": formats[1],
        "weight_format": describe_formats(
            {name: plan.weight_formats.get(name, dense) for name in matrices}
        ),
        "dtype": config.dtype,
        "expected_gb": sum(sizes.values()) / 1e9,
        **system(plan.device),
    }


def fields(
    device: torch.device, columns: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Fields of `Planned` that follow from the sizes; refused where they do not fit."""
    free = machine.free_bytes(device)
    refused = ""
    if sum(sizes.values()) > FITS * free:
        needed = {name: size for name, size in sizes.items() if size}
        refused = f"needs {describe_bytes(needed)}, {size_text(free / 1e9)} free"
    return {
        "device": device.type,
        "columns": columns,
        "sizes": sizes,
        "free_bytes": free,
        "refused": refused,
    }


@functools.cache
def system(device: torch.device) -> dict[str, Any]:
    return machine.system_columns(device)


BASES: dict[bool, int] = {}


def program_bytes(config: GenerateConfig, plan: preflight.Plan) -> int:
    """Resident before anything is loaded: as generate.py finds it, here once."""
    if config.compile not in BASES:
        BASES[config.compile] = open_memory(config, plan).base_bytes
    return BASES[config.compile]


def main(config: SweepPlanConfig) -> None:
    """Read the order, print the plan."""
    logging.getLogger("kv_fast").setLevel(logging.ERROR)  # notes are those of the cases
    print(json.dumps(dataclasses.asdict(make_plan(read_order(sys.stdin.read())))))


if __name__ == "__main__":
    sys.exit(run(main, SweepPlanConfig))
