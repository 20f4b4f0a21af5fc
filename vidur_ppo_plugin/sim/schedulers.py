"""Our global schedulers as Vidur knows them: thin classes around the pure functions of `routing.heuristics`."""

import random
from abc import abstractmethod
from typing import Any

from vidur.logger import init_logger
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

from vidur_ppo_plugin import __version__
from vidur_ppo_plugin.flags import check_scheduler, speed_factors
from vidur_ppo_plugin.routing import heuristics
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility

from .replica_source import VidurReplicaSource
from .roofline_predictor import build_roofline

logger = init_logger("vidur.vidur_ppo_plugin")

# Prefill chunk of replica schedulers that have no such flag (orca prefills whole prompts).
_DEFAULT_CHUNK_SIZE = 512


class HeuristicScheduler(BaseGlobalScheduler):
    """Observes the replicas, scores them with `cost`, and sends each request to the cheapest."""

    def __init__(self, config: Any, replicas: Any) -> None:
        self._flags = config.cluster_config.global_scheduler_config
        check_scheduler(self._flags, len(replicas))
        super().__init__(config, replicas)
        self._rng = random.Random(self._flags.seed)
        # Replica ids as they are: they need not start at 0.
        self._replica_ids = list(self._replica_schedulers)
        self._source = VidurReplicaSource(
            list(self._replica_schedulers.values()),
            speed_factors=speed_factors(config.execution_time_predictor_config, len(replicas)),
            initial_decode_tokens=getattr(self._flags, "initial_decode_tokens", 128.0),
        )
        self._visibility = Visibility.from_flags(self._flags, len(replicas))
        logger.info(
            "vidur-ppo-plugin %s: global scheduler %s is active on %d replicas",
            __version__,
            self._flags.get_type(),
            len(replicas),
        )

    @abstractmethod
    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        """Cost of sending the request to each replica; the lowest wins."""

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
            snapshot = self._visibility.view(self._source.snapshot(now_s))
            cost = heuristics.available_cost(self.cost(snapshot, info), snapshot)
            index = heuristics.choose(cost, self._rng)
            self._source.on_dispatch(index, request)
            self._visibility.on_dispatch(index, info.prompt_tokens)
            placements.append((self._replica_ids[index], request))
        self._request_queue.clear()
        return placements


class LeastOutstandingScheduler(HeuristicScheduler):
    """`least_outstanding`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.least_outstanding(snapshot)


class PowerOfTwoScheduler(HeuristicScheduler):
    """`power_of_two`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.power_of_two(snapshot, self._rng)


class LeastKvScheduler(HeuristicScheduler):
    """`least_kv`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.least_kv(snapshot)


class LeastTokensScheduler(HeuristicScheduler):
    """`least_tokens`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.least_tokens(
            snapshot,
            context_weight=self._flags.context_weight,
            request_weight=self._flags.request_weight,
        )


class LeastWorkScheduler(HeuristicScheduler):
    """`least_work`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.least_work(snapshot)


class ShortestDelayScheduler(HeuristicScheduler):
    """`shortest_delay`."""

    def __init__(self, config: Any, replicas: Any) -> None:
        super().__init__(config, replicas)
        self._delay_model = build_delay_model(config)

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.shortest_delay(snapshot, request, delay_model=self._delay_model)


class SizeSplitScheduler(HeuristicScheduler):
    """`size_split`."""

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        return heuristics.size_split(
            snapshot,
            request,
            threshold_tokens=self._flags.threshold_tokens,
            num_long_replicas=self._flags.num_long_replicas,
            context_weight=self._flags.context_weight,
            request_weight=self._flags.request_weight,
        )


SCHEDULERS: dict[str, type[HeuristicScheduler]] = {
    "least_outstanding": LeastOutstandingScheduler,
    "power_of_two": PowerOfTwoScheduler,
    "least_kv": LeastKvScheduler,
    "least_tokens": LeastTokensScheduler,
    "least_work": LeastWorkScheduler,
    "shortest_delay": ShortestDelayScheduler,
    "size_split": SizeSplitScheduler,
}


def prefill_chunk_size(config: Any) -> int:
    """Prompt tokens that the replica scheduler puts into one batch."""
    flags = config.cluster_config.replica_scheduler_config
    return int(getattr(flags, "chunk_size", None) or getattr(flags, "max_tokens_in_batch", None) or _DEFAULT_CHUNK_SIZE)


def build_delay_model(config: Any) -> DelayModel:
    """The delay model of a cluster's replicas, for the chunk size of its replica scheduler."""
    roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
    return DelayModel.from_roofline(roofline, prefill_chunk_size(config))
