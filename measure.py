"""How a run is timed: clock stamps, warm-up, samples.

Prefill and decode are never mixed: TTFT ends when the first new id is on the host, and the decode
time covers the N - 1 steps after it.
"""

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import Engine, Sampling, generate
from kv_cache import fill_synthetic_
from machine import synchronize
from progress import Advance, ignore, progress
from request import Request

log = logging.getLogger("kv_fast")

WARMUP_STEPS = 32


class Recording:
    """Ids and clock stamps of one sample, readable at any moment, also after an interruption.

    Attributes:
        tokens: new ids as they came, [1, 1] each, on the device.
        start_s, first_s, last_s: host clock before prefill, with the first and with the last id on
            the host.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.start_s = self.first_s = self.last_s = 0.0

    def run(
        self,
        tokens: Iterator[Tensor],
        stop_ids: Collection[int] = (),
        show: Callable[[int], None] | None = None,
    ) -> None:
        """Take ids until they end or one of `stop_ids` comes, which still counts as generated.

        Without stop_ids and show no id is read between the first and the last, so that nothing
        waits for the device.
        """
        self.start_s = time.perf_counter()
        for token in tokens:
            self.tokens.append(token)
            if not self.first_s:
                self._read(token)
                self.first_s = self.last_s = time.perf_counter()
            if stop_ids or show:
                token_id = self._read(token)
                if show:
                    show(token_id)
                if token_id in stop_ids:
                    break
        int(self.tokens[-1])  # waits until it is there
        self.last_s = time.perf_counter()
        for position, token_id in enumerate(self.ids, start=1):
            _check_finite(token_id, position)

    def _read(self, token: Tensor) -> int:
        token_id = int(token)
        _check_finite(token_id, len(self.tokens))
        return token_id

    @property
    def ids(self) -> list[int]:
        return torch.cat(self.tokens, dim=1)[0].tolist() if self.tokens else []

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    @property
    def decode_s(self) -> float | None:
        """Time of the len(tokens) - 1 decode steps; None where there was none."""
        return self.last_s - self.first_s if len(self.tokens) > 1 else None

    def statistics(self) -> str:
        """What is known so far, on one line."""
        if not self.first_s:
            return "before the first token"
        if len(self.tokens) == 1:
            return f"1 token, TTFT {self.ttft_s:.3f} s"
        elapsed_s = time.perf_counter() - self.first_s
        rate = (len(self.tokens) - 1) / elapsed_s
        return f"{len(self.tokens)} tokens, TTFT {self.ttft_s:.3f} s, decode {rate:.2f} tok/s"


def _check_finite(token_id: int, position: int) -> None:
    """Refuse the id that stands for non-finite logits; see engine.sample."""
    if token_id < 0:
        raise FloatingPointError(f"non-finite logits at new token {position}")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One request on one engine, to be run again and again from the same depth."""

    engine: Engine
    request: Request
    sampling: Sampling
    stop_ids: Collection[int]

    def fill(self) -> None:
        """Store the depth tokens, once; every sample then starts behind them."""
        if self.request.synthetic_depth:
            fill_synthetic_(self.engine.caches, self.request.synthetic_depth)
        elif self.request.depth_ids:
            with progress("filling the cache", len(self.request.depth_ids), "tok") as advance:
                self.engine.prefill(self._ids(self.request.depth_ids), advance=advance)

    def sample(
        self,
        seed: int,
        recording: Recording,
        show: Callable[[int], None] | None = None,
        advance: Advance = ignore,
    ) -> None:
        """Fill `recording` with one timed run; its ids depend on the seed alone."""
        tokens = self._tokens(self.request.new_tokens, seed, advance)
        gc.collect()
        gc.disable()
        try:
            synchronize(self.engine.device)
            recording.run(tokens, self.stop_ids, show)
        finally:
            gc.enable()

    def warm_up(self, what: str) -> float:
        """One full prefill and a few decode steps, untimed; how long it took.

        Args:
            what: it is, for the line about its progress.
        """
        recording = Recording()
        # A CUDA graph needs three steps: warm-up, record, replay.
        count = min(self.request.new_tokens, WARMUP_STEPS + 1)
        with self.progress(what, count) as advance:
            recording.run(self._tokens(count, seed=0, advance=advance))
        return recording.last_s - recording.start_s

    def progress(self, what: str, new_tokens: int) -> AbstractContextManager[Advance]:
        """Shows how far a run of the prompt and `new_tokens` is."""
        return progress(what, len(self.request.prompt_ids) + new_tokens, "tok")

    def _tokens(self, count: int, seed: int, advance: Advance) -> Iterator[Tensor]:
        return generate(
            self.engine,
            self._ids(self.request.prompt_ids),
            count,
            self.sampling,
            start=self.request.depth,
            seed=seed,
            advance=advance,
        )

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor([ids], device=self.engine.device)
