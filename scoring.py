"""Run windows of text through two ways to hold the cache or the weights, side by side.

What is scored is what decode steps predict: attention gives the chunk that is being prefilled its
own exact K and V, so a window scored in one prefill would never read a stored value. A step may
take up to 16 tokens: each sees only itself in full precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import Engine
from kernels.linear import MAX_ROWS
from quality import TokenScores, joined, score


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A model with a cache, and how many tokens a scoring step of it takes."""

    engine: Engine
    score_width: int

    def prefill(self, ids: Tensor) -> None:
        """Store ids [P] at slots 0 .. P - 1."""
        self.engine.prefill(ids[None].to(self.engine.device))

    @torch.inference_mode()
    def logits(self, ids: Tensor, start: int) -> Tensor:
        """Decode ids [T], which are stored at slots start .. start + T - 1: logits [T, V]."""
        engine, steps = self.engine, []
        for chunk in ids[None].to(engine.device).split(self.score_width, dim=1):
            start_pos = torch.full((1,), start, device=engine.device)
            x = engine.model(chunk, start_pos, engine.caches)
            steps.append(engine.model.logits(x[0]))
            start += chunk.shape[1]
        return torch.cat(steps)


def other_width(score_width: int) -> int:
    """A width that cuts the same tokens into other steps."""
    return score_width // 2 or 2


def other_chunk(prefill_chunk: int, context: int) -> int:
    """A chunk that cuts the same context into other pieces, unless it is a single token."""
    return max(1, min(prefill_chunk, context) // 2)


def cut_windows(ids: Tensor, count: int, length: int, bos_id: int | None) -> list[Tensor]:
    """Windows [length] of a text [N], evenly spread; a BOS takes the place of their first id."""
    step = (len(ids) - length) // count
    windows = [ids[i * step : i * step + length].clone() for i in range(count)]
    for window in windows:
        if bos_id is not None:
            window[0] = bos_id
    return windows


def score_window(
    window: Tensor, context: int, reference: Stream, others: Mapping[str, Stream]
) -> dict[str, TokenScores]:
    """What each of the `others` predicts beside what the reference does.

    The logits of at most 16 tokens are held at a time.

    Args:
        window: ids [context + scored + 1]; the first `context` are prefilled, and from the next on
            each but the last is fed, and its prediction scored on the id after it.
        context: at least 1.
        reference: streams are mutated, all caches from slot 0 on.
        others: by name.
    """
    parts: dict[str, list[TokenScores]] = {name: [] for name in others}
    for stream in (reference, *others.values()):
        stream.prefill(window[:context])
    for start in range(context, len(window) - 1, MAX_ROWS):
        end = min(start + MAX_ROWS, len(window) - 1)
        fed, following = window[start:end], window[start + 1 : end + 1]
        ref_logits = reference.logits(fed, start)
        for name, stream in others.items():
            parts[name].append(score(stream.logits(fed, start), ref_logits, following))
    return {name: joined(scores) for name, scores in parts.items()}


def is_exact(windows: Sequence[TokenScores]) -> bool:
    """Whether no distribution differs anywhere: between caches a sign that none was read."""
    return all(not scores.kl.any() for scores in windows)
