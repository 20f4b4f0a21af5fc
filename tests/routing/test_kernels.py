"""Compiled functions against plain numpy, written for this test."""

import numpy as np
import pytest

from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable, Observation
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo

SCALES = FeatureScales()
WINDOW = 5


def snapshot(rng: np.random.Generator, num_replicas: int, slots: int) -> ClusterSnapshot:
    values = rng.uniform(0, 5000, (len(ROWS), num_replicas)) * rng.integers(0, 2, (len(ROWS), num_replicas))
    values[ROW["outstanding_requests"]] += values[ROW["running_requests"]]
    values[ROW["kv_blocks_total"]] = 6000
    waiting = rng.uniform(0, 4000, (2 * slots, num_replicas)) * rng.integers(0, 2, (2 * slots, num_replicas))
    return ClusterSnapshot(1.0, values, kv_block_size=16, expected_decode_tokens=rng.uniform(1, 500), waiting=waiting)


class Reference:
    """The features of docs/features.md, in numpy."""

    def __init__(self) -> None:
        self.average = self.last = np.zeros((0, 0))

    def observe(self, seen: ClusterSnapshot, request: RequestInfo, tail_preference: float) -> Observation:
        levels = np.log1p(
            [
                (seen.outstanding_requests - seen.running_requests) / SCALES.requests,
                seen.running_requests / SCALES.requests,
                seen.prefill_tokens / SCALES.tokens,
                seen.context_tokens / SCALES.tokens,
                seen.decoded_tokens / SCALES.tokens,
                seen.oldest_wait_s / SCALES.seconds,
                seen.recent_latency_s / SCALES.seconds,
                seen.completion_rate_per_s / SCALES.rate_per_s,
                (seen.prefill_tokens + 0.05 * seen.context_tokens + 20 * seen.outstanding_requests) / SCALES.tokens,
                seen.kv_blocks_used / seen.kv_blocks_total,
                seen.token_time_s / SCALES.token_s,
                seen.typical_prompt_tokens / SCALES.tokens,
            ]
        )
        trends, load = levels[[0, 2, 3, 8]], levels[8]
        if self.last.shape != trends.shape:
            self.average = self.last = trends
        trend, change = trends - self.average, trends - self.last
        self.average, self.last = self.average + 2 / (WINDOW + 1) * trend, trends
        half = len(seen.waiting) // 2
        slots = np.log1p([*seen.waiting[:half] / SCALES.tokens, *seen.waiting[half:] / SCALES.seconds])
        relative = levels - levels.mean(axis=1, keepdims=True)
        cached = seen.cached_prompt_tokens[None] / request.prompt_tokens
        rows = (levels, relative, trend, change, slots.reshape(-1, seen.num_replicas), cached)
        vector = [
            np.log1p(request.prompt_tokens / SCALES.tokens),
            np.log1p(request.since_last_arrival_s / SCALES.seconds),
            np.log1p(request.arrival_rate_per_s / SCALES.rate_per_s),
            np.log1p(seen.expected_decode_tokens / SCALES.tokens),
            *(load.mean(), levels[0].mean(), load.std(), load.max() - load.min()),
            np.log(seen.num_replicas) / np.log(1024),
            tail_preference,
        ]
        return Observation(np.concatenate(rows).T.astype(np.float32), np.array(vector, np.float32))


@pytest.mark.parametrize("num_replicas", [1, 4, 128, 1024])
@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("are_chosen", [False, True])
def test_features(num_replicas: int, slots: int, are_chosen: bool) -> None:
    rng = np.random.default_rng(num_replicas)
    table, reference = FeatureTable(num_waiting_slots=slots, trend_window=WINDOW, tail_preference=0.3), Reference()
    for step in range(10):
        seen = snapshot(rng, num_replicas, slots)
        request = RequestInfo(int(rng.integers(1, 9000)), float(step), rng.uniform(0, 3), rng.uniform(0, 20))
        chosen = rng.permutation(num_replicas)[: max(1, num_replicas // 3)] if are_chosen else None
        found, expected = table.observe(seen, request, chosen), reference.observe(seen, request, 0.3)
        rows = expected.replicas if chosen is None else expected.replicas[chosen]
        assert found.replicas.dtype == found.request.dtype == np.float32 and found.replicas.shape == rows.shape
        np.testing.assert_allclose(found.replicas, rows, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.request, expected.request, rtol=1e-6, atol=1e-6)


def test_observations_stay_as_they_were() -> None:
    """They wait in the rollout until the policy learns from them."""
    rng, features = np.random.default_rng(0), FeatureTable(num_waiting_slots=2)
    request = RequestInfo(100, 1.0)
    first = features.observe(snapshot(rng, 4, 2), request)
    kept = first.replicas.copy(), first.request.copy()
    features.observe(snapshot(rng, 4, 2), request)
    assert np.array_equal(first.replicas, kept[0]) and np.array_equal(first.request, kept[1])
