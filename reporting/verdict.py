"""Judging one figure of two sides: the ratio, its interval, and a word.

The unit is the process: a row's figure is the median of its samples, which share one process and
so are no independent runs. Three cases:

- pairs: both sides ran in the same rounds of a run, in turns, so that a drift of the machine
  cancels. The mean of ln(B / A) with Student's interval, 99 %.
- several processes a side, one side after the other: Welch's interval of the difference of the
  mean logarithms; a drift cannot be told from a difference, so the least effect counts double.
- fewer: a ratio and no verdict, at most a hint where all samples of one side beat all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reporting.metrics import Kind, Metric, is_on_gpu
from results import Row
from stats import Interval, mean_interval, median, welch_interval

CONFIDENCE = 0.99  # wrong in 1 of 100 comparisons that also pass the least effect, not in 1 of 20
MIN_PAIRS = 6
MIN_PROCESSES = 5
HINT_RATIO = (1.10, 1.20)  # on a GPU and on a CPU
DOUBTFUL = frozenset({"throttled", "busy", "first_slow"})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one figure, B against A.

    Attributes:
        a, b: medians over processes.
        n: pairs, or processes of the smaller side.
        ratio: B / A; of quality the difference B - A.
        interval: of `ratio`; None where there is none.
        word: FASTER, SLOWER, SMALLER, LARGER, BETTER, WORSE, SAME, UNCLEAR; with a question mark
            a hint; empty for no verdict.
        why: what the reader should know about the word.
    """

    metric: Metric
    a: float
    b: float
    n: int
    ratio: float
    interval: tuple[float, float] | None = None
    word: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How strict a comparison is.

    Attributes:
        min_effect_pct: instead of the metric's own.
        num_comparisons: that one gate looks at; each interval is widened for it.
        no_verdict: why there is to be no word: the sides are of different machines, say.
    """

    min_effect_pct: float | None = None
    num_comparisons: int = 1
    no_verdict: str = ""

    @property
    def probability(self) -> float:
        """Of a two-sided interval (Bonferroni)."""
        return 1 - (1 - CONFIDENCE) / self.num_comparisons

    def least_effect(self, metric: Metric, rows: Sequence[Row]) -> float:
        on_gpu, on_cpu = metric.min_effect_pct
        default = on_gpu if is_on_gpu(rows) else on_cpu
        return (default if self.min_effect_pct is None else self.min_effect_pct) / 100


def judge(metric: Metric, a: Sequence[Row], b: Sequence[Row], rule: Rule) -> Verdict | None:
    """The verdict on one figure; None where a side lacks it."""
    a, b = ([row for row in side if metric.value(row) is not None] for side in (a, b))
    if metric.kind is Kind.SPEED:  # ratios of times; compile_s may be 0
        a, b = ([row for row in side if metric.value(row)] for side in (a, b))
    if not a or not b:
        return None
    judges = {Kind.SPEED: _judge_speed, Kind.BYTES: _judge_bytes, Kind.QUALITY: _judge_quality}
    verdict = judges[metric.kind](metric, a, b, rule)
    return replace(verdict, word="", why=rule.no_verdict) if rule.no_verdict else verdict


def pairs(a: Sequence[Row], b: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of both sides of the same round of a run; none where a round has several of a side."""
    of_a = {(row.run, row.round): row for row in a if row.run and row.round}
    of_b = {(row.run, row.round): row for row in b if row.run and row.round}
    if len(of_a) != len(a) or len(of_b) != len(b):
        return []
    return [(of_a[name], of_b[name]) for name in of_a if name in of_b]


def _values(metric: Metric, rows: Sequence[Row]) -> list[float]:
    return [value for row in rows if (value := metric.value(row)) is not None]


def _figures(metric: Metric, a: Sequence[Row], b: Sequence[Row], **words: Any) -> Verdict:
    """Both sides' medians and their ratio."""
    at_a, at_b = median(_values(metric, a)), median(_values(metric, b))
    ratio = at_b / at_a if at_a else math.inf
    return Verdict(metric=metric, a=at_a, b=at_b, n=min(len(a), len(b)), ratio=ratio, **words)


def _is_doubtful(*rows: Row) -> bool:
    return any(DOUBTFUL & set(row.flags) for row in rows)


def _judge_speed(metric: Metric, a: Sequence[Row], b: Sequence[Row], rule: Rule) -> Verdict:
    if found := pairs(a, b):
        return _judge_pairs(metric, found, rule)
    if min(len(a), len(b)) < MIN_PROCESSES:
        return _hint(metric, a, b, "too few processes")
    if _is_doubtful(*a, *b):
        return _figures(metric, a, b, word="UNCLEAR", why="doubtful rows")
    logs = [list(map(math.log, _values(metric, side))) for side in (a, b)]
    interval = welch_interval(logs[0], logs[1], rule.probability)
    least = 2 * rule.least_effect(metric, a)
    return _by_interval(_figures(metric, a, b), interval, least, "not in turns: may drift")


def _judge_pairs(metric: Metric, found: list[tuple[Row, Row]], rule: Rule) -> Verdict:
    """By the pairs of which neither row was disturbed."""
    sure = [pair for pair in found if not _is_doubtful(*pair)]
    a, b = ([pair[side] for pair in sure or found] for side in (0, 1))
    if len(sure) < MIN_PAIRS:
        return _hint(metric, a, b, f"{len(sure)} sure pairs of {MIN_PAIRS}")
    values = zip(_values(metric, a), _values(metric, b), strict=True)
    interval = mean_interval([math.log(y / x) for x, y in values], rule.probability)
    left_out = f"{len(found) - len(sure)} doubtful pairs left out" if len(sure) < len(found) else ""
    return _by_interval(_figures(metric, a, b), interval, rule.least_effect(metric, a), left_out)


def _by_interval(figures: Verdict, interval: Interval, least: float, why: str) -> Verdict:
    """The word that an interval of the mean change of logarithms gives."""
    ratio, low, high = map(math.exp, interval)
    word, causes = "UNCLEAR", [why]
    if abs(ratio - 1) >= least and not low <= 1 <= high:
        word = figures.metric.word(ratio - 1)
    elif 1 / (1 + least) <= low and high <= 1 + least:
        word = "SAME"
    elif least:
        needed = math.ceil(figures.n * ((interval.high - interval.low) / 2 / least) ** 2)
        causes.append(f"some {max(needed, figures.n + 1)} would tell {100 * least:g} %")
    return replace(
        figures, ratio=ratio, interval=(low, high), word=word, why="; ".join(filter(None, causes))
    )


def _hint(metric: Metric, a: Sequence[Row], b: Sequence[Row], why: str) -> Verdict:
    """No verdict on so few processes; a hint where all samples of one side are beyond the other."""
    of_a, of_b = ([value for row in side for value in metric.samples(row)] for side in (a, b))
    figures = _figures(metric, a, b, why=why)
    if not of_a or not of_b or _is_doubtful(*a, *b):
        return figures
    on_gpu, on_cpu = HINT_RATIO
    beyond = on_gpu if is_on_gpu(a) else on_cpu
    is_far = min(of_b) > beyond * max(of_a) or min(of_a) > beyond * max(of_b)
    return replace(figures, word=metric.word(figures.ratio - 1) + "?") if is_far else figures


def _judge_bytes(metric: Metric, a: Sequence[Row], b: Sequence[Row], rule: Rule) -> Verdict:
    figures = _figures(metric, a, b)
    change = figures.b - figures.a
    least = max(metric.least_gb, figures.a * rule.least_effect(metric, a))
    return replace(figures, word=metric.word(change) if abs(change) > least else "SAME")


def _judge_quality(metric: Metric, a: Sequence[Row], b: Sequence[Row], rule: Rule) -> Verdict:
    """The newest row of each side: its windows are its samples, and a further row has the same."""
    newest = (a[-1], b[-1])
    stem = metric.name.removesuffix("_mean")
    errors, floors = (
        [abs(getattr(row, f"{stem}_{part}") or 0.0) for row in newest] for part in ("se", "floor")
    )
    figures = _figures(metric, *([row] for row in newest))
    change, doubt = figures.b - figures.a, 2 * math.hypot(*errors)
    return replace(
        figures,
        ratio=change,
        interval=(change - doubt, change + doubt),
        word=metric.word(change) if abs(change) > max(doubt, *floors) else "SAME",
    )
