"""`VectorTwin`: many clusters in step, for one batched forward pass of a policy at each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.features import FeatureTable, Float32Array
from vidur_ppo_plugin.routing.snapshot import ROW, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Drain
from vidur_ppo_plugin.workload.requests import Requests

from . import kernels, layout, vector_kernels
from .config import TwinConfig
from .layout import FloatArray, IntArray
from .machine import Machine
from .twin import Completions
from .vector_kernels import ObservationState, Workload
from .visibility import NUM_ROWS, new_view

_OUTSTANDING = ROW["outstanding_requests"]


@dataclass(frozen=True)
class VectorObservation:
    """What the policy sees of every cluster, valid until the next step: [clusters, replicas, features] and so on.

    `token_load` is the score of `least_tokens`, the usual prior, and `outstanding` the requests in flight, as they are:
    [clusters, replicas].
    """

    replicas: Float32Array
    request: Float32Array
    token_load: FloatArray
    outstanding: FloatArray


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
        report_delay_s: float = 0.0,
        drains: Sequence[Sequence[Drain]] | None = None,
    ) -> None:
        """`requests`: those of each cluster. `features`: what is observed; its moving averages are not used.

        `tail_preferences`: what each cluster's operator asks for; that of `features` if None. `report_delay_s`: how old
        the reports are that features are made of; `drains`: who takes no requests when, for each cluster. `token_load`,
        `snapshot` and `act` do not care: they are about the truth.
        """
        super().__init__(config, len(requests))
        self._table = features or FeatureTable()
        self._initial_decode_tokens = float(initial_decode_tokens)
        given = [self._table.tail_preference] * len(requests) if tail_preferences is None else list(tail_preferences)
        if len(given) != len(requests):
            raise ValueError(f"tail_preferences must be given for each of {len(requests)} clusters, got {len(given)}")
        self._tail_preferences = np.array(given, np.float64)
        self._report_delay_s, self._drains = report_delay_s, drains
        self.reset(requests)

    @property
    def num_clusters(self) -> int:
        """Number of clusters."""
        return self._num_clusters

    @property
    def position(self) -> IntArray:
        """The index of each cluster's next request."""
        return self._workload.position

    @property
    def is_done(self) -> NDArray[np.bool_]:
        """Whether each cluster has placed all its requests."""
        return self.position >= self._workload.num_requests

    def reset(self, requests: Sequence[Requests]) -> None:
        """Start anew with other requests."""
        if len(requests) != self.num_clusters:
            raise ValueError(f"requests must be given for each of {self.num_clusters} clusters, got {len(requests)}")
        self._workload = _workload(requests)
        self._observed = self._new_observation_state(requests)
        self._log = []
        layout.clear(self.rules, self.state)

    def _new_observation_state(self, requests: Sequence[Requests]) -> ObservationState:
        table, size, replicas = self._table, self.num_clusters, self.num_replicas
        num_slots, num_trends = 2 * table.num_waiting_slots, table.num_trends
        shape = (size, NUM_ROWS + num_slots, replicas)
        return ObservationState(
            self._speed_factors,
            self._initial_decode_tokens,
            *table.kernel_constants,
            np.array([table.scales.tokens, table.scales.seconds, table.scales.rate_per_s]),
            self._tail_preferences,
            new_view(requests, replicas, num_slots, delay_s=self._report_delay_s, drains=self._drains),
            is_current=np.zeros(size, np.int64),
            average=np.zeros((size, num_trends, replicas)),
            last=np.zeros((size, num_trends, replicas)),
            truth=np.zeros(shape),
            shown=np.zeros(shape if self._report_delay_s else (size, 0, 0)),
            arrivals=np.zeros((size, 2)),
            expected=np.full(size, self._initial_decode_tokens),
            expected_shown=np.full(size, self._initial_decode_tokens),
            replicas=np.zeros((size, replicas, table.num_replica_features), np.float32),
            requests=np.zeros((size, table.num_request_features), np.float32),
        )

    def observe(self) -> VectorObservation:
        """Bring every cluster to its next request; clusters that are done keep what they showed last."""
        self._call(vector_kernels.observe_all, self._workload, self._observed)
        values = self._observed.truth[:, :NUM_ROWS].transpose(1, 0, 2)
        load = ClusterSnapshot(0.0, values, kv_block_size=1, expected_decode_tokens=0.0).token_load
        return VectorObservation(self._observed.replicas, self._observed.requests, load, values[_OUTSTANDING])

    def snapshot(self, cluster: int) -> tuple[ClusterSnapshot, RequestInfo]:
        """What `observe` was about for one cluster, as a router would get it."""
        self.observe()
        workload, observed = self._workload, self._observed
        at = min(int(workload.position[cluster]), workload.arrived_s.shape[1] - 1)
        now_s = float(workload.arrived_s[cluster, at])
        figures = observed.truth[cluster].copy()
        snapshot = ClusterSnapshot(
            now_s,
            figures[:NUM_ROWS],
            kv_block_size=self.config.block_size,
            expected_decode_tokens=float(observed.expected[cluster]),
            waiting=figures[NUM_ROWS:],
        )
        return snapshot, RequestInfo(int(workload.prompts[cluster, at]), now_s, *observed.arrivals[cluster].tolist())

    def act(self, replicas: NDArray[np.integer[Any]]) -> None:
        """Place the next request of every cluster; what is said for clusters that are done does not matter."""
        actions = np.ascontiguousarray(replicas, np.int64)
        if actions.shape != (self.num_clusters,):
            raise ValueError(f"replicas must have shape ({self.num_clusters},), got {actions.shape}")
        if np.any((actions < 0) | (actions >= self.num_replicas)):
            raise ValueError(f"replicas must be in 0 ... {self.num_replicas - 1}, got {actions.tolist()}")
        self.observe()
        self._call(vector_kernels.act_all, self._workload, self._observed, actions)

    def marginal_delay(
        self, *, latency_power: float = 1.0, backlog_weight: float = 0.0, horizon_s: float = np.inf
    ) -> FloatArray:
        """`Twin.marginal_delay` of the next request of every cluster: [clusters, replicas]; 0 where all are placed."""
        self.observe()
        self._prepare_forks()
        result = np.empty((self.num_clusters, self.num_replicas))
        options = self._scratch, float(latency_power), float(horizon_s), result
        self._call(vector_kernels.increase_all, self._workload, *options)
        if backlog_weight:
            workload = self._workload
            last = workload.prompts.shape[1] - 1
            prompts = workload.prompts[np.arange(self.num_clusters), np.minimum(workload.position, last)]
            prefill_tokens = self.state.cells[:, layout.PREFILL_TOKENS].reshape(result.shape)
            growth = self._backlog_growth(prefill_tokens, prompts[:, None])
            result += backlog_weight * np.where(self.is_done[:, None], 0.0, growth)
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


def _workload(requests: Sequence[Requests]) -> Workload:
    counts = np.array([len(part) for part in requests], np.int64)
    shape = (len(requests), max(1, int(counts.max())))
    arrived_s, prompts, outputs = np.zeros(shape), np.ones(shape, np.int64), np.ones(shape, np.int64)
    for cluster, part in enumerate(requests):
        _check(cluster, part)
        arrived_s[cluster, : len(part)] = part.arrived_at_s
        prompts[cluster, : len(part)] = part.prompt_tokens
        outputs[cluster, : len(part)] = part.decode_tokens
    return Workload(
        arrived_s, prompts, outputs, np.zeros(shape, np.int64), counts, position=np.zeros(len(requests), np.int64)
    )


def _check(cluster: int, requests: Requests) -> None:
    if len(requests) == 0:
        return
    if requests.arrived_at_s[0] < 0.0 or np.any(np.diff(requests.arrived_at_s) < 0.0):
        raise ValueError(f"arrived_at_s of cluster {cluster} must be in order, from 0 on")
    shortest = min(int(requests.prompt_tokens.min()), int(requests.decode_tokens.min()))
    if shortest < 1:
        raise ValueError(f"prompt_tokens and decode_tokens of cluster {cluster} must be >= 1, got {shortest}")
