"""A slot: clusters of one kind that run episode after episode, in which the policy places the requests."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards, Stretch, follow
from vidur_ppo_plugin.learn.credit.look_ahead import look_ahead
from vidur_ppo_plugin.learn.features import build_features, build_prior
from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.routing.features import Float32Array, Observation
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.layout import IntArray
from vidur_ppo_plugin.twin.policy_kernels import Trajectories
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin
from vidur_ppo_plugin.twin.twin import Completions
from vidur_ppo_plugin.workload.requests import Requests

from .clusters import Cluster
from .config import TrainConfig, look_ahead_of
from .episodes import Episode

if TYPE_CHECKING:
    from .vidur_clusters import VidurClusters


@dataclass(frozen=True)
class Exploration:
    """How decisions are sampled in an iteration, and what the curriculum makes of their rewards."""

    temperature: float
    epsilon: float
    #: The curriculum's multiplier of the hybrid penalties.
    penalty_scale: float = 1.0


@dataclass(frozen=True)
class CompletedRequests:
    """Requests completed since the last rollout of a slot, and the simulated time that passed."""

    latency_s: FloatArray
    ttft_s: FloatArray
    tbt_s: FloatArray
    decode_tokens: FloatArray
    duration_s: float
    #: Standard deviation across replicas of the requests in flight, at the end.
    load_spread: float


@dataclass(frozen=True)
class Experience:
    """What a slot saw, did and earned in one rollout; [clusters, decisions, ...], to be sent between processes.

    `actions` are those of all decisions; the others are about those that are learned from.
    """

    #: Numbers of the decisions that are learned from.
    learned: IntArray
    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    actions: IntArray
    #: Of the decisions that were made.
    rewards: FloatArray
    #: Of every replica, where that is known at once; else None.
    action_rewards: FloatArray | None
    #: What comes after the last decision.
    next_replicas: Float32Array
    next_request: Float32Array
    #: Decisions of each cluster before it was lost at the safety limit; those after it are not learned from.
    num_kept: IntArray
    is_lost: NDArray[np.bool_]
    served: CompletedRequests


#: Simulated clusters, each at its next request; `PolicyTwin` says what the methods do.
Clusters: TypeAlias = "PolicyTwin | VidurClusters"


def open_clusters(config: TrainConfig, episode: Episode, cluster: Cluster, requests: list[Requests]) -> Clusters:
    """The clusters of an episode, in the simulator that the configuration names; `cluster` has its replicas."""
    flags = config.flags
    if config.backend == "vidur":
        from .vidur_clusters import VidurClusters  # imports Vidur, which takes seconds

        return VidurClusters(episode, cluster, flags, requests)
    assert cluster.twin is not None
    return PolicyTwin(
        cluster.twin,
        requests,
        prior=build_prior(flags, cluster.delay_model),
        features=build_features(flags),
        tail_preferences=episode.tail_preferences,
        report_delay_s=episode.report_delay_s,
        drains=[episode.drains(part) for part in requests],
    )


class Slot:
    """Runs one episode."""

    def __init__(self, config: TrainConfig, episode: Episode, cluster: Cluster) -> None:
        self._config, self._flags = config, config.flags
        self.episode = episode
        self._look_ahead = look_ahead_of(config, config.mixture[episode.part])
        requests = episode.requests()
        self._clusters = open_clusters(config, episode, cluster, requests)
        self._arrived_s = np.stack([part.arrived_at_s for part in requests])
        self._decode_tokens = np.stack([part.decode_tokens for part in requests])
        self._prompt_tokens = np.stack([part.prompt_tokens for part in requests])
        self._rewards = [DecisionRewards(self._flags) for _ in requests]
        #: Decisions made by each cluster in this episode.
        self.num_decisions = 0
        self._window_began_s: FloatArray = np.zeros(len(requests))
        self._is_lost: NDArray[np.bool_] = np.zeros(len(requests), np.bool_)

    def replay(self, actor: Any, actions: NDArray[np.int16]) -> None:
        """Make known decisions again, [clusters, decisions]: the slot is then where it was after them."""
        if actions.shape[1]:
            played = self._clusters.play(actor, actions.shape[1], forced=actions)
            self._finish(played, is_credited=False)

    def collect(
        self, actor: Any, exploration: Exploration, uniforms: FloatArray, rng: np.random.Generator
    ) -> Experience:
        """Decide as often as there are random numbers: [clusters, decisions, 2]; `rng` is for looking ahead."""
        if self._look_ahead.is_on:
            return self._collect_ahead(actor, exploration, uniforms, rng)
        flags, was_lost = self._flags, self._is_lost
        knows_all = flags.pays_at_once
        for rewards in self._rewards:
            rewards.penalty_scale = exploration.penalty_scale
        played = self._clusters.play(
            actor,
            uniforms.shape[1],
            temperature=exploration.temperature,
            epsilon=exploration.epsilon,
            uniforms=uniforms,
            with_credit=knows_all,
            **flags.credit_weights,
        )
        served, earned, num_kept = self._finish(played, is_credited=knows_all)
        chosen = played.actions[..., None]
        taken = np.take_along_axis(played.rewards, chosen, axis=2)[..., 0] if knows_all else earned
        for cluster in np.flatnonzero(self._is_lost & ~was_lost).tolist():
            last = max(0, int(num_kept[cluster]) - 1)
            taken[cluster, last] -= self._config.limit_penalty
            played.rewards[cluster, last, played.actions[cluster, last]] -= self._config.limit_penalty
        seen = self._clusters.observe()
        return Experience(
            learned=np.arange(uniforms.shape[1]),
            replicas=played.replicas,
            request=played.request,
            prior_logits=played.prior_logits,
            actions=played.actions,
            rewards=taken,
            action_rewards=played.rewards if knows_all else None,
            next_replicas=seen.replicas.copy(),
            next_request=seen.request.copy(),
            num_kept=num_kept,
            is_lost=self._is_lost.copy(),
            served=served,
        )

    def _collect_ahead(
        self, actor: Any, exploration: Exploration, uniforms: FloatArray, rng: np.random.Generator
    ) -> Experience:
        """Decide greedily, as in use; some decisions are followed into the future on every replica."""
        ahead, steps, clusters = self._look_ahead, uniforms.shape[1], self._clusters
        assert isinstance(clusters, PolicyTwin)
        prospects, parts = [], []
        for first in range(0, steps, ahead.every):
            prospects.append(look_ahead(clusters, actor, self.episode.num_after - 1, rng))
            bounds = first, first + 1, first + ahead.every
            for begin, end in pairwise(bounds):
                part = clusters.play(
                    actor,
                    end - begin,
                    epsilon=exploration.epsilon,
                    uniforms=uniforms[:, begin:end],
                    with_credit=begin == first,  # it costs time, and only this decision is learned from
                    backlog_weight=self._flags.backlog_weight,
                )
                parts.append(part)
        played = Trajectories(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))
        learned = np.arange(0, steps, ahead.every)
        every = ahead.rewards(prospects, -played.rewards[:, learned], self.episode.tail_preferences)
        served, _, num_kept = self._finish(played, is_credited=False)
        seen = clusters.observe()
        return Experience(
            learned=learned,
            replicas=played.replicas[:, learned],
            request=played.request[:, learned],
            prior_logits=played.prior_logits[:, learned],
            actions=played.actions,
            rewards=np.take_along_axis(every, played.actions[:, learned, None], axis=2)[..., 0],
            action_rewards=every,
            next_replicas=seen.replicas.copy(),
            next_request=seen.request.copy(),
            num_kept=np.searchsorted(learned, num_kept),
            is_lost=self._is_lost.copy(),
            served=served,
        )

    def _finish(self, played: Trajectories, *, is_credited: bool) -> tuple[CompletedRequests, FloatArray, IntArray]:
        """After decisions: what was served and earned, and the decisions of each cluster before it was lost.

        `is_credited`: `played.rewards` are minus what placements add to everybody's latency, and become rewards.
        """
        steps = played.actions.shape[1]
        first, self.num_decisions = self.num_decisions, self.num_decisions + steps
        clusters, done = self._clusters.completions()
        earned = np.zeros(played.actions.shape)
        if self._flags.reward_mode != "marginal_delay":
            after = self._clusters.observe()
            for cluster, rewards in enumerate(self._rewards):
                mine = np.flatnonzero(clusters == cluster)
                stretch = Stretch(
                    moments_s=self._arrived_s[cluster, first : first + steps + 1],
                    loads=np.vstack([played.loads[cluster], after.token_load[cluster]]),
                    queue_lengths=np.vstack([played.queue_lengths[cluster], after.outstanding[cluster]]),
                    prompt_tokens=self._prompt_tokens[cluster, first : first + steps],
                    requests=done.index[mine],
                    arrived_at_s=done.arrived_at_s[mine],
                    completed_at_s=done.completed_at_s[mine],
                    increases_s=-played.rewards[cluster] if is_credited else None,
                )
                earned[cluster], every = follow(rewards, first, stretch)
                if every is not None:
                    played.rewards[cluster] = every
        return self._served(clusters, done), earned, self._kept(played)

    def _kept(self, played: Trajectories) -> IntArray:
        """Decisions of each cluster before a request has waited too long; notes who is lost."""
        steps, limit_s = played.actions.shape[1], self._config.latency_limit_s
        if not limit_s:
            return np.full(len(played.actions), steps)
        is_over = np.column_stack([played.oldest_wait_s, self._clusters.oldest_wait_s]) > limit_s
        is_over[:, 0] |= self._is_lost
        self._is_lost = np.any(is_over, axis=1)
        kept: IntArray = np.where(self._is_lost, np.argmax(is_over, axis=1), steps)
        return kept

    def _served(self, clusters: IntArray, done: Completions) -> CompletedRequests:
        now_s, began_s = self._arrived_s[:, self.num_decisions], self._window_began_s
        self._window_began_s = now_s
        decode_tokens = self._decode_tokens[clusters, done.index].astype(np.float64)
        return CompletedRequests(
            latency_s=done.completed_at_s - done.arrived_at_s,
            ttft_s=done.first_token_at_s - done.arrived_at_s,
            tbt_s=(done.completed_at_s - done.first_token_at_s) / np.maximum(1.0, decode_tokens - 1.0),
            decode_tokens=decode_tokens,
            duration_s=float((now_s - began_s).sum()),
            load_spread=float(self._clusters.in_flight.std(axis=1).mean()),
        )


def rollouts_of(experience: Experience, exploration: Exploration, first_stream: int, *, is_last: bool) -> list[Rollout]:
    """A rollout for each cluster that was not lost before, each a stream of its own; `is_last`: of the episode."""
    rollouts, every = [], experience.action_rewards
    for cluster, num_kept in enumerate(experience.num_kept.tolist()):
        if num_kept == 0:
            continue
        following = Observation(experience.next_replicas[cluster], experience.next_request[cluster])
        rollouts.append(
            Rollout(
                replicas=experience.replicas[cluster, :num_kept],
                request=experience.request[cluster, :num_kept],
                prior_logits=experience.prior_logits[cluster, :num_kept],
                actions=experience.actions[cluster, experience.learned[:num_kept]],
                temperatures=np.full(num_kept, exploration.temperature, np.float32),
                epsilons=np.full(num_kept, exploration.epsilon, np.float32),
                rewards=experience.rewards[cluster, :num_kept],
                action_rewards=None if every is None else every[cluster, :num_kept],
                next_observation=None if experience.is_lost[cluster] else following,
                stream=first_stream + cluster,
                is_last_of_stream=is_last,
            )
        )
    return rollouts
