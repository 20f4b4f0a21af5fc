"""`Twin` by itself: submitting, copying, going back, and what it refuses."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from small_twins import config_of, submit, workload

from vidur_ppo_plugin.twin import layout
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Completions, Twin, in_order, run
from vidur_ppo_plugin.workload.requests import Requests


def run_all(config: TwinConfig, requests: dict[str, Any]) -> Completions:
    replicas, *columns = requests.values()
    return run(config, Requests(*columns), replicas)


def assert_same(one: Completions, other: Completions) -> None:
    for name in one.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("scheduler", layout.SCHEDULERS)
def test_one_by_one_is_as_all_at_once(scheduler: str) -> None:
    requests = workload(200)
    config = config_of(replica_scheduler=scheduler, max_batch_tokens=600)
    expected = run_all(config, requests)
    twin = Twin(config)

    submit(twin, requests, 0, 200)
    twin.drain()

    assert_same(in_order(twin.completions()), expected)
    assert np.all(expected.scheduled_at_s >= expected.arrived_at_s)
    assert np.all(expected.first_token_at_s > expected.scheduled_at_s)
    assert np.all(expected.completed_at_s >= expected.first_token_at_s)


def test_advancing_in_between_changes_nothing() -> None:
    requests = workload(60)
    twin = Twin(config_of())
    for index in range(60):
        for fraction in (0.3, 0.9, 1.0):
            twin.advance(twin.now_s + fraction * (requests["arrived_at_s"][index] - twin.now_s))
        submit(twin, requests, index, index + 1)
    twin.drain()

    assert_same(in_order(twin.completions()), run_all(config_of(), requests))


def test_a_request_alone_takes_what_its_batches_take() -> None:
    """Closed form: two chunks of prompt, then one iteration for each further token, on the slow replica."""
    config = config_of()
    roofline = config.roofline
    chunks = [([64], [0]), ([36], [64])]
    decodes = [([1], [context]) for context in (101, 102)]
    times_s = [roofline.stage_time_ms(*batch, is_last_stage=True) * 2e-3 for batch in chunks + decodes]

    result = run(config, Requests(np.array([3.0]), np.array([100]), np.array([3])), np.array([1]))

    assert result.scheduled_at_s[0] == 3.0
    assert result.first_token_at_s[0] == pytest.approx(3.0 + sum(times_s[:2]), abs=1e-12)
    assert result.completed_at_s[0] == pytest.approx(3.0 + sum(times_s), abs=1e-12)


def test_a_copy_goes_its_own_way() -> None:
    requests = workload(120)
    twin = Twin(config_of())
    submit(twin, requests, 0, 60)
    copy = twin.copy()
    assert copy.num_in_flight == twin.num_in_flight > 0

    copy.drain()
    submit(twin, requests, 60, 120)
    twin.drain()

    alone = run_all(config_of(), {name: values[:60] for name, values in requests.items()})
    assert_same(in_order(copy.completions()), alone)
    assert_same(in_order(twin.completions()), run_all(config_of(), requests))


def test_a_copy_of_a_source_sees_arrivals_of_its_own() -> None:
    source = TwinReplicaSource(Twin(config_of()))
    source.request_info(100, 1.0)
    copied = source.copy(source.twin.copy())
    assert copied.request_info(100, 3.0).since_last_arrival_s == 2.0
    assert copied.request_info(100, 9.0).since_last_arrival_s == 6.0
    here = source.request_info(100, 2.0)
    assert here.since_last_arrival_s == 1.0 and here.arrival_rate_per_s > 0
    copied.twin.submit(0, 9.0, 100, 10)
    assert copied.snapshot(9.0).outstanding_requests.sum() == 1
    assert source.snapshot(9.0).outstanding_requests.sum() == 0


def test_going_back_to_a_checkpoint() -> None:
    """Also when the twin has grown since: its replicas began with room for 64 requests each."""
    requests = workload(400)
    requests["arrived_at_s"] /= 20.0
    twin = Twin(config_of())
    submit(twin, requests, 0, 40)
    checkpoint = twin.checkpoint()
    submit(twin, requests, 40, 400)
    assert twin.state.cells.shape[1] > checkpoint.state.cells.shape[1]
    twin.drain()
    expected = in_order(twin.completions())

    for _ in range(2):
        twin.restore(checkpoint)
        assert twin.num_submitted == 40
        submit(twin, requests, 40, 400)
        twin.drain()
        assert_same(in_order(twin.completions()), expected)


def test_completions_are_handed_out_once() -> None:
    requests = workload(50)
    twin = Twin(config_of())
    submit(twin, requests, 0, 50)
    early = twin.completions()
    twin.drain()
    late = twin.completions()

    assert sorted([*early.index, *late.index]) == list(range(50))
    assert len(twin.completions()) == 0
    assert early.completed_at_s.max() < requests["arrived_at_s"][-1]


def test_memory_stays_flat() -> None:
    twin = Twin(config_of())
    sizes = []
    tracemalloc.start()
    for part in range(20):
        requests = workload(2000, seed=part)
        requests["arrived_at_s"] = 3 * requests["arrived_at_s"] + twin.now_s
        twin.submit_all(*requests.values())
        twin.completions()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert twin.num_submitted == 40_000
    assert sizes[-1] < sizes[4] + 200_000  # bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replica_scheduler": "mnemosyne_edf"}, "replica_scheduler must be one of sarathi, .* got 'mnemosyne_edf'"),
        ({"batch_size_cap": 0}, r"batch_size_cap must be >= num_pipeline_stages \(1\), got 0"),
        ({"num_blocks": 0}, "num_blocks must be >= 1, got 0"),
        ({"speed_factors": [1.0, 0.0]}, "speed_factors must be > 0"),
        ({"replica_scheduler": "orca", "max_request_tokens": 8}, "max_request_tokens must be >= block_size"),
    ],
)
def test_clusters_that_it_does_not_cover(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_requests_that_it_refuses() -> None:
    twin = Twin(config_of())
    twin.advance(5.0)
    with pytest.raises(ValueError, match=r"the time must be >= 5.0 s, where the twin is, got 4.0"):
        twin.submit(0, 4.0, 10, 10)
    with pytest.raises(ValueError, match=r"replica must be in 0 ... 1, got 2"):
        twin.submit(2, 6.0, 10, 10)
    with pytest.raises(ValueError, match="decode_tokens must be >= 1, got 10 and 0"):
        twin.submit(0, 6.0, 10, 0)
    with pytest.raises(ValueError, match=r"the time must be >= 5.0 s"):
        twin.advance(1.0)
    with pytest.raises(ValueError, match="arrived_at_s must be in order"):
        twin.submit_all(np.array([0, 0]), np.array([7.0, 6.0]), np.array([5, 5]), np.array([5, 5]))


def test_a_request_that_never_fits_is_reported() -> None:
    twin = Twin(config_of(num_blocks=10))
    twin.submit(0, 0.0, 500, 5)
    with pytest.raises(ValueError, match="1 requests can never run on sarathi"):
        twin.drain()
