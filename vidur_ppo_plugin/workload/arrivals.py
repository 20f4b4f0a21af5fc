"""Arrival times: a renewal process with gamma-distributed gaps; a coefficient of variation of 1 is a Poisson process.

Vidur's own `poisson` caps every gap at three times the mean, so that its rate is 5 % above what it says; this does not.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .lengths import BLOCK

FloatArray = NDArray[np.float64]

_STREAM = 2


def gaps(seed: int, *, qps: float, cv: float = 1.0) -> Iterator[FloatArray]:
    """Seconds between arrivals, BLOCK at a time, without end; another rate stretches the same gaps."""
    if not (math.isfinite(qps) and qps > 0):
        raise ValueError(f"the arrival rate must be finite and > 0 requests/s, got {qps}")
    if not (math.isfinite(cv) and cv > 0):
        raise ValueError(f"the coefficient of variation of the gaps must be finite and > 0, got {cv}")
    rng = np.random.default_rng([seed, _STREAM])
    shape = 1.0 / cv**2
    while True:
        yield rng.gamma(shape, 1.0 / shape, BLOCK) / qps


def arrival_times(seed: int, num_requests: int, *, qps: float, cv: float = 1.0) -> FloatArray:
    """Arrival times of the first `num_requests` requests of a seed, in seconds."""
    blocks = gaps(seed, qps=qps, cv=cv)
    parts = [np.zeros(0), *(next(blocks) for _ in range(-(-num_requests // BLOCK)))]
    # cumsum adds one after the other, as Vidur does, so the last bit is the same.
    return np.cumsum(np.concatenate(parts)[:num_requests])
