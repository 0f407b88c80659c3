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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import accounting
import fetch
import machine
from checkpoint import Checkpoint, open_checkpoint
from config import GenerateConfig, UserError
from durable import check_writable
from engine import Engine, Sampling, load_model
from kv_cache import describe_caches, make_caches
from measure import Recording, Runner
from report import Measured, make_row
from request import Request, resolve_request
from results import Row, append, format_row, to_json
from summary import size_text, summary
from tokenizer import Tokenizer

log = logging.getLogger("kv_fast")


def main(config: GenerateConfig) -> None:
    """Check the request, load, warm up, measure, print, append one row."""
    if config.write_result:
        check_writable(config.write_result)
    checkpoint = open_checkpoint(fetch.resolve(config.checkpoint_path))
    check_apart(config.write_result, checkpoint)
    tokenizer = checkpoint.tokenizer()
    request = resolve_request(config, checkpoint.config, tokenizer)
    device = machine.prepare_device(config.device, config.threads)
    memory = promise_memory(config, request, checkpoint, device)
    runner = make_runner(config, checkpoint, request, tokenizer, device)
    printer = TextPrinter(tokenizer, request.prompt_ids) if streams_text(config) else None
    measured = measure(config, runner, memory, printer)
    if printer:
        printer.finish()
    row = make_row(config, checkpoint, runner, measured)
    texts = [text_of(r.ids, request.prompt_ids, tokenizer) for r in measured.recordings]
    report(config, row, texts)


def check_apart(write_result: Path | None, checkpoint: Checkpoint) -> None:
    """Refuse to append a row to a checkpoint's own files."""
    if write_result and checkpoint.path.resolve() in (
        write_result.resolve(),
        write_result.resolve().parent,
    ):
        raise UserError(f"--write_result {write_result}: is part of the checkpoint; name another")


def shows_text(config: GenerateConfig) -> bool:
    """Text goes to stdout unless the prompt is noise or stdout is for the JSON document."""
    return config.prompt_tokens is None and not config.json


def streams_text(config: GenerateConfig) -> bool:
    """A single sample without a row to keep is shown as it comes, others when the row is safe."""
    return shows_text(config) and config.num_samples == 1 and config.write_result is None


class TextPrinter:
    """Prints a prompt and the text of ids after it, as far as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._unseen = tokenizer.decode(prompt_ids)
        self._stream = tokenizer.stream(prompt_ids)

    def show(self, token_id: int) -> None:
        print(self._unseen + self._stream.push(token_id), end="", flush=True)
        self._unseen = ""

    def finish(self) -> None:
        print(self._stream.flush(), flush=True)


def text_of(ids: Sequence[int], prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt and the text of new ids after it."""
    stream = tokenizer.stream(prompt_ids)
    return tokenizer.decode(prompt_ids) + "".join(map(stream.push, ids)) + stream.flush()


def promise_memory(
    config: GenerateConfig, request: Request, checkpoint: Checkpoint, device: torch.device
) -> machine.PeakMemory:
    """Say what the run will hold before any of it is allocated, and open its memory windows.

    Raises:
        UserError: it cannot fit.
    """
    parts = accounting.expected_bytes(request, checkpoint.config, getattr(torch, config.dtype))
    check_memory(parts, checkpoint.path, device)
    if config.compile:
        # Its modules take 0.2 GB: part of the program, as torch is, not of what the run holds.
        importlib.import_module("torch._inductor.compile_fx")
    memory = machine.PeakMemory(device)
    whole = parts | {"Python and torch": memory.base_bytes}
    log.info("expected peak memory: %s", accounting.describe_bytes(whole))
    return memory


def check_memory(parts: Mapping[str, int], path: Path, device: torch.device) -> None:
    """Refuse a run that cannot fit, with the numbers."""
    free = machine.free_bytes(device)
    if sum(parts.values()) > free:
        raise UserError(
            f"{path}: needs {accounting.describe_bytes(parts)}, {size_text(free / 1e9)} free;"
            " fewer slots (--cache_size, --max_new_tokens) or --kv_cache_quantization need less"
        )


def make_runner(
    config: GenerateConfig,
    checkpoint: Checkpoint,
    request: Request,
    tokenizer: Tokenizer,
    device: torch.device,
) -> Runner:
    """Load the weights and allocate the caches."""
    model = load_model(checkpoint, device, getattr(torch, config.dtype))
    caches = make_caches(model.config, request.formats, 1, request.cache_len, device)
    engine = Engine(model, caches, compile=config.compile, prefill_chunk=config.prefill_chunk)
    log.info("%s, attention: %s", describe_caches(caches), engine.attention)
    vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)
    stop_ids = frozenset() if config.ignore_eos else tokenizer.stop_ids
    log.info("stop ids: %s", ", ".join(map(str, sorted(stop_ids))) or "none")
    return Runner(
        engine=engine,
        request=request,
        sampling=Sampling(vocab_size, config.temperature, config.top_k),
        stop_ids=stop_ids,
    )


def measure(
    config: GenerateConfig, runner: Runner, memory: machine.PeakMemory, printer: TextPrinter | None
) -> Measured:
    """Fill to depth, warm up twice, then take the samples.

    The peak is that of the fill and of the samples: loading and compiling are left out.
    """
    busy_cores = machine.busy_cores()
    memory.reset()
    runner.fill()
    fill_peak_bytes = memory.peak_bytes()
    log.info("warming up%s", ", compiling the decode step" if config.compile else "")
    first_s = runner.warm_up()
    memory.reset()
    second_s = runner.warm_up()
    return Measured(
        time=datetime.now(UTC),
        busy_cores=busy_cores,
        recordings=take_samples(config, runner, printer),
        compile_s=max(0.0, first_s - second_s) if config.compile else None,
        base_bytes=memory.base_bytes,
        peak_bytes=max(fill_peak_bytes, memory.peak_bytes()),
        peak_is_sampled=memory.is_sampled,
        is_streamed=printer is not None,
    )


def take_samples(
    config: GenerateConfig, runner: Runner, printer: TextPrinter | None
) -> list[Recording]:
    """The timed runs; sample i depends on seed + i alone."""
    recordings = []
    for index in range(config.num_samples):
        recordings.append(Recording())
        try:
            runner.sample(config.seed + index, recordings[-1], printer.show if printer else None)
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
