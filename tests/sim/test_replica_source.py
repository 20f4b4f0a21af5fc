"""The counters behind a snapshot equal a full recount at every decision, for every kind of replica scheduler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE, simulate

from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot
from vidur_ppo_plugin.sim import cluster
from vidur_ppo_plugin.sim.replica_source import VidurReplicaSource

SCHEDULERS = [
    "sarathi",
    "vllm",
    "orca",
    "mnemosyne_fcfs_fixed_chunk",
    "mnemosyne_fcfs",
    "mnemosyne_edf",
    "mnemosyne_lrs",
    "mnemosyne_st",
]


def queued(scheduler: Any) -> list[Any]:
    """Requests waiting for admission, whatever form the queue has."""
    return [entry[1] if isinstance(entry, tuple) else entry for entry in scheduler._request_queue]


class RecountingSource(VidurReplicaSource):
    """Compares every snapshot with what a walk over all requests of the replica finds."""

    is_compiled = False
    comparisons = 0
    saw_waiting = False
    saw_context = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {"num_waiting_slots": 3, "is_compiled": RecountingSource.is_compiled}
        super().__init__(*args, **{**kwargs, **own})

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        snapshot = super().snapshot(now_s)
        for index, scheduler in enumerate(self._schedulers):
            requests = [request for request, _ in self._in_flight[index].values()]
            allocated = getattr(scheduler, "_req_block_counter", scheduler._allocation_map)
            waiting = [request for request in requests if request.id not in allocated]
            assert snapshot.outstanding_requests[index] == sum(not r.completed for r in requests)
            assert snapshot.running_requests[index] == len(allocated)
            assert snapshot.waiting_requests[index] == len(waiting)
            assert snapshot.context_tokens[index] == sum(r.num_processed_tokens for r in requests)
            assert snapshot.prefill_tokens[index] == sum(
                r.num_prefill_tokens - r.num_processed_tokens for r in requests if not r.is_prefill_complete
            )
            assert snapshot.kv_blocks_used[index] == sum(allocated.values())
            assert snapshot.decoded_tokens[index] == sum(
                r.num_prefill_tokens - prompt + r.num_processed_decode_tokens
                for r, prompt in self._in_flight[index].values()
            )
            # Requests of the same instant are dispatched but not queued yet; their wait is 0.
            heads = [*queued(scheduler), *(r for r in waiting if r not in queued(scheduler))][:3]
            assert snapshot.oldest_wait_s[index] == pytest.approx(now_s - heads[0].arrived_at if heads else 0.0)
            padding = [0] * (3 - len(heads))
            assert snapshot.waiting[:3, index].tolist() == [r.num_prefill_tokens for r in heads] + padding
            ages = [now_s - r.arrived_at for r in heads] + padding
            assert snapshot.waiting[3:, index].tolist() == pytest.approx(ages)
            RecountingSource.comparisons += 1
            RecountingSource.saw_waiting |= len(waiting) > 0
            RecountingSource.saw_context |= bool(snapshot.context_tokens[index] > 0)
        return snapshot


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"])
def recounting(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> type[RecountingSource]:
    RecountingSource.is_compiled = request.param
    RecountingSource.comparisons = 0
    RecountingSource.saw_waiting = RecountingSource.saw_context = False
    monkeypatch.setattr(cluster, "VidurReplicaSource", RecountingSource)
    return RecountingSource


@pytest.mark.parametrize("replica_scheduler", SCHEDULERS)
def test_counters_equal_a_recount(tmp_path: Path, recounting: Any, replica_scheduler: str) -> None:
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="least_tokens",
        replica_scheduler_config_type=replica_scheduler,
        poisson_request_interval_generator_config_qps=25.0,
    )
    assert len(outcome.completed) == 100
    assert recounting.comparisons == 400
    assert recounting.saw_waiting and recounting.saw_context


@pytest.mark.parametrize("replica_scheduler", ["sarathi", "vllm", "mnemosyne_fcfs_fixed_chunk"])
def test_counters_survive_preemptions(tmp_path: Path, recounting: Any, replica_scheduler: str) -> None:
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="least_tokens",
        replica_scheduler_config_type=replica_scheduler,
        **KV_PRESSURE,
    )
    assert len(outcome.completed) == 100
    assert sum(request.num_restarts for request in outcome.requests) > 5
    assert recounting.comparisons == 400


@pytest.mark.parametrize(
    "parallelism",
    [
        {"replica_config_num_pipeline_stages": 2},
        {
            "replica_config_kv_parallel_size": 4,
            "replica_config_max_num_tokens_per_kvp_group": 1024,
            "replica_scheduler_config_type": "mnemosyne_fcfs_fixed_chunk",
        },
    ],
    ids=["pipeline", "kv-parallel"],
)
def test_counters_with_parallelism(tmp_path: Path, recounting: Any, parallelism: dict[str, Any]) -> None:
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="least_outstanding",
        poisson_request_interval_generator_config_qps=25.0,
        **parallelism,
    )
    assert len(outcome.completed) == 100
    assert recounting.comparisons == 400


def test_requests_of_one_instant_see_each_other(tmp_path: Path, recounting: Any) -> None:
    """With static intervals all requests arrive at t = 0: one call places all, the others find an empty queue."""
    outcome = simulate(
        tmp_path, global_scheduler_config_type="least_outstanding", interval_generator_config_type="static"
    )
    assert {request.arrived_at_s for request in outcome.requests} == {0.0}
    assert outcome.replica_shares == [0.25] * 4


def test_the_estimate_of_output_length_is_the_mean_of_finished_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[VidurReplicaSource] = []

    class KeptSource(VidurReplicaSource):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            sources.append(self)
            assert self.expected_decode_tokens == 77.0

    monkeypatch.setattr(cluster, "VidurReplicaSource", KeptSource)
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="shortest_delay",
        shortest_delay_global_scheduler_config_initial_decode_tokens=77.0,
        **KV_PRESSURE,
    )
    # Preemptions rewrite Vidur's lengths; the estimate must use the original ones.
    assert sum(request.num_restarts for request in outcome.requests) > 0
    expected = np.mean([request.decode_tokens for request in outcome.requests])
    assert sources[0].expected_decode_tokens == pytest.approx(float(expected))
