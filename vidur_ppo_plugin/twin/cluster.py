"""Requests of a run in the twin, as a cluster that stops at every placement."""

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.clusters.drive import drive
from vidur_ppo_plugin.routing.routers import Router
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.workload.requests import Requests

from .config import TwinConfig
from .layout import FloatArray
from .source import TwinReplicaSource
from .twin import Completions, Twin, in_order


class TwinCluster:
    """A run in the twin, with the same answers as `sim.cluster.SteppedVidur`."""

    def __init__(
        self,
        config: TwinConfig,
        requests: Requests,
        *,
        initial_decode_tokens: float = 128.0,
        num_waiting_slots: int = 0,
    ) -> None:
        """`requests` in order of arrival; the others are those of `TwinReplicaSource`."""
        self.twin = Twin(config)
        self._source = TwinReplicaSource(
            self.twin, initial_decode_tokens=initial_decode_tokens, num_waiting_slots=num_waiting_slots
        )
        # Plain numbers: reading them one by one from arrays takes several times as long.
        self._arrived_at_s: list[float] = requests.arrived_at_s.tolist()
        self._prompt_tokens: list[int] = requests.prompt_tokens.tolist()
        self._decode_tokens: list[int] = requests.decode_tokens.tolist()
        self._number = -1
        #: The moment of the decision; at the end, that of the last completion.
        self.now_s = 0.0

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.twin.num_replicas

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its number. None once everything is completed."""
        self._number += 1
        if self._number == len(self._arrived_at_s):
            self.twin.drain()
            return None
        self.now_s = self._arrived_at_s[self._number]
        return self._number

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""
        return self._source.request_info(self._prompt_tokens[self._number], self.now_s)

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""
        return self._source.snapshot(self.now_s)

    def lengths(self) -> tuple[int, int]:
        """Prompt and output tokens of the request to place."""
        return self._prompt_tokens[self._number], self._decode_tokens[self._number]

    def marginal_delay(
        self, replicas: NDArray[np.intp] | None = None, *, latency_power: float = 1.0, backlog_weight: float = 0.0
    ) -> FloatArray:
        """What placing the request on each of these replicas adds to everybody's latency, by forward simulation."""
        increases = self.twin.marginal_delay(
            self.now_s,
            *self.lengths(),
            latency_power=latency_power,
            backlog_weight=backlog_weight,
        )
        return increases if replicas is None else increases[replicas]

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        self.twin.submit(replica, self.now_s, *self.lengths())

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""
        is_over = self._number == len(self._arrived_at_s)
        if not is_over:
            self.twin.advance(self.now_s)
        done = self.twin.completions()
        completions = sorted(each_completion(done, [self._decode_tokens[number] for number in done.index.tolist()]))
        if completions and is_over:
            self.now_s = completions[-1].completed_at_s
        return completions

    def outcomes(self) -> Completions:
        """What happened to each request, in their order, if nobody has taken completions."""
        return in_order(self.twin.completions())

    @property
    def batch_counts(self) -> tuple[int, int]:
        """Zeros: the twin does not count its batches."""
        return 0, 0


def each_completion(done: Completions, decode_tokens: list[int]) -> list[Completion]:
    """What a twin tells of completed requests, one by one; `decode_tokens` are theirs."""
    columns = (
        done.completed_at_s,
        done.index,
        done.replica,
        done.arrived_at_s,
        done.first_token_at_s,
        done.num_restarts,
    )
    return [Completion(*row) for row in zip(*(column.tolist() for column in columns), decode_tokens, strict=True)]


def play(
    config: TwinConfig,
    requests: Requests,
    router: Router,
    *,
    visibility: Visibility | None = None,
    initial_decode_tokens: float = 128.0,
    num_waiting_slots: int = 0,
) -> Completions:
    """Serve requests as a router places them; what happened to each, in their order."""
    cluster = TwinCluster(
        config, requests, initial_decode_tokens=initial_decode_tokens, num_waiting_slots=num_waiting_slots
    )
    drive(cluster, router, visibility=visibility)
    return cluster.outcomes()
