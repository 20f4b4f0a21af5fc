"""Our heuristics as Vidur knows them: one thin global scheduler around the routers of `routing.routers`."""

from typing import Any

from vidur.logger import init_logger
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

from vidur_ppo_plugin import __version__
from vidur_ppo_plugin.flags import check_scheduler, speed_factors
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.heuristics import HEURISTICS
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.visibility import Visibility

from .replica_source import VidurReplicaSource
from .roofline_predictor import build_roofline

logger = init_logger("vidur.vidur_ppo_plugin")

# Prefill chunk of replica schedulers that have no such flag (orca prefills whole prompts).
_DEFAULT_CHUNK_SIZE = 512


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
        # Replica ids as they are: they need not start at 0.
        self._replica_ids = list(self._replica_schedulers)
        self._source = VidurReplicaSource(
            list(self._replica_schedulers.values()),
            speed_factors=speed_factors(config.execution_time_predictor_config, len(replicas)),
            initial_decode_tokens=getattr(flags, "initial_decode_tokens", 128.0),
        )
        self._visibility = Visibility.from_flags(flags, len(replicas))
        logger.info(
            "vidur-ppo-plugin %s: global scheduler %s is active on %d replicas",
            __version__,
            heuristic.name,
            len(replicas),
        )

    def schedule(self) -> list[tuple[Any, Any]]:
        """Place the queued requests one after the other, each decision seeing the effect of the one before.

        Vidur passes no time. It calls this once for each arrival, so now is the newest arrival; requests of
        equal arrival time come in one call and leave the others an empty queue.
        """
        self.sort_requests()
        placements = []
        now_s = self._request_queue[-1].arrived_at if self._request_queue else 0.0
        for request in self._request_queue:
            info = self._source.request_info(request)
            index = self._router(self._visibility.view(self._source.snapshot(now_s)), info)
            self._source.on_dispatch(index, request)
            self._visibility.on_dispatch(index, info.prompt_tokens)
            placements.append((self._replica_ids[index], request))
        self._request_queue.clear()
        return placements


def prefill_chunk_size(config: Any) -> int:
    """Prompt tokens that the replica scheduler puts into one batch."""
    flags = config.cluster_config.replica_scheduler_config
    return int(getattr(flags, "chunk_size", None) or getattr(flags, "max_tokens_in_batch", None) or _DEFAULT_CHUNK_SIZE)


def build_delay_model(config: Any) -> DelayModel:
    """The delay model of a cluster's replicas, for the chunk size of its replica scheduler."""
    roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
    return DelayModel.from_roofline(roofline, prefill_chunk_size(config))
