"""Vidur's replicas as a cluster: requests are queued by whoever owns Vidur's event loop, and placed by a `Run`."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.flags import speed_factors
from vidur_ppo_plugin.learn.credit.analytic import DrainCost, marginal_delay
from vidur_ppo_plugin.learn.credit.exact import ShadowTwin
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo

from .delay_model import prefill_chunk_size
from .replica_source import VidurReplicaSource
from .roofline_predictor import build_roofline


class VidurCluster:
    """The replicas of a simulation that was just built."""

    def __init__(
        self,
        config: Any,
        replica_schedulers: Mapping[Any, Any],
        *,
        num_waiting_slots: int = 0,
        initial_decode_tokens: float = 128.0,
        is_compiled: bool = False,
        tells_completions: bool = False,
        shadow: ShadowTwin | None = None,
    ) -> None:
        """`replica_schedulers` by id, as Vidur's global schedulers have them; ids need not start at 0.

        `is_compiled`: see `VidurReplicaSource`. `tells_completions`: without it `take_completions` gives none.
        `shadow`: where marginal delays come from; without one they come from a linear model.
        """
        self._config = config
        self._replica_ids = list(replica_schedulers)
        self._speed_factors = speed_factors(config.execution_time_predictor_config, len(self._replica_ids))
        #: Where snapshots come from.
        self.source = VidurReplicaSource(
            list(replica_schedulers.values()),
            speed_factors=self._speed_factors,
            initial_decode_tokens=initial_decode_tokens,
            num_waiting_slots=num_waiting_slots,
            on_completion=self._on_completion if tells_completions else None,
            is_compiled=is_compiled,
        )
        self._shadow = shadow
        self._queue: deque[Any] = deque()
        self._placements: list[tuple[Any, Any]] = []
        self._completions: list[Completion] = []
        #: The moment of the decision; at the end, that of the last completion.
        self.now_s = 0.0

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self._replica_ids)

    def queue(self, requests: Iterable[Any], now_s: float) -> None:
        """These requests of Vidur's have to be placed now, one after the other."""
        self._queue.extend(requests)
        self.now_s = now_s

    def take_placements(self) -> list[tuple[Any, Any]]:
        """What was decided since the last call, as Vidur wants it: replica ids and requests."""
        placements, self._placements = self._placements, []
        return placements

    def next_request(self) -> int | None:
        """The number of the next queued request; None if there is none."""
        return self._number(self._queue[0]) if self._queue else None

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""
        return self.source.request_info(self._queue[0])

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""
        return self.source.snapshot(self.now_s)

    def lengths(self) -> tuple[int, int]:
        """Prompt and output tokens of the request to place."""
        return self._queue[0].num_prefill_tokens, self._queue[0].num_decode_tokens

    def marginal_delay(
        self, replicas: NDArray[np.intp] | None = None, *, latency_power: float = 1.0, backlog_weight: float = 0.0
    ) -> FloatArray:
        """What placing the request on each of these replicas adds to everybody's latency."""
        prompt_tokens, decode_tokens = self.lengths()
        if self._shadow is not None:
            increases = self._shadow.marginal_delay(
                self.now_s, prompt_tokens, decode_tokens, latency_power=latency_power, backlog_weight=backlog_weight
            )
            return increases if replicas is None else increases[replicas]
        speeds = np.array(self._speed_factors)
        return marginal_delay(
            self.source.work_left(range(self.num_replicas) if replicas is None else replicas.tolist(), self.now_s),
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens - 1,  # the end of prefill yields the first token
            speed=speeds if replicas is None else speeds[replicas],
            cost=self._drain_cost,
            latency_power=latency_power,
            backlog_weight=backlog_weight,
        )

    @cached_property
    def _drain_cost(self) -> DrainCost:
        config = self._config
        roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
        return DrainCost.from_roofline(roofline, prefill_chunk_size(config))

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        request = self._queue[0]
        self.source.on_dispatch(replica, request)
        if self._shadow is not None:
            self._shadow.place(replica, request.arrived_at, *self.lengths())
        self._queue.popleft()
        self._placements.append((self._replica_ids[replica], request))

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""
        taken, self._completions = self._completions, []
        return taken

    @property
    def batch_counts(self) -> tuple[int, int]:
        """Batches that have ended and the requests in them, on all replicas."""
        return self.source.num_batches, self.source.num_batched_requests

    def _number(self, request: Any) -> int:
        """The request's number in this cluster: Vidur's id."""
        return int(request.id)

    def _on_completion(self, replica: int, request: Any, decode_tokens: int) -> None:
        self.now_s = request._completed_at
        self._completions.append(
            Completion(
                request._completed_at,
                self._number(request),
                replica,
                request._arrived_at,
                request._prefill_completed_at,
                request._num_restarts,
                decode_tokens,
            )
        )
