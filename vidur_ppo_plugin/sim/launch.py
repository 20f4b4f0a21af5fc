"""Runs a simulation in this process as `python -m vidur.main` would, and keeps what happened to each request."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vidur_ppo_plugin.record.outcome import RequestOutcome, RunOutcome


def run(arguments: Sequence[str], prepare: Callable[[Any, Any], None] | None = None) -> RunOutcome:
    """Run Vidur with a command line; the hook must be installed (`_autoload.install`).

    `prepare(simulator, config)` is called before the first event.
    """
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    config = parse(arguments)
    set_seeds(config.seed)
    simulator = Simulator(config)
    if prepare is not None:
        prepare(simulator, config)
    return run_simulator(simulator, config)


def parse(arguments: Sequence[str]) -> Any:
    """The simulation config of a command line; Vidur makes the output directory on the way."""
    from vidur.config import SimulationConfig

    with _argv(["vidur.main", *arguments]):
        return SimulationConfig.create_from_cli_args()


def run_simulator(simulator: Any, config: Any) -> RunOutcome:
    """Run a simulator that was just built, recording where each request goes."""
    # All requests are arrival events of the fresh queue; a preemption rewrites their lengths, so keep them.
    requests = [event._request for _, event in sorted(simulator._event_queue, key=lambda item: item[0][:2])]
    lengths = [(request.num_prefill_tokens, request.num_decode_tokens) for request in requests]
    replica_ids = list(simulator.scheduler._replica_schedulers)
    placements: dict[int, int] = {}
    schedule = simulator.scheduler.schedule

    decision_s = 0.0

    def recording_schedule() -> Any:
        nonlocal decision_s
        decided_s = time.perf_counter()
        mapping = schedule()
        decision_s += time.perf_counter() - decided_s
        for replica_id, request in mapping:
            placements[request.id] = replica_ids.index(replica_id)
        return mapping

    simulator.scheduler.schedule = recording_schedule
    start_s = time.perf_counter()
    simulator.run()
    return RunOutcome(
        scheduler=str(config.cluster_config.global_scheduler_config.get_type()),
        num_replicas=len(replica_ids),
        wall_s=time.perf_counter() - start_s,
        output_dir=config.metrics_config.output_dir,
        requests=[
            RequestOutcome(
                arrived_at_s=request.arrived_at,
                prompt_tokens=prompt_tokens,
                decode_tokens=decode_tokens,
                replica=placements.get(request.id),
                first_token_at_s=request._prefill_completed_at or None,
                completed_at_s=request._completed_at if request._completed else None,
                num_restarts=request.num_restarts,
                # 0 until it is scheduled; `_scheduled` itself goes back to False at a preemption.
                scheduled_at_s=request._scheduled_at or None,
            )
            for request, (prompt_tokens, decode_tokens) in zip(requests, lengths, strict=True)
        ],
        decision_s=decision_s,
    )


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    """A context with these command-line arguments: Vidur's parser reads sys.argv and nothing else."""
    saved, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = saved
