"""Compiled functions against their twins in numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.routing import compiled
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.marginal_delay import ClusterWork, DrainCost, marginal_delay
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


COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@given(COUNTS, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 3.0]))
def test_marginal_delay(counts: list[int], seed: int, backlog_weight: float) -> None:
    rng, total = np.random.default_rng(seed), sum(counts)
    work = ClusterWork(
        prefill_tokens=rng.integers(0, 3000, total) * rng.integers(0, 2, total).astype(float),
        decode_tokens=rng.integers(0, 300, total).astype(float),
        context_tokens=rng.integers(0, 4000, total).astype(float),
        ages_s=rng.uniform(0, 5, total),
        counts=np.array(counts, dtype=np.intp),
    )
    cost = DrainCost(
        prefill_s_per_token=rng.uniform(0, 2e-4),
        iteration_s=0.012,
        iteration_s_per_request=1e-4,
        iteration_s_per_context_token=2e-7,
        prefill_chunk_tokens=int(rng.choice([1, 300, 512])),
    )

    def delays() -> list[float]:
        return marginal_delay(
            work,
            prompt_tokens=float(rng.integers(1, 4000)),
            decode_tokens=float(rng.integers(0, 300)),
            speed=speeds,
            cost=cost,
            backlog_weight=backlog_weight,
        ).tolist()

    speeds, state = rng.uniform(0.5, 4.0, len(counts)), rng.bit_generator.state
    found = delays()
    rng.bit_generator.state = state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "load", lambda module, name: None)
        assert found == pytest.approx(delays(), rel=1e-9)
