"""Global schedulers of Vidur whose requests a router places; the heuristics as scheduler types."""

from typing import Any

from vidur.logger import init_logger
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

from vidur_ppo_plugin import __version__
from vidur_ppo_plugin.clusters.drive import Run
from vidur_ppo_plugin.flags import check_scheduler
from vidur_ppo_plugin.routing.heuristics import HEURISTICS
from vidur_ppo_plugin.routing.routers import Router, build_router
from vidur_ppo_plugin.routing.visibility import Visibility

from .cluster import VidurCluster
from .delay_model import build_delay_model

logger = init_logger("vidur.vidur_ppo_plugin")


def place_queued(scheduler: Any, cluster: VidurCluster, run: Run, router: Router) -> list[tuple[Any, Any]]:
    """What a global scheduler's `schedule` has to do: place its queued requests, each decision seeing the one before.

    Vidur passes no time. It calls this once for each arrival, so now is the newest arrival; requests of equal arrival
    time come in one call and leave the others an empty queue.
    """
    scheduler.sort_requests()
    requests = scheduler._request_queue
    if not requests:
        return []
    cluster.queue(requests, requests[-1].arrived_at)
    requests.clear()
    run.go(router)
    return cluster.take_placements()


def replace_router(simulator: Any, config: Any, router: Router, visibility: Visibility) -> None:
    """Let `router` place the requests of a simulator that was just built, seeing what `visibility` shows.

    For what Vidur's own schedulers cannot be told: old reports and drained replicas.
    """
    scheduler = simulator.scheduler
    cluster = VidurCluster(config, scheduler._replica_schedulers)
    run = Run(cluster, visibility=visibility)
    scheduler.schedule = lambda: place_queued(scheduler, cluster, run, router)


class HeuristicScheduler(BaseGlobalScheduler):
    """Observes the replicas, scores them by the heuristic of its type, and sends each request to the cheapest."""

    def __init__(self, config: Any, replicas: Any) -> None:
        flags = config.cluster_config.global_scheduler_config
        check_scheduler(flags, len(replicas))
        super().__init__(config, replicas)
        heuristic = HEURISTICS[str(flags.get_type())]
        self._router = build_router(
            heuristic.name,
            seed=flags.seed,
            delay_model=build_delay_model(config) if heuristic.has_delay_model else None,
            options={option.name: getattr(flags, option.name) for option in heuristic.constant_options},
        )
        self._cluster = VidurCluster(
            config,
            self._replica_schedulers,
            initial_decode_tokens=getattr(flags, "initial_decode_tokens", 128.0),
        )
        self._run = Run(self._cluster, visibility=Visibility.from_flags(flags, len(replicas)))
        logger.info(
            "vidur-ppo-plugin %s: global scheduler %s is active on %d replicas",
            __version__,
            heuristic.name,
            len(replicas),
        )

    def schedule(self) -> list[tuple[Any, Any]]:
        """Place the queued requests."""
        return place_queued(self, self._cluster, self._run, self._router)
