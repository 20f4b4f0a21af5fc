"""What a placement leads to is what happens if the whole run is repeated with it; its rewards by hand."""

import numpy as np
import pytest
from small_twins import actor_of, config_of, of_cluster, prior_of, requests_of

from vidur_ppo_plugin.learn.credit.look_ahead import COSTS, LookAhead, Prospects, look_ahead, rewards
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin

SPEEDS = [1.0, 0.5, 1.0]
BEFORE = 40
MEAN_ONLY = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), latency_squared=(0.0, 0.0), first_token=(0.0, 0.0))


def twin_of(num_clusters: int = 2, num_requests: int = 90) -> PolicyTwin:
    config = config_of(speed_factors=SPEEDS)
    workloads = [requests_of(num_requests, seed) for seed in range(num_clusters)]
    return PolicyTwin(config, workloads, prior=prior_of(config), tail_preferences=[0.2, 0.9][:num_clusters])


def test_costs_are_those_of_the_repeated_run() -> None:
    twin, actor = twin_of(), actor_of()
    before = twin.play(actor, BEFORE)
    done_before = [set(of_cluster(twin.completions(), 0).index.tolist()), set()]
    seen = look_ahead(twin, actor, 20, np.random.default_rng(0))
    assert seen.sums.shape == (2, 3, len(COSTS))
    for replica in range(3):
        anew = twin_of()
        forced = np.full((2, BEFORE + 21), -1)
        forced[:, :BEFORE], forced[:, BEFORE] = before.actions, replica
        anew.play(actor, BEFORE + 21, forced=forced)
        anew.drain()
        served = of_cluster(anew.completions(), 0)
        is_in_sight = ~np.isin(served.index, list(done_before[0]))
        latency_s = (served.completed_at_s - served.arrived_at_s)[is_in_sight]
        first_s = (served.first_token_at_s - served.arrived_at_s)[is_in_sight]
        expected = [latency_s.sum(), (latency_s**2).sum(), first_s.sum(), (first_s**2).sum()]
        np.testing.assert_allclose(seen.sums[0, replica], expected, rtol=1e-12)
        assert seen.num_requests[0] == is_in_sight.sum()


def test_with_nobody_later_it_is_the_marginal_delay() -> None:
    twin, actor = twin_of(), actor_of()
    twin.play(actor, BEFORE)
    sums = look_ahead(twin, actor, 0, np.random.default_rng(0)).sums[..., 0]
    increase = twin.marginal_delay()
    np.testing.assert_allclose(sums - sums[:, :1], increase - increase[:, :1], atol=1e-9)


def test_looking_changes_nothing() -> None:
    looked, other, actor = twin_of(), twin_of(), actor_of()
    for twin in (looked, other):
        twin.play(actor, BEFORE)
    first = look_ahead(looked, actor, 20, np.random.default_rng(0))
    again = look_ahead(looked, actor, 20, np.random.default_rng(0))
    np.testing.assert_array_equal(first.sums, again.sums)
    went_on, expected = looked.play(actor, 40), other.play(actor, 40)
    np.testing.assert_array_equal(went_on.replicas, expected.replicas)
    np.testing.assert_array_equal(went_on.actions, expected.actions)


def test_the_end_of_the_requests_bounds_the_future() -> None:
    twin, actor = twin_of(), actor_of()
    twin.play(actor, 85)
    near, far = (look_ahead(twin, actor, later, np.random.default_rng(0)) for later in (4, 400))
    np.testing.assert_array_equal(near.sums, far.sums)
    twin.play(actor, 5)
    with pytest.raises(ValueError, match=r"clusters \[0, 1\] have no next request"):
        look_ahead(twin, actor, 4, np.random.default_rng(0))


# --- Rewards ---


def prospects(latencies: list[list[float]], num_requests: float = 10.0) -> Prospects:
    """Of clusters whose total latency on each replica is given; the other costs are the same everywhere."""
    sums = np.ones((len(latencies), len(latencies[0]), 4))
    sums[..., 0] = latencies
    return Prospects(sums, np.full(len(latencies), num_requests))


def nothing_at_once(seen: list[Prospects]) -> FloatArray:
    """Marginal delays that are the same on all replicas."""
    clusters, replicas, _ = seen[0].sums.shape
    return np.ones((clusters, len(seen), replicas))


def test_a_reward_counts_in_standard_deviations_of_the_cluster() -> None:
    # In the second cluster replicas differ by a hundred times as much; what is learned from it is the same.
    decisions = [prospects([[18.0, 22.0], [1800.0, 2200.0]]), prospects([[21.0, 19.0], [2100.0, 1900.0]])]
    every = rewards(decisions, nothing_at_once(decisions), MEAN_ONLY.weights([0.0, 0.0]))
    apart = np.array([[1.0, -1.0], [-0.5, 0.5]])
    expected = apart / np.sqrt(np.mean(apart**2))
    for cluster in every:
        np.testing.assert_allclose(cluster - cluster.mean(axis=1, keepdims=True), expected)


def test_rewards_know_no_unit() -> None:
    rng = np.random.default_rng(0)
    weights = LookAhead(requests_per_replica=1, marginal_delay=(0.5, 1.0)).weights([0.0, 0.7])
    seen = [Prospects(rng.random((2, 3, 4)) + 9.0, np.full(2, 8.0)) for _ in range(5)]
    slower = [Prospects(one.sums * np.array([10.0, 100.0, 10.0, 100.0]), one.num_requests) for one in seen]
    at_once_s = rng.random((2, 5, 3))
    np.testing.assert_allclose(rewards(slower, 10.0 * at_once_s, weights), rewards(seen, at_once_s, weights))


def test_a_single_bad_future_is_bounded() -> None:
    ordinary = [prospects([[20.0, 20.0]]) for _ in range(200)]
    seen = [*ordinary, prospects([[20.0, 9000.0]])]
    every = rewards(seen, nothing_at_once(seen), MEAN_ONLY.weights([0.0]))
    assert every[0, -1, 0] - every[0, -1, 1] == pytest.approx(20.0)


def test_the_preference_moves_the_weights() -> None:
    ahead = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), first_token_squared=(0.0, 2.0))
    mean, middle, tail = ahead.weights([0.0, 0.5, 1.0])
    assert mean.sum() == pytest.approx(1.0) and tail.sum() == pytest.approx(1.0)
    assert mean[3] == 0.0 < middle[3] < tail[3]
    assert mean[0] > middle[0] > tail[0]


def test_marginal_delay_counts_as_latency_does() -> None:
    ahead = LookAhead(requests_per_replica=1, first_token=(0.0, 0.0), marginal_delay=(1.0, 0.0))
    seen = [prospects([[18.0, 22.0]] * 2), prospects([[22.0, 18.0]] * 2)]
    at_once_s = np.array([[[10.0, 0.0], [0.0, 1.0]]] * 2)
    both, looking = rewards(seen, at_once_s, ahead.weights([0.0, 1.0]))
    # On the replicas: 18 + 10 against 22 + 0 seconds, then 22 + 0 against 18 + 1. The second cluster only looks ahead.
    np.testing.assert_allclose(np.diff(both).ravel(), np.array([6.0, 3.0]) / np.sqrt(np.mean([9.0, 2.25])))
    np.testing.assert_allclose(np.diff(looking).ravel(), [-2.0, 2.0])


def test_boldness_makes_differences_count_for_more() -> None:
    ahead = LookAhead(requests_per_replica=1, boldness=(4.0, 1.0))
    seen = [prospects([[18.0, 22.0]] * 3)]
    bold, middle, careful = (np.ptp(every) for every in ahead.rewards(seen, nothing_at_once(seen), [0.0, 0.5, 1.0]))
    assert (bold, middle) == (pytest.approx(4 * careful), pytest.approx(2 * careful))
