"""Statistics of a few samples: centre, spread, interval of the mean, a line. Imports no torch."""

import math
from collections.abc import Sequence
from statistics import correlation, fmean, linear_regression, median, quantiles, stdev
from typing import NamedTuple

__all__ = [
    "Interval",
    "LinearFit",
    "confidence_pct",
    "linear_fit",
    "mean_interval",
    "median",
    "spread_pct",
    "t_quantile",
    "welch_interval",
]


class LinearFit(NamedTuple):
    """y = intercept + slope * x, and the share of y's variance that the line explains."""

    intercept: float
    slope: float
    r_squared: float


def linear_fit(x: Sequence[float], y: Sequence[float]) -> LinearFit:
    """The least-squares line through points (x, y).

    Raises:
        ValueError: fewer than two points, or all of one x or of one y: R^2 is undefined.
    """
    slope, intercept = linear_regression(x, y)
    return LinearFit(intercept, slope, correlation(x, y) ** 2)


def spread_pct(samples: Sequence[float]) -> float:
    """Distance between the quartiles of two samples or more, in percent of their median."""
    first, middle, third = quantiles(samples, n=4, method="inclusive")
    return 100 * (third - first) / middle


class Interval(NamedTuple):
    """A mean, or a difference of means, and where it lies with a given probability."""

    mean: float
    low: float
    high: float


def mean_interval(samples: Sequence[float], probability: float) -> Interval:
    """Student's interval of the mean of two samples or more."""
    n = len(samples)
    error = stdev(samples) / math.sqrt(n)
    return _interval(fmean(samples), error, n - 1, probability)


def welch_interval(a: Sequence[float], b: Sequence[float], probability: float) -> Interval:
    """Of mean(b) - mean(a), where both, of two samples or more, may vary differently.

    Source: B. L. Welch, Biometrika 34 (1947), for the degrees of freedom.
    """
    shares = [stdev(side) ** 2 / len(side) for side in (a, b)]
    dofs = sum(share**2 / (len(side) - 1) for share, side in zip(shares, (a, b), strict=True))
    dof = sum(shares) ** 2 / dofs if dofs else len(a) + len(b) - 2
    return _interval(fmean(b) - fmean(a), math.sqrt(sum(shares)), dof, probability)


def _interval(mean: float, error: float, dof: float, probability: float) -> Interval:
    half_width = t_quantile((1 + probability) / 2, dof) * error
    return Interval(mean, mean - half_width, mean + half_width)


def confidence_pct(samples: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of the mean, in percent of it; None for fewer than 2."""
    if len(samples) < 2:
        return None
    mean, low, _ = mean_interval(samples, 0.95)
    return 100 * (mean - low) / mean


def t_quantile(p: float, dof: float) -> float:
    """The t below which a Student variable of `dof` degrees of freedom falls with probability p.

    Bisection on the upper tail, P(T > t) = I_x(dof / 2, 1 / 2) / 2 with x = dof / (dof + t^2):
    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.27.
    """
    if not (0 < p < 1 and dof > 0):
        raise ValueError(f"no quantile for p={p}, dof={dof}")
    if p < 0.5:
        return -t_quantile(1 - p, dof)
    low, high = 0.0, 1.0
    while _upper_tail(high, dof) > 1 - p:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if _upper_tail(middle, dof) > 1 - p:
            low = middle
        else:
            high = middle
    return high


def _upper_tail(t: float, dof: float) -> float:
    return _incomplete_beta(dof / (dof + t * t), dof / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised I_x(a, b) by its continued fraction, https://dlmf.nist.gov/8.17.E22."""
    if x in (0, 1):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side only
        return 1 - _incomplete_beta(1 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    fraction = 1.0
    for k in range(50 + int(5 * math.sqrt(a + b)), 0, -1):
        m = k // 2
        if k % 2:
            numerator = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + numerator * x / fraction
    return front / fraction
