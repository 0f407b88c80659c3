"""Quantiles, intervals and lines against published tables and closed forms."""

import math

import pytest

from stats import (
    confidence_pct,
    linear_fit,
    mean_interval,
    median,
    spread_pct,
    t_quantile,
    welch_interval,
)

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, three decimals; four where known.
TABLE = [
    (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.7764), (0.975, 5, 2.5706),
    (0.975, 9, 2.262), (0.975, 19, 2.093), (0.975, 100, 1.984), (0.975, 10**6, 1.95997),
    (0.9, 1, 3.078), (0.95, 10, 1.812), (0.99, 3, 4.541), (0.999, 5, 5.893),
]  # fmt: skip


@pytest.mark.parametrize(("p", "dof", "t"), TABLE)
def test_quantiles_equal_the_table(p, dof, t):
    digits = len(str(t).partition(".")[2])
    assert t_quantile(p, dof) == pytest.approx(t, abs=0.51 * 10**-digits)
    assert t_quantile(1 - p, dof) == pytest.approx(-t, abs=0.51 * 10**-digits)


@pytest.mark.parametrize("p", [0.5, 0.501, 0.6, 0.9, 0.975, 0.99999])
def test_quantiles_equal_the_closed_forms_of_1_and_2_degrees(p):
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9, abs=1e-12)
    two = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    assert t_quantile(p, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("p", "dof"), [(0, 5), (1, 5), (math.nan, 5), (0.5, 0)])
def test_what_has_no_quantile_is_refused(p, dof):
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(p, dof)


def test_the_interval_of_known_samples():
    # mean 10, sd 1, n 5: 100 * 2.7764 / (10 * sqrt(5))
    samples = [10 + math.sqrt(0.4) * x for x in (-2, -1, 0, 1, 2)]
    assert confidence_pct(samples) == pytest.approx(12.4166, abs=1e-3)
    assert confidence_pct([2.0, 2.0]) == 0
    assert confidence_pct([2.0]) is None
    assert confidence_pct([]) is None


def test_the_median_of_an_even_count_is_the_mean_of_the_middle():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_the_spread_is_that_of_the_middle_half():
    # quartiles 2, 3, 4: the far sample does not count
    assert spread_pct([1.0, 5000.0, 3.0, 2.0, 4.0]) == pytest.approx(100 * 2 / 3)
    assert spread_pct([2.0, 2.0]) == 0


def test_a_line_through_known_points():
    fit = linear_fit([1, 2, 3, 4], [1, 3, 5, 7])
    assert fit == pytest.approx((-1, 2, 1))
    # Anscombe's first quartet: 3.00 + 0.500 x, R^2 = 0.67
    x = [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5]
    y = [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68]
    assert linear_fit(x, y) == pytest.approx((3.0001, 0.50009, 0.66654), abs=1e-4)


@pytest.mark.parametrize(("x", "y"), [([], []), ([1], [2]), ([3, 3], [1, 2]), ([1, 2], [3, 3])])
def test_a_line_that_is_not_determined_is_refused(x, y):
    with pytest.raises(ValueError, match=r"at least two|constant"):
        linear_fit(x, y)


def test_the_interval_of_a_mean():
    # mean 2, sd 1, n 3: 2 +- 4.303 / sqrt(3)
    assert mean_interval([1, 2, 3], 0.95) == pytest.approx((2, 2 - 2.4843, 2 + 2.4843), abs=1e-3)


def test_welchs_interval_of_a_difference():
    # variances of the means 1/3 and 5/3; dof 2^2 / ((1/3)^2 / 2 + (5/3)^2 / 3) = 4.0755
    a, b = [1, 2, 3], [2, 4, 6, 8]
    half_width = t_quantile(0.975, 4.0755) * math.sqrt(2)
    assert welch_interval(a, b, 0.95) == pytest.approx((3, 3 - half_width, 3 + half_width), 1e-4)
    # equal variances and sizes: the pooled test's 2 n - 2 degrees
    pooled = t_quantile(0.995, 4) * math.sqrt(2 / 3)
    assert welch_interval([1, 2, 3], [2, 3, 4], 0.99) == pytest.approx((1, 1 - pooled, 1 + pooled))
    assert welch_interval([1, 1], [2, 2], 0.99) == (1, 1, 1)
