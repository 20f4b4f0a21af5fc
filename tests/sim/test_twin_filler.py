"""The twin filled from a live Vidur simulation goes on as Vidur does."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE
from twin_runs import column, simulator_of

from vidur_ppo_plugin.sim import launch
from vidur_ppo_plugin.twin.layout import OUTSTANDING, SCHEDULERS
from vidur_ppo_plugin.twin.twin import Checkpoint, Twin, in_order

NUM_REQUESTS = 30
SITUATIONS: dict[str, dict[str, Any]] = {
    "usual": {"roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 0.5]},
    "KV pressure, two stages": {**KV_PRESSURE, "replica_config_num_pipeline_stages": 2},
    "three arrivals at once": {"poisson_request_interval_generator_config_qps": 30.0},
}


def filling_simulator(
    output_dir: Path, every: float, **flags: Any
) -> tuple[Any, Any, Any, list[tuple[int, Checkpoint]]]:
    """A simulator that fills a twin at some of its decisions, and keeps what was filled in."""
    from vidur_ppo_plugin.sim.twin_filler import TwinFiller

    simulator, config = simulator_of(
        output_dir,
        global_scheduler_config_type="random",
        synthetic_request_generator_config_num_requests=NUM_REQUESTS,
        **flags,
    )
    scheduler = simulator.scheduler
    filler = TwinFiller(config, list(scheduler._replica_schedulers.values()))
    rng, filled = random.Random(1), []
    schedule = scheduler.schedule

    def filling_schedule() -> Any:
        if scheduler._request_queue and rng.random() < every:
            first = min(request.id for request in scheduler._request_queue)
            filled.append((first, filler.fill(scheduler._request_queue[0].arrived_at).checkpoint()))
        return schedule()

    scheduler.schedule = filling_schedule
    return simulator, config, filler, filled


def move_arrivals(simulator: Any, moments_s: dict[int, float]) -> None:
    """Let requests arrive at other moments."""
    for _, event in simulator._event_queue:
        request = event._request
        request._arrived_at = event._time = moments_s.get(request.id, request._arrived_at)
        event._priority_number = event._get_priority_number()
    simulator._event_queue = sorted((event._priority_number, event) for _, event in simulator._event_queue)


def assert_goes_on_alike(filler: Any, filled: list[tuple[int, Checkpoint]], outcome: Any) -> None:
    """From every moment that was filled in, later requests placed as in Vidur: completions are the same."""
    requests = outcome.requests
    for first, checkpoint in filled:
        filler.twin.restore(checkpoint)
        for request in requests[first:]:
            filler.twin.submit(request.replica, request.arrived_at_s, request.prompt_tokens, request.decode_tokens)
        filler.twin.drain()
        rest = in_order(filler.twin.completions())
        unfinished = [
            index
            for index, request in enumerate(requests)
            if index >= first or request.completed_at_s >= requests[first].arrived_at_s
        ]
        assert rest.index.tolist() == unfinished
        for name in ("completed_at_s", "first_token_at_s", "num_restarts"):
            np.testing.assert_array_equal(getattr(rest, name), column(outcome, name)[unfinished], err_msg=name)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_filled_twin_goes_on_as_vidur_does(scheduler: str, situation: str, tmp_path: Path) -> None:
    simulator, config, filler, filled = filling_simulator(
        tmp_path, 0.3, replica_scheduler_config_type=scheduler, **SITUATIONS[situation]
    )
    if "at once" in situation:
        arrivals_s = sorted(event._request.arrived_at for _, event in simulator._event_queue)
        move_arrivals(simulator, {index: arrivals_s[index // 3 * 3] for index in range(NUM_REQUESTS)})

    outcome = launch.run_simulator(simulator, config)

    assert len(filled) >= 3
    assert any(checkpoint.state.cells[:, OUTSTANDING].sum() > 4 for _, checkpoint in filled)
    assert_goes_on_alike(filler, filled, outcome)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_arrival_at_the_very_moment_of_a_batch_end(scheduler: str, num_stages: int, tmp_path: Path) -> None:
    """Every second request arrives when an earlier one is completed, so that the order of events decides."""
    simulator, config, filler, filled = filling_simulator(
        tmp_path,
        1.0,
        replica_scheduler_config_type=scheduler,
        replica_config_num_pipeline_stages=num_stages,
        cluster_config_num_replicas=1,
    )
    twin, moments_s = Twin(filler.twin.config), {}
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
    assert_goes_on_alike(filler, filled, outcome)


def test_what_the_twin_does_not_cover_is_refused_by_name(tmp_path: Path) -> None:
    from vidur_ppo_plugin.sim.twin_filler import twin_config

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
