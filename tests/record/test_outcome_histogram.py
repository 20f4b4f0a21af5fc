"""Constant memory, percentiles to half a percent."""

import numpy as np
import pytest

from vidur_ppo_plugin.record.histogram import LogHistogram
from vidur_ppo_plugin.record.outcome import Distribution


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_percentiles_of_a_stream(scale: float) -> None:
    values = np.random.default_rng(0).lognormal(size=20000) * scale
    histogram = LogHistogram()
    size = histogram._bins.nbytes
    for value in values:
        histogram.add(float(value))
    ours, exact = histogram.distribution(), Distribution.of(values.tolist())
    assert ours.mean == pytest.approx(exact.mean)
    for name in ("p50", "p90", "p99"):
        assert getattr(ours, name) == pytest.approx(getattr(exact, name), rel=0.006)
    assert histogram._bins.nbytes == size and histogram.count == 20000


def test_extremes_and_nothing() -> None:
    histogram = LogHistogram()
    assert np.isnan(histogram.distribution().mean)
    for value in (0.0, 1e12):
        histogram.add(value)
    assert histogram.distribution().mean == 5e11
