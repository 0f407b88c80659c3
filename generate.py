"""Generate text from a Llama checkpoint and measure what the run and its KV cache cost.

python generate.py --kv_cache_quantization --max_new_tokens 4096
"""

import sys

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import importlib
import json
import logging
from datetime import UTC, datetime

import torch

import accounting
import machine
from engine import Engine, Sampling, load_model
from generate_config import GenerateConfig
from interactive import converse
from kv_cache import describe_caches, make_caches
from measure import Recording, Runner
from memory_timeline import MemoryTimeline
from preflight import Plan, preflight
from report import Measured, make_row
from reporting.plot_timeline import save_timeline
from results import Row, append, format_row, to_json
from self_check import is_quantized, self_check
from summary import summary
from text_printer import TextPrinter, text_of

log = logging.getLogger("kv_fast")


def main(config: GenerateConfig) -> int:
    """Check the request, load, warm up, measure, print, append one row; 1 if its check failed.

    An interactive run answers what comes on stdin instead, and has no row.
    """
    plan = preflight(config)
    memory = open_memory(config, plan)
    timeline = MemoryTimeline(plan.device)
    if config.interactive:
        return converse(config, make_runner(config, plan, timeline), plan.tokenizer)
    prompt_ids, tokenizer = plan.request.prompt_ids, plan.tokenizer
    streams = streams_text(config)
    printer = TextPrinter(tokenizer, prompt_ids, is_chat=config.chat) if streams else None
    with timeline.sampling(config.memory_profile):
        runner = make_runner(config, plan, timeline)
        measured = measure(config, runner, memory, timeline, printer)
    row = make_row(config, plan.checkpoint, runner, measured)
    if config.memory_profile:
        parts = {accounting.PROGRAM: memory.base_bytes, **plan.expected_bytes}
        save_timeline(config.memory_profile, timeline.rows(), parts, row)
    recordings = measured.recordings
    texts = [text_of(r.ids, prompt_ids, tokenizer, is_chat=config.chat) for r in recordings]
    report(config, row, texts)
    return int(row.check == "fail")


def shows_text(config: GenerateConfig) -> bool:
    """Text goes to stdout unless the prompt is noise or stdout is for the JSON document."""
    return config.prompt_tokens is None and not config.json


def streams_text(config: GenerateConfig) -> bool:
    """A single sample without a row to keep is shown as it comes, others when the row is safe."""
    return shows_text(config) and config.num_samples == 1 and config.write_result is None


def open_memory(config: GenerateConfig, plan: Plan) -> machine.PeakMemory:
    """Say what the run will hold before any of it is allocated, and open its memory windows."""
    if config.compile:
        # Its modules take 0.2 GB: part of the program, as torch is, not of what the run holds.
        importlib.import_module("torch._inductor.compile_fx")
    memory = machine.PeakMemory(plan.device)
    whole = {**plan.expected_bytes, accounting.PROGRAM: memory.base_bytes}
    log.info("expected peak memory: %s", accounting.describe_bytes(whole))
    return memory


def make_runner(config: GenerateConfig, plan: Plan, timeline: MemoryTimeline) -> Runner:
    """Load the weights and allocate the caches."""
    request = plan.request
    dtype = getattr(torch, config.dtype)
    timeline.begin("load")
    model = load_model(plan.checkpoint, plan.device, dtype, plan.weight_formats)
    timeline.begin("cache")
    caches = make_caches(model.config, request.formats, 1, request.cache_len, plan.device)
    engine = Engine(model, caches, compile=config.compile, prefill_chunk=config.prefill_chunk)
    log.info("%s, attention: %s", describe_caches(caches), engine.attention)
    if plan.weight_formats and not config.compile:
        log.info("quantised weights without compilation: the slow path; leave out --no-compile")
    vocab_size = min(plan.tokenizer.vocab_size, model.config.vocab_size)
    if padding := model.config.vocab_size - vocab_size:
        log.info("%d ids of the vocabulary are not the tokenizer's: never generated", padding)
    stop_ids = frozenset() if config.ignore_eos else plan.tokenizer.stop_ids
    log.info("stop ids: %s", ", ".join(map(str, sorted(stop_ids))) or "none")
    return Runner(
        engine=engine,
        request=request,
        sampling=Sampling(vocab_size, config.temperature, config.top_k),
        stop_ids=stop_ids,
    )


def measure(
    config: GenerateConfig,
    runner: Runner,
    memory: machine.PeakMemory,
    timeline: MemoryTimeline,
    printer: TextPrinter | None,
) -> Measured:
    """Fill to depth, warm up twice, then take the samples.

    The peak is that of the fill and of the samples: loading and compiling are left out.
    """
    busy_cores = machine.busy_cores()
    memory.reset()
    timeline.begin("depth fill")
    runner.fill()
    fill_peak_bytes = memory.peak_bytes()
    timeline.begin("warm-up")
    first_s = runner.warm_up(f"warming up{', compiling the decode step' * config.compile}")
    memory.reset()
    second_s = runner.warm_up("warming up again")
    began = datetime.now(UTC)
    recordings = take_samples(config, runner, printer)
    timeline.add(recordings)
    peak_bytes = max(fill_peak_bytes, memory.peak_bytes())
    checked = None
    if config.check_tokens and is_quantized(runner.request.formats):
        timeline.begin("check")
        checked = self_check(runner, config.check_tokens)
    return Measured(
        time=began,
        busy_cores=busy_cores,
        recordings=recordings,
        compile_s=max(0.0, first_s - second_s) if config.compile else None,
        base_bytes=memory.base_bytes,
        peak_bytes=peak_bytes,
        peak_is_sampled=memory.is_sampled,
        is_streamed=printer is not None,
        checked=checked,
    )


def take_samples(
    config: GenerateConfig, runner: Runner, printer: TextPrinter | None
) -> list[Recording]:
    """The timed runs; sample i depends on seed + i alone."""
    recordings = []
    for index in range(config.num_samples):
        recordings.append(Recording())
        seed, recording = config.seed + index, recordings[-1]
        try:
            if printer:
                runner.sample(seed, recording, printer.show)
                printer.finish()  # before anything else is shown
                continue
            what = f"sample {index + 1} of {config.num_samples}"
            with runner.progress(what, runner.request.new_tokens) as advance:
                runner.sample(seed, recording, advance=advance)
        except KeyboardInterrupt:
            log.info("\nsample %d: %s", index + 1, recordings[-1].statistics())
            raise
    return recordings


def report(config: GenerateConfig, row: Row, texts: list[str]) -> None:
    """Statistics to stderr, the row to its file, text or one JSON document to stdout.

    In this order: a closed stdout must not cost the row, and a full disk not the figures.
    """
    log.info("\n%s\n\n%s\n", summary(row), format_row(row))
    try:
        if config.write_result:
            append(config.write_result, row)
    finally:
        if config.json:
            print(json.dumps(to_json(row) | {"texts": texts}))
        elif shows_text(config) and not streams_text(config):
            print("\n".join(texts))


if __name__ == "__main__":
    sys.exit(run(main, GenerateConfig))
