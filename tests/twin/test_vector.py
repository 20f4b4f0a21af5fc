"""Many clusters in step against one twin for each: the same features, credit and completions, to the last bit."""

import numpy as np
import pytest
from small_twins import config_of, of_cluster, requests_of

from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.twin.layout import SCHEDULERS
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin, in_order, run
from vidur_ppo_plugin.twin.vector import VectorTwin
from vidur_ppo_plugin.workload.requests import Requests

NUM_REQUESTS = (60, 25, 0, 90)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_cluster_is_as_a_twin_of_its_own(scheduler: str) -> None:
    config = config_of(replica_scheduler=scheduler, max_batch_tokens=600)
    workloads = [requests_of(count, seed) for seed, count in enumerate(NUM_REQUESTS)]
    rng = np.random.default_rng(5)
    preferences = [0.1 * number for number in range(len(workloads))]
    vector = VectorTwin(config, workloads, tail_preferences=preferences)
    twins = [Twin(config) for _ in workloads]
    tables = [FeatureTable(tail_preference=value) for value in preferences]
    sources = [TwinReplicaSource(twin, num_waiting_slots=tables[0].num_waiting_slots) for twin in twins]
    for step in range(max(NUM_REQUESTS)):
        observed = vector.observe()
        increase = vector.marginal_delay(latency_power=1.5, backlog_weight=3.0)
        actions = rng.integers(0, 2, len(workloads))
        np.testing.assert_array_equal(vector.is_done, [step >= count for count in NUM_REQUESTS])
        for cluster, requests in enumerate(workloads):
            if step >= len(requests):
                np.testing.assert_array_equal(increase[cluster], 0.0)
                continue
            columns = (requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
            now_s, prompt_tokens, decode_tokens = (column[step].item() for column in columns)
            info = sources[cluster].request_info(prompt_tokens, now_s)
            snapshot = sources[cluster].snapshot(now_s)
            expected = tables[cluster].observe(snapshot, info)
            np.testing.assert_array_equal(observed.replicas[cluster], expected.replicas)
            np.testing.assert_array_equal(observed.request[cluster], expected.request)
            np.testing.assert_array_equal(observed.token_load[cluster], snapshot.token_load)
            shown, shown_info = vector.snapshot(cluster)
            np.testing.assert_array_equal(shown.values, snapshot.values)
            assert shown_info == info
            credit = twins[cluster].marginal_delay(
                now_s, prompt_tokens, decode_tokens, latency_power=1.5, backlog_weight=3.0
            )
            np.testing.assert_array_equal(increase[cluster], credit)
            twins[cluster].submit(int(actions[cluster]), now_s, prompt_tokens, decode_tokens)
        vector.act(actions)
    vector.drain()
    completions = vector.completions()
    for cluster, twin in enumerate(twins):
        twin.drain()
        expected_all, got = in_order(twin.completions()), of_cluster(completions, cluster)
        for name in got.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(got, name), getattr(expected_all, name), err_msg=name)


def test_starting_anew() -> None:
    config, workloads = config_of(), [requests_of(150, seed) for seed in range(3)]
    vector = VectorTwin(config, [requests_of(40, seed) for seed in (7, 8, 9)])
    for _ in range(20):
        vector.act(np.zeros(3, np.int64))

    vector.reset(workloads)
    while not vector.is_done.all():
        vector.act(np.ones(3, np.int64))
    vector.drain()

    completions = vector.completions()
    for cluster, requests in enumerate(workloads):
        expected = run(config, requests, np.ones(150, np.int64))
        np.testing.assert_array_equal(of_cluster(completions, cluster).completed_at_s, expected.completed_at_s)


def test_what_it_refuses() -> None:
    vector = VectorTwin(config_of(), [requests_of(5, 0)] * 2)
    with pytest.raises(ValueError, match=r"replicas must have shape \(2,\), got \(3,\)"):
        vector.act(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"replicas must be in 0 ... 1, got \[0, 2\]"):
        vector.act(np.array([0, 2]))
    with pytest.raises(ValueError, match="requests must be given for each of 2 clusters, got 1"):
        vector.reset([requests_of(5, 0)])
    with pytest.raises(ValueError, match="decode_tokens of cluster 1 must be >= 1, got 0"):
        bad = Requests(np.array([0.0]), np.array([4]), np.array([0]))
        vector.reset([requests_of(5, 0), bad])
