"""Looking ahead: what a placement leads to is what happens if the whole run is repeated with it."""

import numpy as np
import pytest
from test_policy_twin import actor_of, prior_of
from test_twin import config_of
from test_vector import of_cluster, requests_of

from vidur_ppo_plugin.twin.look_ahead import COSTS, look_ahead
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin

SPEEDS = [1.0, 0.5, 1.0]
BEFORE = 40


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
