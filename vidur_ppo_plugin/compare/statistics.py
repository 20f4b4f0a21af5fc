"""Differences between schedulers with their uncertainty: the bootstrap over seeds, paired by seed.

All schedulers see the same requests for a seed, so seeds are the independent repetitions, and a scheduler is compared
with the reference seed by seed. The change is the ratio of the two means over seeds, minus one. Its 95 % interval is
the studentised bootstrap (bootstrap-t; Efron & Tibshirani 1993, section 12.5): with five to ten seeds the plain
percentile interval is much too short (it covers 84 % instead of 95 % with five normal seeds;
`tests/compare/test_statistics.py` measures both). Up to six seeds all resamples are enumerated; beyond, they are drawn
with a fixed seed.
"""

import functools
import itertools
import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .metrics import METRICS

FloatArray = NDArray[np.float64]

CONFIDENCE = 0.95
BETTER, WORSE, SAME = "better", "worse", "no difference"
REFERENCE = "reference"
#: Too few seeds (fewer than four) for an interval.
UNTESTED = "not tested"
#: The interval excludes zero, but more is neither better nor worse.
DIFFERENT = "different"

_MOST_ENUMERATED_SEEDS = 6
_NUM_RESAMPLES = 10_000
_RESAMPLING_SEED = 20_250_918
# Standard errors below this share of the mean are rounding errors.
_TINY = 1e-12

COLUMNS = ("scenario", "scheduler", "metric", "value", "reference_value", "change", "low", "high", "verdict")


def compare_cells(cells: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Every scheduler against the reference: a row for each scenario, scheduler and metric.

    Only seeds that both have finished count. `change`, `low` and `high` are relative (-0.1: ten per cent less); NaN
    where the reference is zero or missing. The reference itself has the verdict "reference" and a change of exactly 0.
    """
    rows = []
    for scenario, of_scenario in cells.groupby("scenario", sort=False):
        by_scheduler = {name: group.set_index("seed") for name, group in of_scenario.groupby("scheduler", sort=False)}
        if reference not in by_scheduler:
            continue
        for scheduler, own in by_scheduler.items():
            seeds = own.index.intersection(by_scheduler[reference].index)
            for metric in METRICS:
                ours = own.loc[seeds, metric].to_numpy(dtype=np.float64)
                theirs = by_scheduler[reference].loc[seeds, metric].to_numpy(dtype=np.float64)
                change, low, high = paired_change(ours, theirs)
                verdict = REFERENCE if scheduler == reference else verdict_of(metric, change, low, high)
                rows.append((scenario, scheduler, metric, _mean(ours), _mean(theirs), change, low, high, verdict))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def paired_change(ours: FloatArray, theirs: FloatArray) -> tuple[float, float, float]:
    """Relative change of the mean and its interval: (change, low, high); NaN where it cannot be told."""
    if len(ours) == 0 or np.isnan(ours).any() or np.isnan(theirs).any():
        return math.nan, math.nan, math.nan
    if np.array_equal(ours, theirs):
        return 0.0, 0.0, 0.0
    mean = theirs.mean()
    if mean == 0:
        return math.nan, math.nan, math.nan
    change = float(ours.mean() / mean - 1)
    if len(ours) == 1:
        return change, math.nan, math.nan
    error = _standard_errors(ours, theirs, np.ones((1, len(ours))))[0]
    if error < _TINY:
        change = 0.0 if abs(change) < _TINY else change
        return change, change, change
    low, high = _studentised_quantiles(ours, theirs)
    if math.isinf(low) or math.isinf(high):  # three seeds at most, or events that hardly any seed has
        return change, math.nan, math.nan
    return change, float(change - high * error), float(change - low * error)


def verdict_of(metric: str, change: float, low: float, high: float) -> str:
    """What may be said of a change: better or worse where the interval excludes zero."""
    if math.isnan(low) or math.isnan(high):
        return UNTESTED
    if low <= 0 <= high:
        return SAME
    if not METRICS[metric].is_judged:
        return DIFFERENT
    return BETTER if (change < 0) == METRICS[metric].lower_is_better else WORSE


def _studentised_quantiles(ours: FloatArray, theirs: FloatArray) -> tuple[float, float]:
    """The outer quantiles of (change* - change) / error* over resamples of the seeds."""
    counts, weights = _resamples(len(ours))
    # Counts of rare events may be zero in some seeds: a resample of those alone has no relative change.
    is_defined = counts @ theirs != 0
    counts, weights = counts[is_defined], weights[is_defined] / weights[is_defined].sum()
    differences = (counts @ ours) / (counts @ theirs) - ours.mean() / theirs.mean()
    errors = _standard_errors(ours, theirs, counts)
    # A resample of one seed alone has no error of its own: it counts as infinitely far out, on its side.
    far = np.where(differences == 0, 0.0, np.copysign(np.inf, differences))
    ratios = np.divide(differences, errors, out=far, where=errors > _TINY)
    order = np.argsort(ratios, kind="stable")
    cumulated = np.cumsum(weights[order])
    tail = (1 - CONFIDENCE) / 2
    at = np.searchsorted(cumulated, [tail - _TINY, 1 - tail - _TINY])
    low, high = ratios[order][np.minimum(at, len(ratios) - 1)]
    return float(low), float(high)


def _standard_errors(ours: FloatArray, theirs: FloatArray, counts: FloatArray) -> FloatArray:
    """Standard error of a ratio of means (delta method), for each row of counts of the seeds."""
    num_seeds = len(ours)
    mean = counts @ theirs / num_seeds
    ratio = (counts @ ours) / (counts @ theirs)
    residuals = ours[None, :] - ratio[:, None] * theirs[None, :]
    variance = np.sum(counts * residuals**2, axis=1) / (num_seeds - 1)
    errors: FloatArray = np.sqrt(variance / num_seeds) / np.abs(mean)
    return errors


@functools.cache
def _resamples(num_seeds: int) -> tuple[FloatArray, FloatArray]:
    """Resamples of the seeds as counts [resample, seed], and the probability of each."""
    if num_seeds > _MOST_ENUMERATED_SEEDS:
        rng = np.random.default_rng(_RESAMPLING_SEED)
        counts = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=_NUM_RESAMPLES)
        return counts.astype(np.float64), np.full(_NUM_RESAMPLES, 1 / _NUM_RESAMPLES)
    draws = itertools.combinations_with_replacement(range(num_seeds), num_seeds)
    counts = np.array([np.bincount(draw, minlength=num_seeds) for draw in draws])
    ways = [math.factorial(num_seeds) / math.prod(math.factorial(int(n)) for n in row) for row in counts]
    return counts.astype(np.float64), np.array(ways) / num_seeds**num_seeds


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan
