"""Quantiles and intervals against published tables and closed forms."""

import math

import pytest

from stats import confidence_pct, median, t_quantile

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
