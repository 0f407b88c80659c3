"""Time of decode attention over stored tokens, beside SDPA and the origin's way.

    python scripts/bench_attention.py [--filled 1024,4096] [--heads 32/8/128] [--formats int8,bf16]

All methods of a line run in turns in one process; a figure is the median over --repeats.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import machine
from config import UserError, flag, printable, repro_command
from kernels import ops
from kv_formats import FORMATS
from scripts import attention_methods as methods
from scripts.attention_methods import Case, Heads, Method, Pass
from scripts.attention_table import table
from stats import linear_fit, median, spread_pct

ROOT = Path(__file__).resolve().parent.parent

log = logging.getLogger("kv_fast")

MAX_COUNT = 2**40

MEMORY_SHARE = 4
"""All layers of all methods of a case together may take free memory / MEMORY_SHARE."""


@dataclass(frozen=True, kw_only=True)
class BenchAttentionConfig:
    """Time of decode attention over stored tokens, beside SDPA and the origin's way."""

    filled: str = flag("1024,2048,4096,8192,16384,32768", help="stored tokens, a comma list")
    heads: str = flag("32/8/128,9/3/64", help="query heads / KV heads / head_dim, a comma list")
    formats: str = flag("bf16,int8", help="of K and V, a comma list; K+V where they differ")
    batch_size: int = flag(1, minimum=1, maximum=MAX_COUNT, help="sequences")
    queries: int = flag(1, minimum=1, maximum=ops.MAX_QUERIES, help="new tokens per sequence")
    repeats: int = flag(15, minimum=2, help="timed turns of each method")
    device: str | None = flag(
        None, choices=("cpu", "cuda", "mps"), help="default: cuda if there is one, else cpu"
    )
    threads: int | None = flag(None, minimum=1, help="CPU threads; default: physical cores")
    json: bool = flag(False, repro=False, help="print one JSON document instead of a table")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cache at one filled length.

    Attributes:
        heads: Hq/Hkv/D.
        layers: calls of one timed pass, each with its own cache.
        in_cache: a pass reads too little to be sure that it all comes from memory.
        read_bytes: of all parts of K and V, per call.
        time_s: per call, the median of samples_s, which are pass times / layers; spread_pct is the
            distance between their quartiles.
        bandwidth_gb_s: read_bytes / time_s; bandwidth_pct is its share of machine_gb_s, at which
            a plain sum read memory in the same turns.
        sdpa_s, origin_s: the other methods at this length; None where there is no such figure.
        speedup_over_bf16, speedup_over_sdpa, speedup_over_origin: their time / time_s.
    """

    heads: str
    k_format: str
    v_format: str
    filled: int
    layers: int
    in_cache: bool
    read_bytes: int
    time_s: float
    spread_pct: float
    bandwidth_gb_s: float
    machine_gb_s: float
    bandwidth_pct: float
    sdpa_s: float
    origin_s: float | None
    speedup_over_bf16: float | None
    speedup_over_sdpa: float
    speedup_over_origin: float | None
    samples_s: list[float]


@dataclass(frozen=True)
class Timing:
    """What one method took per call in one case."""

    method: Method
    layers: int
    samples_s: list[float]

    @property
    def time_s(self) -> float:
        return median(self.samples_s)


def main(config: BenchAttentionConfig) -> None:
    """Check the request, measure, print a table or a document."""
    heads = split_list("heads", config.heads, parse_heads, "Hq/Hkv/D with Hq a multiple of Hkv")
    lengths = split_list(
        "filled", config.filled, parse_count, f"a whole number from 1 to {MAX_COUNT}"
    )
    known = f"one of {', '.join(FORMATS)} or two as K+V"
    formats = split_list("formats", config.formats, parse_formats, known)
    check_head_dims(heads, formats)
    device = machine.prepare_device(config.device, config.threads)
    cases = [Case(h, n, config.batch_size, config.queries, device) for h in heads for n in lengths]
    free_bytes = machine.free_bytes(device)
    plan = {case: choose_methods(case, formats, free_bytes) for case in cases}
    system = describe_system(config, device)
    with torch.inference_mode():
        timings = {c: time_methods(c, plan[c], config.repeats, free_bytes) for c in cases}
    cells = [
        make_cell(case, each, timings[case])
        for shape in heads
        for each in formats
        for case in cases
        if case.heads == shape
    ]
    document = system | {
        "cells": [asdict(cell) for cell in cells],
        "fits": list(make_fits(cells)),
    }
    print(json.dumps(document) if config.json else table(document))


def split_list(name: str, text: str, parse: Callable[[str], Any], form: str) -> list[Any]:
    """The distinct items of a comma list.

    Raises:
        UserError: `parse` refuses an item; `form` says what it should be.
    """
    try:
        return list(dict.fromkeys(map(parse, text.split(","))))
    except ValueError:
        raise UserError(f"--{name} {printable(text)}: give {form}, several as A,B") from None


def parse_count(text: str) -> int:
    if not 1 <= (count := int(text)) <= MAX_COUNT:
        raise ValueError(text)
    return count


def parse_heads(text: str) -> Heads:
    num_heads, num_kv_heads, head_dim = map(parse_count, text.split("/"))
    if num_heads % num_kv_heads:
        raise ValueError(text)
    return Heads(num_heads, num_kv_heads, head_dim)


def parse_formats(text: str) -> tuple[str, str]:
    names = text.split("+")
    if len(names) > 2 or not set(names) <= set(FORMATS):
        raise ValueError(text)
    return names[0], names[-1]


def check_head_dims(heads: Sequence[Heads], formats: Sequence[tuple[str, str]]) -> None:
    """That every format can store vectors of each head_dim.

    Raises:
        UserError: one cannot.
    """
    for shape in heads:
        for name in (name for pair in formats for name in pair):
            try:
                FORMATS[name].parts(shape.head_dim)
            except ValueError as error:
                raise UserError(f"--heads {shape}: {error}") from None


def choose_methods(case: Case, formats: Sequence[tuple[str, str]], free_bytes: int) -> list[Method]:
    """What is measured in a case: all that fits.

    Raises:
        UserError: one layer of every cache is more than there is memory.
    """
    chosen = [*(methods.stored(case, each) for each in formats), methods.sdpa(case)]
    needed = sum(method.held_bytes for method in chosen)
    if needed > free_bytes:
        raise UserError(
            f"--filled {case.filled}: one layer of {case.heads} in all formats takes"
            f" {needed / 1e9:.2f} GB, {free_bytes / 1e9:.2f} free; give fewer tokens or formats"
        )
    if ("int8", "int8") in formats:
        origin = methods.origin(case)
        held = max(needed + origin.held_bytes, free_bytes // MEMORY_SHARE)
        if held + origin.scratch_bytes <= free_bytes:
            return [*chosen, origin]
        scratch_gb = origin.scratch_bytes / 1e9
        reason = f"its copies of K and V take {scratch_gb:.2f} GB"
        log.info("%s, %d filled: without the origin's way, %s", case.heads, case.filled, reason)
    return chosen


def time_methods(
    case: Case, chosen: Sequence[Method], repeats: int, free_bytes: int
) -> dict[str, Timing]:
    """Every method by its name, and "read", measured in turns."""
    log.info("%s, %d filled", case.heads, case.filled)
    budget_bytes = free_bytes // MEMORY_SHARE // len(chosen)
    layers = [methods.num_layers(method, case.device, budget_bytes) for method in chosen]
    chosen, layers = [*chosen, methods.reading(case.device)], [*layers, 1]
    passes = [Pass(*each, case.device) for each in zip(chosen, layers, strict=True)]
    times_s = methods.interleaved_s(passes, repeats, case.device)
    return {
        method.name: Timing(method, count, [time_s / count for time_s in pass_s])
        for method, count, pass_s in zip(chosen, layers, times_s, strict=True)
    }


def make_cell(case: Case, formats: tuple[str, str], timings: dict[str, Timing]) -> Cell:
    """One line of the table."""
    ours = timings[methods.format_name(formats)]
    peers = {name: timing.time_s for name, timing in timings.items()}
    if formats != ("int8", "int8"):
        peers.pop("origin", None)
    speedups = {name: time_s / ours.time_s for name, time_s in peers.items()}
    read_bytes = ours.method.read_bytes
    bandwidth_gb_s = read_bytes / ours.time_s / 1e9
    machine_gb_s = timings["read"].method.read_bytes / timings["read"].time_s / 1e9
    return Cell(
        heads=str(case.heads),
        k_format=formats[0],
        v_format=formats[1],
        filled=case.filled,
        layers=ours.layers,
        in_cache=ours.layers * read_bytes < methods.evicting_bytes(case.device),
        read_bytes=read_bytes,
        time_s=ours.time_s,
        spread_pct=spread_pct(ours.samples_s),
        bandwidth_gb_s=bandwidth_gb_s,
        machine_gb_s=machine_gb_s,
        bandwidth_pct=100 * bandwidth_gb_s / machine_gb_s,
        sdpa_s=peers["sdpa"],
        origin_s=peers.get("origin"),
        speedup_over_bf16=speedups.get("bf16"),
        speedup_over_sdpa=speedups["sdpa"],
        speedup_over_origin=speedups.get("origin"),
        samples_s=ours.samples_s,
    )


def make_fits(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Time against filled length, a line per heads and format with three lengths or more."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.heads, cell.k_format, cell.v_format), []).append(cell)
    for (heads, k_format, v_format), group in groups.items():
        if len(group) > 2:
            fit = linear_fit([cell.filled for cell in group], [cell.time_s for cell in group])
            yield {
                "heads": heads,
                "k_format": k_format,
                "v_format": v_format,
                "intercept_s": fit.intercept,
                "slope_s_per_token": fit.slope,
                "r_squared": fit.r_squared,
            }


def describe_system(config: BenchAttentionConfig, device: torch.device) -> dict[str, Any]:
    """What measures, and how."""
    return {
        "status": "ok",
        "command": repro_command("scripts/bench_attention.py", config),
        "device_name": machine.device_name(device),
        "device": device.type,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "attention": ops.implementation(device),
        "commit": machine.source_commit(),
        "busy_cores": machine.busy_cores(),
        "batch_size": config.batch_size,
        "queries": config.queries,
        "repeats": config.repeats,
        "evicting_bytes": methods.evicting_bytes(device),
    }


if __name__ == "__main__":
    sys.exit(run(main, BenchAttentionConfig))
