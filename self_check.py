"""The check inside every row with a quantised cache: does the measured engine predict rightly?

A broken kernel can run at full speed. So after the samples the measured engine goes on greedily, by
the very step that was timed, and what it predicts is set against one forward pass over the same ids
that reads no cache: exact K and V, the library's products and attention, no kernel under test.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from command import says_out_of_memory
from config import describe
from engine import Engine, Sampling, sample
from kernels.flash import flash_attention
from kv_formats import format_of
from measure import Runner
from progress import Advance, progress
from quality import score

log = logging.getLogger("kv_fast")

MAX_CONTEXT = 1024
"""Ids before the first checked one: two prefills of more would take longer than the samples."""

MAX_SECONDS = 60.0
"""After which what was checked so far has to do."""

FACTOR = 5
"""By which limits are wider than a format's own: those are for fp32 arithmetic and many texts."""

FINE_TOP1_PCT, BAD_TOP1_PCT = 94, 50
"""Of the likeliest ids: a compiled step can be wrong where the same layers uncompiled are right."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the check found.

    Attributes:
        verdict: ok, warn, fail, or skipped where there was no memory for it.
        kl: nats per token, from the forward pass's distribution to the engine's, the mean.
        top1_pct: ids chosen by the timed step that the forward pass finds likeliest too.
    """

    verdict: str
    kl: float | None = None
    top1_pct: float | None = None


class NoCache:
    """In place of a KV cache, for one forward pass over a whole text: keeps nothing."""

    k_parts: list[Tensor] = []
    v_parts: list[Tensor] = []
    k_channels = None
    rotates_v = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, start_pos: Tensor, past_len: int | None = None
    ) -> Tensor:
        """As of `KVCache`, for all tokens of a text at once."""
        return flash_attention(q, k, v, causal=True)[0].to(q.dtype)


def is_quantized(formats: tuple[str, str]) -> bool:
    """Whether K or V are not stored as they are."""
    return any(format_of(name).kl_limits for name in formats)


def self_check(runner: Runner, num_tokens: int) -> Checked:
    """Check the engine on the end of the runner's own ids and what it makes of them.

    Args:
        runner: with a quantised cache, which is mutated from slot 0 on.
        num_tokens: to generate and compare, fewer if the cache is shorter.
    """
    engine, request = runner.engine, runner.request
    num_tokens = min(num_tokens, engine.cache_len // 2)
    context = (request.depth_ids + request.prompt_ids)[-min(MAX_CONTEXT, engine.cache_len // 2) :]
    ids = torch.tensor([context], device=engine.device)
    try:
        with progress("checking", num_tokens, "tok") as advance:
            chosen, fed, logits = predictions(engine, runner.sampling, ids, num_tokens, advance)
        ref_logits = exact_logits(engine, torch.cat([ids, fed], dim=1), fed.shape[1])
        known = runner.sampling.vocab_size
        limits = limits_of(request.formats)
        return judge(chosen, logits[:, :known], ref_logits[:, :known], limits)
    except RuntimeError as error:
        if not says_out_of_memory(describe(error)):
            raise
        log.warning("no memory for the self-check")
        return Checked(verdict="skipped")


def limits_of(formats: tuple[str, str]) -> tuple[float, float]:
    """Mean KL up to which a run is fine, and beyond which it is wrong; of the coarser format."""
    fine, wrong = max(limits for name in formats if (limits := format_of(name).kl_limits))
    return FACTOR * fine, FACTOR * wrong


@torch.inference_mode()
def predictions(
    engine: Engine, sampling: Sampling, context: Tensor, num_tokens: int, advance: Advance
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill the context [1, P] and go on greedily.

    Returns:
        ids [1, N] chosen by the timed step, ids [1, N] that it was given, and logits [N, V] of the
        same steps without compilation; N is num_tokens, fewer where time ran out, at least 1.
    """
    began_s = time.perf_counter()
    token = sample(engine.prefill(context), sampling, None)
    start_pos = torch.full((1,), context.shape[1], device=engine.device)
    chosen: list[Tensor] = []
    fed: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(num_tokens):
        if chosen and time.perf_counter() - began_s > MAX_SECONDS:
            break
        token = token.clamp(min=0)  # what follows non-finite logits: `judge` sees them
        x = engine.model(token, start_pos, engine.caches)
        logits.append(engine.model.logits(x[:, -1]))
        fed.append(token)
        token = engine.decode(token, start_pos, sampling, sampling.no_noise(engine.device))
        chosen.append(token)
        start_pos = start_pos + 1
        advance(1)
    return torch.cat(chosen, dim=1), torch.cat(fed, dim=1), torch.cat(logits)


@torch.inference_mode()
def exact_logits(engine: Engine, ids: Tensor, count: int) -> Tensor:
    """Logits [count, V] of the last ids of [1, T], by one forward pass without a cache."""
    start_pos = torch.zeros(1, dtype=torch.long, device=engine.device)
    caches = [NoCache()] * engine.model.config.num_layers
    x = engine.model(ids, start_pos, caches, past_len=0)
    return engine.model.logits(x[0, -count:])


def judge(
    chosen: Tensor, logits: Tensor, ref_logits: Tensor, limits: tuple[float, float]
) -> Checked:
    """Compare chosen ids [1, N] and logits [N, V] with those of the forward pass."""
    if not logits.isfinite().all():
        return Checked(verdict="fail")
    likeliest = ref_logits.argmax(-1)
    kl = score(logits, ref_logits, likeliest).kl.mean().item()
    top1_pct = 100 * (chosen[0] == likeliest).double().mean().item()
    verdict = "ok" if kl <= limits[0] and top1_pct >= FINE_TOP1_PCT else "warn"
    if kl > limits[1] or top1_pct < BAD_TOP1_PCT:
        verdict = "fail"
    return Checked(verdict=verdict, kl=kl, top1_pct=top1_pct)
