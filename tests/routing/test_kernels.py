"""Compiled functions against their twins in numpy."""

import numpy as np
import pytest

from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo


def snapshot(rng: np.random.Generator, num_replicas: int, slots: int) -> ClusterSnapshot:
    values = rng.uniform(0, 5000, (len(ROWS), num_replicas))
    values[ROW["outstanding_requests"]] += values[ROW["running_requests"]]
    values[ROW["kv_blocks_total"]] = 6000
    waiting = rng.uniform(0, 4000, (2 * slots, num_replicas))
    return ClusterSnapshot(1.0, values, kv_block_size=16, expected_decode_tokens=rng.uniform(1, 500), waiting=waiting)


@pytest.mark.parametrize("num_replicas", [1, 4, 128])
@pytest.mark.parametrize("slots", [0, 3])
def test_features(num_replicas: int, slots: int) -> None:
    rng = np.random.default_rng(num_replicas)
    fast, reference = (FeatureTable(num_waiting_slots=slots, trend_window=5, tail_preference=0.3) for _ in range(2))
    for step in range(10):
        seen = snapshot(rng, num_replicas, slots)
        request = RequestInfo(int(rng.integers(1, 9000)), float(step), rng.uniform(0, 3), rng.uniform(0, 20))
        ours, theirs = fast.observe(seen, request), reference._observe(seen, request, None)
        for name in ("replicas", "request"):
            found, expected = getattr(ours, name), getattr(theirs, name)
            assert found.dtype == expected.dtype == np.float32 and found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        if step == 5:  # the trends can be handed over from one to the other
            fast.load_state_dict(reference.state_dict())


def test_observations_stay_as_they_were() -> None:
    """They wait in the rollout until the policy learns from them."""
    rng, features = np.random.default_rng(0), FeatureTable(num_waiting_slots=2)
    request = RequestInfo(100, 1.0)
    first = features.observe(snapshot(rng, 4, 2), request)
    kept = first.replicas.copy(), first.request.copy()
    features.observe(snapshot(rng, 4, 2), request)
    assert np.array_equal(first.replicas, kept[0]) and np.array_equal(first.request, kept[1])
