"""Puts a router in the place of a simulation's global scheduler: for what Vidur's own schedulers cannot be told."""

from typing import Any

from vidur_ppo_plugin.flags import speed_factors
from vidur_ppo_plugin.routing.routers import Router
from vidur_ppo_plugin.routing.visibility import Visibility

from .replica_source import VidurReplicaSource


def route(simulator: Any, config: Any, router: Router, visibility: Visibility) -> None:
    """Let `router` place the requests of a simulator that was just built, seeing what `visibility` shows."""
    scheduler = simulator.scheduler
    replica_ids = list(scheduler._replica_schedulers)
    source = VidurReplicaSource(
        list(scheduler._replica_schedulers.values()),
        speed_factors=speed_factors(config.execution_time_predictor_config, len(replica_ids)),
    )

    def schedule() -> list[tuple[Any, Any]]:
        scheduler.sort_requests()
        placements = []
        now_s = scheduler._request_queue[-1].arrived_at if scheduler._request_queue else 0.0
        for request in scheduler._request_queue:
            info = source.request_info(request)
            index = router(visibility.view(source.snapshot(now_s)), info)
            source.on_dispatch(index, request)
            visibility.on_dispatch(index, info.prompt_tokens)
            placements.append((replica_ids[index], request))
        scheduler._request_queue.clear()
        return placements

    scheduler.schedule = schedule
