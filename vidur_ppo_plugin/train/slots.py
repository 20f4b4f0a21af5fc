"""A slot: clusters of one kind that run in step, episode after episode, in which the policy places the requests."""

import math
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.policy.numpy_actor import NumpyActor
from vidur_ppo_plugin.routing.features import Float32Array, Observation
from vidur_ppo_plugin.routing.snapshot import FloatArray

from .clusters import Cluster
from .config import TrainConfig
from .episodes import Episode
from .herds import Seen, open_herd
from .runs import Served


@dataclass(frozen=True)
class Exploration:
    """How decisions are sampled in an iteration."""

    temperature: float
    epsilon: float


@dataclass(frozen=True)
class Experience:
    """What a slot saw, did and earned in one rollout; [decisions, clusters, ...], to be sent between processes."""

    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    actions: NDArray[np.int64]
    action_rewards: FloatArray
    #: What comes after the last decision.
    next_replicas: Float32Array
    next_request: Float32Array
    #: Decisions of each cluster before it was lost at the safety limit; those after it are not learned from.
    num_kept: NDArray[np.int64]
    is_lost: NDArray[np.bool_]
    served: Served


class Slot:
    """Runs one episode."""

    def __init__(self, config: TrainConfig, episode: Episode, cluster: Cluster) -> None:
        self._config = config
        self.episode = episode
        self._herd = open_herd(config, episode, cluster)
        #: Decisions made by each cluster in this episode.
        self.num_decisions = 0
        self._is_lost = np.zeros(episode.num_clusters, dtype=np.bool_)
        self._seen = self._look()

    def _look(self) -> Seen:
        seen, limit_s = self._herd.observe(), self._config.latency_limit_s
        if limit_s:
            self._is_lost |= seen.oldest_wait_s > limit_s
        return seen

    def _place(self, actions: NDArray[np.int64]) -> None:
        self._herd.place(actions)
        self.num_decisions += 1
        self._seen = self._look()

    def replay(self, actions: NDArray[np.int16]) -> None:
        """Make known decisions again: the slot is then where it was after them."""
        for step in actions.astype(np.int64):
            self._place(step)
        self._herd.take_served()

    def collect(self, actor: NumpyActor, exploration: Exploration, uniforms: FloatArray) -> Experience:
        """Decide as often as there are random numbers: two for each decision of each cluster."""
        steps, size = uniforms.shape[:2]
        seen = self._seen
        replicas = np.empty((steps, *seen.replicas.shape), np.float32)
        request = np.empty((steps, *seen.request.shape), np.float32)
        prior_logits = np.empty((steps, *seen.prior_logits.shape), np.float32)
        actions = np.empty((steps, size), np.int64)
        rewards = np.empty((steps, *seen.prior_logits.shape))
        num_kept = np.where(self._is_lost, 0, steps)
        for step in range(steps):
            seen, was_lost = self._seen, self._is_lost.copy()
            replicas[step], request[step], prior_logits[step] = seen.replicas, seen.request, seen.prior_logits
            for cluster in range(size):
                logits = actor.logits(seen.replicas[cluster], seen.request[cluster], seen.prior_logits[cluster])
                actions[step, cluster] = sample(logits.tolist(), exploration, *uniforms[step, cluster].tolist())
            rewards[step] = self._herd.credit()
            self._place(actions[step])
            newly_lost = np.flatnonzero(self._is_lost & ~was_lost)
            num_kept[newly_lost] = step + 1
            rewards[step, newly_lost, actions[step, newly_lost]] -= self._config.limit_penalty
        return Experience(
            replicas=replicas,
            request=request,
            prior_logits=prior_logits,
            actions=actions,
            action_rewards=rewards,
            next_replicas=self._seen.replicas.copy(),
            next_request=self._seen.request.copy(),
            num_kept=num_kept,
            is_lost=self._is_lost.copy(),
            served=self._herd.take_served(),
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


def rollouts_of(experience: Experience, exploration: Exploration, first_stream: int, *, is_last: bool) -> list[Rollout]:
    """A rollout for each cluster that was not lost before, each a stream of its own; `is_last`: of the episode."""
    rollouts = []
    for cluster, num_kept in enumerate(experience.num_kept.tolist()):
        if num_kept == 0:
            continue
        actions, rewards = experience.actions[:num_kept, cluster], experience.action_rewards[:num_kept, cluster]
        following = Observation(experience.next_replicas[cluster], experience.next_request[cluster])
        rollouts.append(
            Rollout(
                replicas=experience.replicas[:num_kept, cluster],
                request=experience.request[:num_kept, cluster],
                prior_logits=experience.prior_logits[:num_kept, cluster],
                actions=actions,
                temperatures=np.full(num_kept, exploration.temperature, np.float32),
                epsilons=np.full(num_kept, exploration.epsilon, np.float32),
                rewards=rewards[np.arange(num_kept), actions],
                action_rewards=rewards,
                next_observation=None if experience.is_lost[cluster] else following,
                stream=first_stream + cluster,
                is_last_of_stream=is_last,
            )
        )
    return rollouts
