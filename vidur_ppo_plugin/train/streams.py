"""A stream of decisions: episode after episode of a simulated cluster, in which the policy places the requests."""

import math
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.policy.numpy_actor import NumpyActor
from vidur_ppo_plugin.routing.features import Float32Array
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray
from vidur_ppo_plugin.routing.visibility import Visibility

from .clusters import Cluster
from .config import TrainConfig
from .episodes import Episode
from .observing import Observer
from .runs import Served, open_run


@dataclass(frozen=True)
class Exploration:
    """How decisions are sampled in an iteration."""

    temperature: float
    epsilon: float


@dataclass(frozen=True)
class Experience:
    """What a stream did and earned in one rollout; plain arrays, to be sent between processes."""

    episode: Episode
    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    actions: NDArray[np.int64]
    action_rewards: FloatArray
    next_replicas: Float32Array
    next_request: Float32Array
    #: The episode ended at the safety limit: after the last decision here, or in an earlier rollout (then it is empty).
    is_lost: bool
    served: Served

    def __len__(self) -> int:
        return len(self.actions)


class Stream:
    """Runs one episode at a time."""

    def __init__(self, config: TrainConfig, episode: Episode, cluster: Cluster) -> None:
        self._config = config
        self.episode = episode
        requests = episode.requests()
        self._run = open_run(config, episode, cluster, requests)
        self._visibility = Visibility(report_delay_s=episode.report_delay_s, drains=episode.drains(requests))
        self._observer = Observer(config.flags, cluster.delay_model)
        #: Decisions made in this episode.
        self.num_decisions = 0
        self.is_lost = False
        self._observe()

    @property
    def is_over(self) -> bool:
        """Whether all decisions of the episode were made."""
        return self.num_decisions >= self.episode.num_requests - 1

    def _observe(self) -> None:
        info = self._run.next_request()
        self._prompt_tokens = info.prompt_tokens
        seen = self._visibility.view(self._run.snapshot())
        self._observation, self._prior_logits = self._observer(seen, info)
        self._check_limit(seen)

    def _check_limit(self, seen: ClusterSnapshot) -> None:
        limit_s = self._config.latency_limit_s
        self.is_lost |= limit_s > 0 and float(seen.oldest_wait_s.max()) > limit_s

    def _place(self, replica: int) -> None:
        self._run.place(replica)
        self._visibility.on_dispatch(replica, self._prompt_tokens)
        self.num_decisions += 1
        self._observe()

    def replay(self, actions: NDArray[np.int16]) -> None:
        """Make known decisions again: the stream is then where it was after them."""
        for action in actions.tolist():
            self._place(action)
        self._run.take_served()

    def collect(self, actor: NumpyActor, exploration: Exploration, uniforms: FloatArray) -> Experience:
        """Decide as often as there are random numbers (two a decision)."""
        steps, size = len(uniforms), len(self._prior_logits)
        seen = self._observation
        replicas = np.empty((steps, *seen.replicas.shape), np.float32)
        request = np.empty((steps, len(seen.request)), np.float32)
        prior_logits = np.empty((steps, size), np.float32)
        actions, rewards = np.empty(steps, np.int64), np.empty((steps, size))
        num_kept = 0
        for step, (first, second) in enumerate(uniforms.tolist()):
            seen = self._observation
            logits = actor.logits(seen.replicas, seen.request, self._prior_logits).tolist()
            action = sample(logits, exploration, first, second)
            actions[step] = action
            was_lost = self.is_lost
            if not was_lost:
                replicas[step], request[step], prior_logits[step] = seen.replicas, seen.request, self._prior_logits
                rewards[step] = self._run.credit()
                num_kept = step + 1
            self._place(action)
            if self.is_lost and not was_lost:
                rewards[step, action] -= self._config.limit_penalty
        return Experience(
            episode=self.episode,
            replicas=replicas[:num_kept],
            request=request[:num_kept],
            prior_logits=prior_logits[:num_kept],
            actions=actions,
            action_rewards=rewards[:num_kept],
            next_replicas=self._observation.replicas,
            next_request=self._observation.request,
            is_lost=self.is_lost,
            served=self._run.take_served(),
        )


def sample(logits: list[float], exploration: Exploration, first: float, second: float) -> int:
    """Draw from softmax(logits / temperature), or uniformly with probability epsilon, by two uniform numbers."""
    if not math.isfinite(sum(logits)):
        raise FloatingPointError(f"the policy's logits are not finite: {logits}")
    if exploration.epsilon and first < exploration.epsilon:
        return int(second * len(logits))
    highest, temperature, exp = max(logits), exploration.temperature, math.exp
    cumulative = list(accumulate([exp((logit - highest) / temperature) for logit in logits]))
    return min(bisect(cumulative, second * cumulative[-1]), len(logits) - 1)
