"""A run of requests that stops at every placement: in the twin, or in Vidur itself."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.learn.credit_weights import credit_weights
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin
from vidur_ppo_plugin.workload.requests import Requests

from .clusters import Cluster
from .config import TrainConfig
from .credit import AnalyticCredit
from .episodes import Episode


@dataclass(frozen=True)
class Served:
    """Requests that were completed since the last look, and the simulated time that passed."""

    latency_s: FloatArray
    ttft_s: FloatArray
    tbt_s: FloatArray
    decode_tokens: FloatArray
    duration_s: float
    #: Standard deviation across replicas of the requests in flight, at the end.
    load_spread: float


class Run(Protocol):
    """What has to be simulated of one cluster."""

    def next_request(self) -> RequestInfo:
        """Go on until a request has to be placed."""

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment, as they are."""

    def credit(self) -> FloatArray:
        """The reward of placing the request on each replica."""

    def place(self, replica: int) -> None:
        """Send the request to a replica."""

    def take_served(self) -> Served:
        """What was completed since the last call."""


def open_runs(config: TrainConfig, episode: Episode, cluster: Cluster, requests: Sequence[Requests]) -> list[Run]:
    """A run for each cluster of an episode, in the simulator that the configuration names."""
    each = list(zip(episode.flags(config), requests, strict=True))
    if config.backend == "vidur":
        from .vidur_run import VidurRun  # imports Vidur, which takes seconds

        return [VidurRun(episode, number, flags, part) for number, (flags, part) in enumerate(each)]
    return [TwinRun(config, flags, cluster, part) for flags, part in each]


class TwinRun:
    """A run in the twin."""

    def __init__(self, config: TrainConfig, flags: PPOModularFlags, cluster: Cluster, requests: Requests) -> None:
        self._twin = Twin(cluster.twin)
        self._source = TwinReplicaSource(self._twin, num_waiting_slots=flags.max_queue_requests_per_replica)
        weights = credit_weights(flags)
        self._analytic = AnalyticCredit(cluster, [weights])
        self._exact_options = asdict(weights) | {"horizon_s": config.horizon_s or math.inf}
        self._is_exact = config.credit == "exact"
        self._decode_tokens = requests.decode_tokens
        columns = (requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
        self._requests = iter(zip(*(column.tolist() for column in columns), strict=True))
        self._request = (0.0, 0, 0)
        self._window_began_s = 0.0

    def next_request(self) -> RequestInfo:
        """Go on until a request has to be placed."""
        self._request = next(self._requests)
        arrived_at_s, prompt_tokens, _ = self._request
        return self._source.request_info(prompt_tokens, arrived_at_s)

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment, as they are."""
        return self._source.snapshot(self._request[0])

    def credit(self) -> FloatArray:
        """The reward of placing the request on each replica."""
        arrived_at_s, prompt_tokens, decode_tokens = self._request
        if self._is_exact:
            return -self._twin.marginal_delay(arrived_at_s, prompt_tokens, decode_tokens, **self._exact_options)
        columns = (np.array([value]) for value in self._request)
        rewards: FloatArray = self._analytic(self._twin, *columns)[0]
        return rewards

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        self._twin.submit(replica, *self._request)

    def take_served(self) -> Served:
        """What was completed since the last call."""
        done, now_s = self._twin.completions(), self._request[0]
        in_flight = self._source.snapshot(now_s).outstanding_requests
        began_s, self._window_began_s = self._window_began_s, now_s
        return served(
            arrived_at_s=done.arrived_at_s,
            first_token_at_s=done.first_token_at_s,
            completed_at_s=done.completed_at_s,
            decode_tokens=self._decode_tokens[done.index].astype(np.float64),
            duration_s=now_s - began_s,
            load_spread=float(in_flight.std()),
        )


def served(
    *,
    arrived_at_s: FloatArray,
    first_token_at_s: FloatArray,
    completed_at_s: FloatArray,
    decode_tokens: FloatArray,
    duration_s: float,
    load_spread: float,
) -> Served:
    """From the moments of requests."""
    return Served(
        latency_s=completed_at_s - arrived_at_s,
        ttft_s=first_token_at_s - arrived_at_s,
        tbt_s=(completed_at_s - first_token_at_s) / np.maximum(1.0, decode_tokens - 1.0),
        decode_tokens=decode_tokens,
        duration_s=duration_s,
        load_spread=load_spread,
    )
