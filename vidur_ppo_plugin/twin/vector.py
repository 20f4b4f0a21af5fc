"""`VectorTwin`: many clusters in step, for one batched forward pass of a policy at each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.features import FeatureTable, Float32Array
from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.workload.requests import Requests

from . import kernels, layout, vector_kernels
from .config import TwinConfig
from .layout import FloatArray, IntArray
from .machine import Machine
from .twin import Completions


@dataclass(frozen=True)
class VectorObservation:
    """What the policy sees of every cluster, valid until the next step: [clusters, replicas, features] and so on.

    `token_load` is the score of `least_tokens`, the usual prior: [clusters, replicas].
    """

    replicas: Float32Array
    request: Float32Array
    token_load: FloatArray


class VectorTwin(Machine):
    """Equal clusters, each with its own requests; at every step each of them places one.

    `observe`, then `act`, until all are done. Kernels release Python's lock, so that several of these run in threads.
    """

    def __init__(
        self,
        config: TwinConfig,
        requests: Sequence[Requests],
        *,
        features: FeatureTable | None = None,
        tail_preferences: Sequence[float] | None = None,
        initial_decode_tokens: float = 128.0,
    ) -> None:
        """`requests`: those of each cluster. `features`: what is observed; its moving averages are not used.

        `tail_preferences`: what each cluster's operator asks for; that of `features` if None.
        """
        super().__init__(config, len(requests))
        table = features or FeatureTable()
        size, replicas, slots = len(requests), config.num_replicas, 2 * table.num_waiting_slots
        trends = len(table.kernel_constants[0])
        self._constants = table.kernel_constants
        self._scales = np.array([table.scales.tokens, table.scales.seconds, table.scales.rate_per_s])
        given = [table.tail_preference] * size if tail_preferences is None else list(tail_preferences)
        if len(given) != size:
            raise ValueError(f"tail_preferences must be given for each of {size} clusters, got {len(given)}")
        self._tail_preferences = np.array(given, np.float64)
        self._initial_decode_tokens = initial_decode_tokens
        self._progress = np.zeros(1, np.int64)
        self._averages = np.zeros((2, size, trends, replicas))
        self._values = np.zeros((len(ROWS), size, replicas))
        self._waiting = np.zeros((slots, size, replicas))
        #: Of the next request of each cluster: seconds since the arrival before, arrivals per second.
        self._arrivals = np.zeros((size, 2))
        self._expected = np.full(size, initial_decode_tokens)
        self._replicas = np.zeros((size, replicas, table.num_replica_features), np.float32)
        self._requests = np.zeros((size, table.num_request_features), np.float32)
        self.reset(requests)

    @property
    def num_clusters(self) -> int:
        """Number of clusters."""
        return self._num_clusters

    @property
    def is_done(self) -> NDArray[np.bool_]:
        """For each cluster, whether it has placed all its requests."""
        return self._position >= self._workload[3]

    def reset(self, requests: Sequence[Requests]) -> None:
        """Start anew with other requests."""
        if len(requests) != self.num_clusters:
            raise ValueError(f"requests must be given for each of {self.num_clusters} clusters, got {len(requests)}")
        counts = np.array([len(part) for part in requests], np.int64)
        shape = (len(requests), max(1, int(counts.max())))
        arrived_s, prompts, outputs = np.zeros(shape), np.ones(shape, np.int64), np.ones(shape, np.int64)
        for cluster, part in enumerate(requests):
            _check(cluster, part)
            arrived_s[cluster, : len(part)] = part.arrived_at_s
            prompts[cluster, : len(part)] = part.prompt_tokens
            outputs[cluster, : len(part)] = part.decode_tokens
        self._workload = (arrived_s, prompts, outputs, counts)
        self._position: IntArray = np.zeros(len(requests), np.int64)
        self._log = []
        self._is_observed = False
        layout.clear(self.rules, self.state)

    def observe(self) -> VectorObservation:
        """Bring every cluster to its next request; clusters that are done keep what they showed last."""
        if not self._is_observed:
            seen = (
                *self._averages,
                self._values,
                self._waiting,
                self._arrivals,
                self._expected,
                self._replicas,
                self._requests,
            )
            self._for_all(
                vector_kernels.observe_all,
                self._speed_factors,
                self._initial_decode_tokens,
                self._constants,
                self._scales,
                self._tail_preferences,
                seen,
            )
            self._is_observed = True
        load = ClusterSnapshot(0.0, self._values, kv_block_size=1, expected_decode_tokens=0.0).token_load
        return VectorObservation(self._replicas, self._requests, load)

    def snapshot(self, cluster: int) -> tuple[ClusterSnapshot, RequestInfo]:
        """What `observe` was about for one cluster, as a router would get it."""
        self.observe()
        at = min(int(self._position[cluster]), len(self._workload[0][cluster]) - 1)
        now_s = float(self._workload[0][cluster, at])
        snapshot = ClusterSnapshot(
            now_s,
            self._values[:, cluster].copy(),
            kv_block_size=self.config.block_size,
            expected_decode_tokens=float(self._expected[cluster]),
            waiting=self._waiting[:, cluster].copy(),
        )
        return snapshot, RequestInfo(int(self._workload[1][cluster, at]), now_s, *self._arrivals[cluster].tolist())

    def act(self, replicas: NDArray[np.integer[Any]]) -> None:
        """Place the next request of every cluster; what is said for clusters that are done does not matter."""
        actions = np.ascontiguousarray(replicas, np.int64)
        if actions.shape != (self.num_clusters,):
            raise ValueError(f"replicas must have shape ({self.num_clusters},), got {actions.shape}")
        if np.any((actions < 0) | (actions >= self.num_replicas)):
            raise ValueError(f"replicas must be in 0 ... {self.num_replicas - 1}, got {actions.tolist()}")
        self.observe()
        self._for_all(vector_kernels.act_all, self.num_replicas, actions)
        self._is_observed = False

    def marginal_delay(
        self,
        *,
        latency_power: float | FloatArray = 1.0,
        backlog_weight: float | FloatArray = 0.0,
        horizon_s: float = np.inf,
    ) -> FloatArray:
        """`Twin.marginal_delay` of the next request of every cluster: [clusters, replicas]; 0 where all are placed.

        Power and weight are those of all clusters, or one for each.
        """
        self.observe()
        self._prepare_forks()
        result = np.empty((self.num_clusters, self.num_replicas))
        powers, weights = (
            np.array(np.broadcast_to(value, self.num_clusters), np.float64) for value in (latency_power, backlog_weight)
        )
        self._for_all(vector_kernels.increase_all, self._scratch, powers, float(horizon_s), result)
        if weights.any():
            last = self._workload[0].shape[1] - 1
            prompts = self._workload[1][np.arange(self.num_clusters), np.minimum(self._position, last)]
            prefill_tokens = self.state.cells[:, layout.PREFILL_TOKENS].reshape(result.shape)
            growth = self._backlog_growth(prefill_tokens, prompts[:, None])
            result += weights[:, None] * np.where(self.is_done[:, None], 0.0, growth)
        return result

    def drain(self) -> None:
        """Run until every request that was placed is completed."""
        self._call(kernels.advance, np.inf)

    def completions(self) -> tuple[IntArray, Completions]:
        """Requests completed since the last call: their clusters, and what happened to them."""
        log = self._take_log()
        rows = log[:, layout.LOG_ROW].astype(np.int64)
        log[:, layout.LOG_ROW] = rows % self.num_replicas
        return rows // self.num_replicas, Completions.of(log)

    def _for_all(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._progress[0] = 0
        self._call(kernel, self._progress, self._workload, self._position, *arguments)


def _check(cluster: int, requests: Requests) -> None:
    if len(requests) == 0:
        return
    if requests.arrived_at_s[0] < 0.0 or np.any(np.diff(requests.arrived_at_s) < 0.0):
        raise ValueError(f"arrived_at_s of cluster {cluster} must be in order, from 0 on")
    shortest = min(int(requests.prompt_tokens.min()), int(requests.decode_tokens.min()))
    if shortest < 1:
        raise ValueError(f"prompt_tokens and decode_tokens of cluster {cluster} must be >= 1, got {shortest}")
