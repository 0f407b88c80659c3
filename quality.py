"""How far one model's next-token distributions are from another's: figures and their errors.

Tokens of one window correlate, so every standard error is that of the mean over windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class TokenScores(NamedTuple):
    """Of each scored token of a window, all [T] fp64 on the CPU.

    Attributes:
        kl: nats, of the tested distribution from the reference's, sum p_ref * ln(p_ref / p).
        nll, nll_ref: nats, of the token that follows in the text.
        p_change: p - p_ref of that token.
        is_same: 1 where both find the same token likeliest.
    """

    kl: Tensor
    nll: Tensor
    nll_ref: Tensor
    p_change: Tensor
    is_same: Tensor


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Figures of one comparison; errors are None for a single window.

    Attributes:
        kl_mean, kl_se, kl_p99, kl_max: nats per token.
        ppl, ppl_ref: exp of the mean NLL.
        ln_ppl_ratio, ln_ppl_ratio_se: mean of nll - nll_ref, paired token by token.
        top1_pct, top1_se: tokens after which both find the same token likeliest.
        rms_dp_pct, rms_dp_se: root mean square change of the probability of the text's next token,
            in percentage points, as llama.cpp prints it.
        first_diff: scored tokens before the first with another likeliest successor, the median over
            windows; all of them where there is none.
    """

    kl_mean: float
    kl_se: float | None
    kl_p99: float
    kl_max: float
    ppl: float
    ppl_ref: float
    ln_ppl_ratio: float
    ln_ppl_ratio_se: float | None
    top1_pct: float
    top1_se: float | None
    rms_dp_pct: float
    rms_dp_se: float | None
    first_diff: float


def score(logits: Tensor, ref_logits: Tensor, next_ids: Tensor) -> TokenScores:
    """Compare two predictions of the same tokens.

    Args:
        logits, ref_logits: [T, V], any floating dtype.
        next_ids: [T], what follows in the text.

    Raises:
        FloatingPointError: a logit is not finite.
    """
    log_q, log_p = log_softmax(logits), log_softmax(ref_logits)
    next_ids = next_ids.to(log_q.device)[:, None]
    log_q_next, log_p_next = log_q.gather(1, next_ids)[:, 0], log_p.gather(1, next_ids)[:, 0]
    scores = TokenScores(
        kl=(log_p.exp() * (log_p - log_q)).sum(-1),
        nll=-log_q_next,
        nll_ref=-log_p_next,
        p_change=log_q_next.exp() - log_p_next.exp(),
        is_same=(log_q.argmax(-1) == log_p.argmax(-1)).double(),
    )
    return TokenScores(*(values.cpu() for values in scores))


def log_softmax(logits: Tensor) -> Tensor:
    """[T, V] -> fp64, where the rounding of logits is the only one that counts.

    Raises:
        FloatingPointError: a logit is not finite.
    """
    if not logits.isfinite().all():
        raise FloatingPointError("non-finite logits")
    if logits.device.type == "mps":  # has no fp64
        logits = logits.cpu()
    return F.log_softmax(logits.double(), dim=-1)


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of consecutive tokens, as one."""
    return TokenScores(*map(torch.cat, zip(*parts, strict=True)))


def summarise(windows: Sequence[TokenScores]) -> Quality:
    """The figures of one window or more, each with as many scored tokens."""
    kl_mean, kl_se = mean_and_error([w.kl.mean().item() for w in windows])
    ratio, ratio_se = mean_and_error([(w.nll - w.nll_ref).mean().item() for w in windows])
    top1, top1_se = mean_and_error([100 * w.is_same.mean().item() for w in windows])
    square, square_se = mean_and_error([w.p_change.square().mean().item() for w in windows])
    whole = joined(windows)
    rms = math.sqrt(square)
    return Quality(
        kl_mean=kl_mean,
        kl_se=kl_se,
        kl_p99=torch.quantile(whole.kl, 0.99).item(),
        kl_max=whole.kl.max().item(),
        ppl=math.exp(whole.nll.mean().item()),
        ppl_ref=math.exp(whole.nll_ref.mean().item()),
        ln_ppl_ratio=ratio,
        ln_ppl_ratio_se=ratio_se,
        top1_pct=top1,
        top1_se=top1_se,
        rms_dp_pct=100 * rms,
        rms_dp_se=root_error(square, square_se),
        first_diff=float(median(first_difference(w.is_same) for w in windows)),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of independent values and its standard error; None for a single one."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return fmean(values), error


def root_error(square: float, square_se: float | None) -> float | None:
    """The standard error of 100 * sqrt(square), to first order."""
    if square_se is None or square == 0:
        return square_se
    return 100 * square_se / (2 * math.sqrt(square))


def first_difference(is_same: Tensor) -> int:
    """Tokens before the first 0; all of them where there is none."""
    different = (is_same == 0).nonzero()
    return int(different[0]) if len(different) else len(is_same)
