"""Percentiles of a stream in constant memory: counts in bins whose edges grow by a constant factor."""

import math

import numpy as np

from .outcome import Distribution

_LOWEST = 1e-6
_GROWTH = 1.005  # a percentile is off by at most half a percent
_NUM_BINS = math.ceil(math.log(1e9 / _LOWEST) / math.log(_GROWTH))


class LogHistogram:
    """Values from a microsecond to thirty years; the mean is exact, percentiles to half a percent."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._bins = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, value: float) -> None:
        """Count one value."""
        self.count += 1
        self._sum += value
        index = int(math.log(max(value, _LOWEST) / _LOWEST) / math.log(_GROWTH))
        self._bins[min(index, _NUM_BINS - 1)] += 1

    def distribution(self) -> Distribution:
        """Mean and percentiles of everything added; NaN if nothing was."""
        if self.count == 0:
            return Distribution.of([])
        cumulative = self._bins.cumsum()
        p50, p90, p99 = (
            _LOWEST * _GROWTH ** (float(np.searchsorted(cumulative, share * self.count)) + 0.5)
            for share in (0.5, 0.9, 0.99)
        )
        return Distribution(self._sum / self.count, p50, p90, p99)
