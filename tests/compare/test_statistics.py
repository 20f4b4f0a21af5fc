"""Paired changes and their intervals: closed forms, and coverage at the stated rate."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.compare.metrics import METRICS
from vidur_ppo_plugin.compare.statistics import (
    BETTER,
    COLUMNS,
    DIFFERENT,
    REFERENCE,
    SAME,
    UNTESTED,
    WORSE,
    compare_cells,
    paired_change,
    verdict_of,
)


def cells(**schedulers: list[float]) -> pd.DataFrame:
    """One scenario; every metric of a scheduler has the same value in a seed."""
    rows = [
        {"scenario": "chat", "scheduler": name, "seed": seed, **dict.fromkeys(METRICS, value)}
        for name, values in schedulers.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=12))
def test_a_policy_compared_with_itself_is_exactly_zero(values: list[float]) -> None:
    assert paired_change(np.array(values), np.array(values)) == (0.0, 0.0, 0.0)


@given(st.lists(st.floats(0.1, 1e3), min_size=2, max_size=9), st.floats(0.2, 5.0))
def test_a_constant_factor_is_found_without_uncertainty(values: list[float], factor: float) -> None:
    """Seeds may differ by orders of magnitude: pairing takes that out."""
    theirs = np.array(values)
    change, low, high = paired_change(factor * theirs, theirs)
    assert (change, low, high) == pytest.approx((factor - 1,) * 3, abs=1e-6)


def test_fewer_than_four_seeds_have_no_interval() -> None:
    """A resample of one seed alone has no error of its own: of three seeds, every ninth on either side."""
    rng = np.random.default_rng(0)
    for num_seeds in (2, 3, 4):
        change, low, high = paired_change(rng.normal(1, 0.1, num_seeds), np.full(num_seeds, 2.0))
        assert change == pytest.approx(-0.5, abs=0.1)
        assert math.isnan(low) == math.isnan(high) == (num_seeds < 4)


def test_five_seeds_against_a_direct_computation() -> None:
    """All 3,125 resamples, one by one."""
    ours, theirs = np.array([4.0, 5.0, 7.0, 4.5, 6.0]), np.array([5.0, 5.5, 6.5, 5.0, 7.5])
    change = ours.mean() / theirs.mean() - 1

    def error(a: np.ndarray, b: np.ndarray) -> float:
        residuals = a - a.mean() / b.mean() * b
        return float(np.sqrt(np.sum(residuals**2) / 4 / 5) / b.mean())

    ratios = []
    for index in np.ndindex(5, 5, 5, 5, 5):
        a, b = ours[list(index)], theirs[list(index)]
        difference, spread = a.mean() / b.mean() - 1 - change, error(a, b)
        ratios.append(difference / spread if spread > 1e-12 else math.copysign(math.inf, difference))
    ordered = np.sort(ratios)
    # The smallest t with at least 2.5 % (97.5 %) of the resamples at or below it.
    t_low, t_high = ordered[math.ceil(0.025 * 3125) - 1], ordered[math.ceil(0.975 * 3125) - 1]
    expected = (change, change - t_high * error(ours, theirs), change - t_low * error(ours, theirs))
    assert paired_change(ours, theirs) == pytest.approx(expected)


@pytest.mark.parametrize(("num_seeds", "lowest", "highest"), [(5, 0.93, 0.98), (8, 0.925, 0.975)])
def test_intervals_cover_at_the_stated_rate(num_seeds: int, lowest: float, highest: float) -> None:
    """Schedulers that truly differ by -10 %, on seeds of very different difficulty; 95 % is stated."""
    rng = np.random.default_rng(7)
    num_trials, covered, percentile_covered = 1000, 0, 0
    for _ in range(num_trials):
        theirs = rng.lognormal(0, 0.3, num_seeds)
        ours = theirs * rng.normal(0.9, 0.05, num_seeds)
        _, low, high = paired_change(ours, theirs)
        covered += low <= -0.1 <= high
        draws = rng.integers(0, num_seeds, (500, num_seeds))
        plain = np.quantile(ours[draws].sum(axis=1) / theirs[draws].sum(axis=1) - 1, [0.025, 0.975])
        percentile_covered += plain[0] <= -0.1 <= plain[1]
    assert lowest <= covered / num_trials <= highest
    assert percentile_covered / num_trials < 0.9  # why the plain percentile interval is not used


def test_no_effect_is_called_one_in_one_case_of_twenty() -> None:
    rng = np.random.default_rng(3)
    verdicts = []
    for _ in range(600):
        theirs = rng.lognormal(0, 0.3, 6)
        verdicts.append(verdict_of("e2e_mean", *paired_change(theirs * rng.normal(1.0, 0.05, 6), theirs)))
    assert verdicts.count(SAME) / 600 == pytest.approx(0.95, abs=0.025)
    assert verdicts.count(BETTER) > 0 and verdicts.count(WORSE) > 0


def test_many_seeds_are_resampled_with_a_fixed_seed() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(1, 0.1, 10), rng.normal(1, 0.1, 10)
    assert paired_change(ours, theirs) == paired_change(ours.copy(), theirs.copy())


@pytest.mark.parametrize(
    ("metric", "interval", "verdict"),
    [
        ("e2e_mean", (-0.2, -0.3, -0.1), BETTER),
        ("e2e_mean", (0.2, 0.1, 0.3), WORSE),
        ("e2e_mean", (0.2, -0.1, 0.5), SAME),
        ("e2e_mean", (0.0, 0.0, 0.0), SAME),
        ("goodput_rps", (-0.2, -0.3, -0.1), WORSE),
        ("goodput_rps", (0.2, 0.1, 0.3), BETTER),
        ("load_spread", (0.2, 0.1, 0.3), DIFFERENT),
        ("e2e_mean", (0.2, math.nan, math.nan), UNTESTED),
    ],
)
def test_verdicts(metric: str, interval: tuple[float, float, float], verdict: str) -> None:
    assert verdict_of(metric, *interval) == verdict


def test_cells_are_compared_seed_by_seed() -> None:
    table = compare_cells(cells(slow=[10.0, 20.0, 30.0], fast=[5.0, 10.0, 15.0]), "slow")
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 2 * len(METRICS)
    row = table[(table.scheduler == "fast") & (table.metric == "e2e_p99")].iloc[0]
    assert (row.value, row.reference_value, row.verdict) == (10.0, 20.0, BETTER)
    assert row[["change", "low", "high"]].tolist() == pytest.approx([-0.5] * 3)
    own = table[table.scheduler == "slow"]
    assert set(own.verdict) == {REFERENCE}
    assert (own[["change", "low", "high"]] == 0).all(axis=None)


def test_only_seeds_that_both_have_count() -> None:
    table = cells(a=[1.0, 1.0, 9.0], b=[2.0, 2.0])
    row = compare_cells(table, "b").query("scheduler == 'a' and metric == 'e2e_mean'").iloc[0]
    assert (row.value, row.change) == (1.0, -0.5)


def test_one_seed_says_nothing_of_its_uncertainty() -> None:
    row = compare_cells(cells(a=[1.0], b=[2.0]), "b").query("scheduler == 'a' and metric == 'e2e_mean'").iloc[0]
    assert row.change == -0.5
    assert math.isnan(row.low) and row.verdict == UNTESTED


@pytest.mark.filterwarnings("error")
def test_rare_events_that_some_seeds_have_none_of() -> None:
    """Two of five seeds without a preemption: too little is known for a bound, and no warning is needed to say so."""
    change, low, high = paired_change(np.array([0.0, 1, 9, 4, 0]), np.array([0.0, 3, 10, 9, 0]))
    assert change == pytest.approx(14 / 22 - 1)
    assert verdict_of("preemptions", change, low, high) == UNTESTED


def test_zero_and_missing_values() -> None:
    assert paired_change(np.zeros(3), np.zeros(3)) == (0.0, 0.0, 0.0)  # no preemptions in either
    assert all(map(math.isnan, paired_change(np.ones(3), np.zeros(3))))
    assert all(map(math.isnan, paired_change(np.array([1.0, math.nan]), np.ones(2))))
    assert compare_cells(cells(a=[1.0]), "missing").empty
