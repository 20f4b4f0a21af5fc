"""The clusters of a slot, simulated in step: all at once in a vectorised twin, or one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.learn.credit_weights import credit_weights
from vidur_ppo_plugin.learn.features import build_features
from vidur_ppo_plugin.routing.features import Float32Array
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.vector import VectorTwin
from vidur_ppo_plugin.workload.requests import Requests

from .clusters import Cluster
from .config import TrainConfig
from .credit import AnalyticCredit, exact_options
from .episodes import Episode
from .observing import Observer
from .runs import Served, open_runs, served


@dataclass(frozen=True)
class Seen:
    """What the policy sees of every cluster, valid until the next decision; the first axis is the cluster."""

    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    #: Longest wait of a request that is still in a queue.
    oldest_wait_s: FloatArray


class Herd(Protocol):
    """Clusters in step."""

    def observe(self) -> Seen:
        """Bring every cluster to its next request."""

    def credit(self) -> FloatArray:
        """[clusters, replicas]: the reward of placing each cluster's request on each replica."""

    def place(self, actions: NDArray[np.int64]) -> None:
        """Send each cluster's request to a replica; `observe` comes next."""

    def take_served(self) -> Served:
        """What was completed since the last call."""


def open_herd(config: TrainConfig, episode: Episode, cluster: Cluster) -> Herd:
    """The clusters of an episode; `cluster` has its replicas."""
    requests = episode.requests()
    if config.backend == "twin" and episode.is_clear:
        return VectorHerd(config, episode, cluster, requests)
    return LooseHerd(config, episode, cluster, requests)


class VectorHerd:
    """All clusters in one vectorised twin; the router sees everything at once and may send anywhere."""

    def __init__(self, config: TrainConfig, episode: Episode, cluster: Cluster, requests: Sequence[Requests]) -> None:
        flags = config.flags
        self._requests = requests
        self._twin = VectorTwin(
            cluster.twin, requests, features=build_features(flags), tail_preferences=episode.tail_preferences
        )
        self._prior = Prior(flags.prior, weight=flags.prior_weight, delay_model=cluster.delay_model)
        weights = [credit_weights(flags, preference) for preference in episode.tail_preferences]
        self._analytic = AnalyticCredit(cluster, weights)
        self._exact_options = exact_options(weights, horizon_s=config.horizon_s)
        self._is_exact = config.credit == "exact"
        # [clusters, requests]: arrival, prompt and output.
        self._columns = [
            np.stack([getattr(part, name) for part in requests])
            for name in ("arrived_at_s", "prompt_tokens", "decode_tokens")
        ]
        self._window_began_s: FloatArray = np.zeros(len(requests))
        self._step = 0
        self._has_limit = config.latency_limit_s > 0

    def observe(self) -> Seen:
        """Bring every cluster to its next request."""
        seen = self._twin.observe()
        if self._prior.name == "least_tokens" and not self._has_limit:
            # The usual case, for all clusters at once; `logits` wants replicas first.
            logits = self._prior.logits(seen.token_load.T).T
            return Seen(seen.replicas, seen.request, np.ascontiguousarray(logits), np.zeros(len(self._requests)))
        parts, waits_s = [], []
        for number in range(len(self._requests)):
            snapshot, request = self._twin.snapshot(number)
            parts.append(self._prior.logits(self._prior.cost(snapshot, request)))
            waits_s.append(float(snapshot.oldest_wait_s.max()))
        return Seen(seen.replicas, seen.request, np.stack(parts), np.array(waits_s))

    def credit(self) -> FloatArray:
        """[clusters, replicas]: the reward of placing each cluster's request on each replica."""
        if self._is_exact:
            return -self._twin.marginal_delay(**self._exact_options)
        columns = (column[:, self._step] for column in self._columns)
        return self._analytic(self._twin, *columns)

    def place(self, actions: NDArray[np.int64]) -> None:
        """Send each cluster's request to a replica; `observe` comes next."""
        self._twin.act(actions)
        self._step += 1

    def take_served(self) -> Served:
        """What was completed since the last call."""
        clusters, done = self._twin.completions()
        now_s, began_s = self._columns[0][:, self._step], self._window_began_s
        self._window_began_s = now_s
        in_flight = [self._twin.snapshot(number)[0].outstanding_requests for number in range(len(self._requests))]
        return served(
            arrived_at_s=done.arrived_at_s,
            first_token_at_s=done.first_token_at_s,
            completed_at_s=done.completed_at_s,
            decode_tokens=self._columns[2][clusters, done.index].astype(np.float64),
            duration_s=float((now_s - began_s).sum()),
            load_spread=float(np.mean([counts.std() for counts in in_flight])),
        )


class LooseHerd:
    """Clusters one after the other: in Vidur, or where the router sees less than everything."""

    def __init__(self, config: TrainConfig, episode: Episode, cluster: Cluster, requests: Sequence[Requests]) -> None:
        self._runs = open_runs(config, episode, cluster, requests)
        self._visibilities = [
            Visibility(report_delay_s=episode.report_delay_s, drains=episode.drains(part)) for part in requests
        ]
        self._observers = [Observer(flags, cluster.delay_model) for flags in episode.flags(config)]
        self._prompt_tokens = [0] * len(requests)

    def observe(self) -> Seen:
        """Bring every cluster to its next request."""
        observations, logits, waits_s = [], [], []
        for number, run in enumerate(self._runs):
            info = run.next_request()
            self._prompt_tokens[number] = info.prompt_tokens
            seen = self._visibilities[number].view(run.snapshot())
            observation, prior_logits = self._observers[number](seen, info)
            observations.append(observation)
            logits.append(prior_logits)
            waits_s.append(float(seen.oldest_wait_s.max()))
        return Seen(
            np.stack([observation.replicas for observation in observations]),
            np.stack([observation.request for observation in observations]),
            np.stack(logits),
            np.array(waits_s),
        )

    def credit(self) -> FloatArray:
        """[clusters, replicas]: the reward of placing each cluster's request on each replica."""
        return np.stack([run.credit() for run in self._runs])

    def place(self, actions: NDArray[np.int64]) -> None:
        """Send each cluster's request to a replica; `observe` comes next."""
        for run, visibility, prompt_tokens, action in zip(
            self._runs, self._visibilities, self._prompt_tokens, actions.tolist(), strict=True
        ):
            run.place(action)
            visibility.on_dispatch(action, prompt_tokens)

    def take_served(self) -> Served:
        """What was completed since the last call."""
        parts = [run.take_served() for run in self._runs]
        return Served(
            latency_s=np.concatenate([part.latency_s for part in parts]),
            ttft_s=np.concatenate([part.ttft_s for part in parts]),
            tbt_s=np.concatenate([part.tbt_s for part in parts]),
            decode_tokens=np.concatenate([part.decode_tokens for part in parts]),
            duration_s=sum(part.duration_s for part in parts),
            load_spread=float(np.mean([part.load_spread for part in parts])),
        )
