"""A twin beside a live Vidur simulation, told of every placement, is where Vidur is; and what no twin covers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE
from twin_runs import assert_equal, column, replay, simulator_of

from vidur_ppo_plugin.learn.credit.exact import ShadowTwin
from vidur_ppo_plugin.sim import launch
from vidur_ppo_plugin.sim.twin_config import twin_config
from vidur_ppo_plugin.twin.layout import SCHEDULERS
from vidur_ppo_plugin.twin.twin import Twin

NUM_REQUESTS = 30
SITUATIONS: dict[str, dict[str, Any]] = {
    "usual": {"roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 0.5]},
    "KV pressure, two stages": {**KV_PRESSURE, "replica_config_num_pipeline_stages": 2},
    "three arrivals at once": {"poisson_request_interval_generator_config_qps": 30.0},
}


def move_arrivals(simulator: Any, moments_s: dict[int, float]) -> None:
    """Let requests arrive at other moments."""
    for _, event in simulator._event_queue:
        request = event._request
        request._arrived_at = event._time = moments_s.get(request.id, request._arrived_at)
        event._priority_number = event._get_priority_number()
    simulator._event_queue = sorted((event._priority_number, event) for _, event in simulator._event_queue)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_marginal_delays_in_a_live_run_add_up_to_all_latencies(scheduler: str, situation: str, tmp_path: Path) -> None:
    """The identity of marginal delay holds only if the shadow is where Vidur is at every decision."""
    simulator, config = simulator_of(
        tmp_path,
        global_scheduler_config_type="random",
        replica_scheduler_config_type=scheduler,
        synthetic_request_generator_config_num_requests=NUM_REQUESTS,
        **SITUATIONS[situation],
    )
    if "at once" in situation:
        arrivals_s = sorted(event._request.arrived_at for _, event in simulator._event_queue)
        move_arrivals(simulator, {index: arrivals_s[index // 3 * 3] for index in range(NUM_REQUESTS)})
    shadow, added_s = ShadowTwin(twin_config(config)), []
    replica_ids = list(simulator.scheduler._replica_schedulers)
    schedule = simulator.scheduler.schedule

    def followed_schedule() -> Any:
        placements = schedule()
        for replica_id, request in placements:
            replica, lengths = replica_ids.index(replica_id), (request.num_prefill_tokens, request.num_decode_tokens)
            added_s.append(shadow.marginal_delay(request.arrived_at, *lengths)[replica])
            shadow.place(replica, request.arrived_at, *lengths)
        return placements

    simulator.scheduler.schedule = followed_schedule
    outcome = launch.run_simulator(simulator, config)

    assert len(added_s) == NUM_REQUESTS
    assert sum(added_s) == pytest.approx(sum(outcome_latencies(outcome)), rel=1e-9)


def outcome_latencies(outcome: Any) -> Any:
    return column(outcome, "completed_at_s") - column(outcome, "arrived_at_s")


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_arrival_at_the_very_moment_of_a_batch_end(scheduler: str, num_stages: int, tmp_path: Path) -> None:
    """Every second request arrives when an earlier one is completed, so that the order of events decides."""
    simulator, config = simulator_of(
        tmp_path,
        global_scheduler_config_type="random",
        replica_scheduler_config_type=scheduler,
        replica_config_num_pipeline_stages=num_stages,
        cluster_config_num_replicas=1,
        synthetic_request_generator_config_num_requests=NUM_REQUESTS,
    )
    twin, moments_s = Twin(twin_config(config)), {}
    requests = [event._request for _, event in sorted(simulator._event_queue, key=lambda item: item[0][:2])]
    for number, request in enumerate(requests):
        if number % 2 == 0:
            moment_s = twin.now_s + 0.4
        else:
            future = twin.copy()
            future.drain()
            completions_s = future.completions().completed_at_s
            moment_s = float(completions_s[completions_s > twin.now_s].min())
        twin.submit(0, moment_s, request.num_prefill_tokens, request.num_decode_tokens)
        moments_s[request.id] = moment_s
    move_arrivals(simulator, moments_s)

    outcome = launch.run_simulator(simulator, config)

    ties = np.intersect1d(column(outcome, "arrived_at_s"), column(outcome, "completed_at_s"))
    assert len(ties) >= NUM_REQUESTS // 3
    assert_equal(replay(config, outcome), outcome)


def test_what_the_twin_does_not_cover_is_refused_by_name(tmp_path: Path) -> None:
    refused = {
        "--replica_scheduler_config_type must be one of sarathi, vllm": {
            "replica_scheduler_config_type": "mnemosyne_fcfs"
        },
        "--replica_config_enable_sequence_pipeline_parallel is not covered": {
            "replica_config_num_pipeline_stages": 2,
            "replica_config_enable_sequence_pipeline_parallel": True,
        },
        "--replica_config_kv_parallel_size must be 1 for the twin, got 2": {
            "replica_scheduler_config_type": "mnemosyne_fcfs_fixed_chunk",
            "replica_config_kv_parallel_size": 2,
            "replica_config_max_num_tokens_per_kvp_group": 1024,
        },
    }
    for message, flags in refused.items():
        _, config = simulator_of(tmp_path, **flags)
        with pytest.raises(ValueError, match=message):
            twin_config(config)
