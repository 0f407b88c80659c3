"""Figures of quality against values by hand and an oracle of wider floats."""

import math
from dataclasses import asdict
from statistics import fmean, median, stdev

import numpy as np
import pytest
import torch

from quality import TokenScores, first_difference, joined, score, summarise

NAMES = TokenScores._fields


def oracle(logits, ref_logits, next_ids) -> dict[str, np.ndarray]:
    """The definitions, token by token, in the machine's widest floats."""
    rows = []
    for *pair, token in zip(logits, ref_logits, next_ids.tolist(), strict=True):
        q, p = map(distribution, pair)
        kl = (p * np.log(p / q)).sum()
        change = q[token] - p[token]
        rows.append((kl, -np.log(q[token]), -np.log(p[token]), change, q.argmax() == p.argmax()))
    return dict(zip(NAMES, np.array(rows, dtype=float).T, strict=True))


def distribution(logits: torch.Tensor) -> np.ndarray:
    wide = logits.double().numpy().astype(np.longdouble)
    p = np.exp(wide - wide.max())
    return p / p.sum()


def random_pair(distance: float, dtype=torch.float32, vocab=300, count=40):
    generator = torch.Generator().manual_seed(3)
    ref = 5 * torch.randn(count, vocab, generator=generator)
    other = ref + distance * torch.randn(count, vocab, generator=generator)
    next_ids = torch.randint(vocab, (count,), generator=generator)
    return other.to(dtype), ref.to(dtype), next_ids


def test_two_distributions_by_hand():
    logits = torch.tensor([[3.0, 1.0]]).log() + 7
    ref_logits = torch.tensor([[1.0, 1.0]]).log()
    scores = score(logits, ref_logits, torch.tensor([1]))
    assert scores.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))
    assert scores.nll.item() == pytest.approx(math.log(4))
    assert scores.nll_ref.item() == pytest.approx(math.log(2))
    assert scores.p_change.item() == pytest.approx(-0.25)
    assert scores.is_same.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("distance", [1.0, 1e-2, 1e-4])
def test_scores_are_those_of_the_oracle(distance, dtype):
    case = random_pair(distance, dtype)
    scores, expected = score(*case), oracle(*case)
    for name in NAMES:
        found = getattr(scores, name)
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-15)


def test_a_small_distance_does_not_drown_in_rounding():
    logits, ref_logits, next_ids = random_pair(1e-4)
    expected = oracle(logits, ref_logits, next_ids)["kl"].mean()
    p, q = (each.float().log_softmax(-1) for each in (ref_logits, logits))
    in_fp32 = (p.exp() * (p - q)).sum(-1).mean().item()
    assert abs(in_fp32 / expected - 1) > 0.02  # which is what this guards against
    assert score(logits, ref_logits, next_ids).kl.mean().item() == pytest.approx(expected)


def test_a_constant_added_to_all_logits_changes_nothing():
    _, ref_logits, next_ids = random_pair(0)
    scores = score(ref_logits.double() + 9, ref_logits, next_ids)
    assert scores.kl.abs().max() < 1e-13
    assert scores.is_same.all()
    assert not score(ref_logits, ref_logits, next_ids).kl.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_logit_that_is_not_finite_is_an_error(value, which):
    case = list(random_pair(0.1))
    case[which][3, 5] = value
    with pytest.raises(FloatingPointError, match="non-finite logits"):
        score(*case)


def windows(count=5, tokens=8) -> list[TokenScores]:
    generator = torch.Generator().manual_seed(4)
    parts = [
        [torch.rand(tokens, generator=generator).double() for _ in NAMES] for _ in range(count)
    ]
    made = [TokenScores(*part) for part in parts]
    return [scores._replace(is_same=(scores.is_same > 0.2).double()) for scores in made]


def test_the_summary_has_errors_over_windows():
    found = summarise(given := windows())
    root = math.sqrt(len(given))
    ratios = [fmean((w.nll - w.nll_ref).tolist()) for w in given]
    squares = [fmean(p * p for p in w.p_change.tolist()) for w in given]
    of_kl = [fmean(w.kl.tolist()) for w in given]
    same = [100 * fmean(w.is_same.tolist()) for w in given]
    rms = 100 * math.sqrt(fmean(squares))
    expected = {
        "kl_mean": fmean(of_kl),
        "kl_se": stdev(of_kl) / root,
        "kl_p99": np.percentile([x for w in given for x in w.kl.tolist()], 99),
        "kl_max": max(x for w in given for x in w.kl.tolist()),
        "ppl": math.exp(fmean(x for w in given for x in w.nll.tolist())),
        "ppl_ref": math.exp(fmean(x for w in given for x in w.nll_ref.tolist())),
        "ln_ppl_ratio": fmean(ratios),
        "ln_ppl_ratio_se": stdev(ratios) / root,
        "top1_pct": fmean(same),
        "top1_se": stdev(same) / root,
        "rms_dp_pct": rms,
        # d sqrt(x) = dx / (2 sqrt(x)), here in percent of both
        "rms_dp_se": 100 * 100 * stdev(squares) / root / (2 * rms),
        "first_diff": median((w.is_same.tolist() + [0]).index(0) for w in given),
    }
    assert asdict(found) == pytest.approx(expected)
    assert math.log(found.ppl / found.ppl_ref) == pytest.approx(found.ln_ppl_ratio)


def test_a_single_window_has_no_errors():
    found = summarise(windows(count=1))
    errors = (found.kl_se, found.ln_ppl_ratio_se, found.top1_se, found.rms_dp_se)
    assert errors == (None,) * 4


def test_identical_windows_have_no_distance_and_no_error():
    scores = score(*random_pair(0))
    found = summarise([scores, scores])
    assert (found.kl_mean, found.kl_se, found.rms_dp_pct, found.rms_dp_se) == (0, 0, 0, 0)
    assert (found.top1_pct, found.first_diff) == (100, len(scores.kl))


@pytest.mark.parametrize(
    ("same", "expected"), [([0, 1, 0], 0), ([1, 1, 0, 1], 2), ([1, 1, 1], 3), ([1], 1)]
)
def test_the_first_difference_is_the_number_of_tokens_before_it(same, expected):
    assert first_difference(torch.tensor(same).double()) == expected


def test_joining_keeps_the_order_of_tokens():
    first, second = windows(count=2)
    whole = joined([first, second])
    for name in NAMES:
        parts = (getattr(first, name), getattr(second, name))
        assert torch.equal(getattr(whole, name), torch.cat(parts))
