"""A shard: decisions that lie in one place, with all that is fixed during an update, and the gradient of parts of them.

Training in one process has one shard; workers have one each, of the decisions that they collected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic
from vidur_ppo_plugin.routing.features import Float32Array

from .batch import Contents, Group, Minibatch, Normalisation, Segment, Statistics, Summary
from .normalise import Moments
from .parameters import Coefficients, PPOParameters
from .ppo import (
    PPO,
    all_action_advantages,
    generalised_advantages,
    log_probabilities,
    policy_loss,
    reward_of_best,
    value_loss,
)
from .rollout import FloatArray, Rollout

_TENSORS = ("replicas", "request", "prior_logits", "actions", "temperatures", "epsilons")
_MUST_BE_FINITE = ("replicas", "request", "prior_logits", "temperatures", "rewards", "action_rewards")


class LocalShards:
    """All decisions of an update in this process: one shard, which works on the learner's own network."""

    def __init__(self, ppo: PPO, rollouts: Sequence[Rollout]) -> None:
        self._shard = Shard(rollouts, ppo.network, ppo.reference, ppo.parameters)
        self.contents = (self._shard.contents,)

    def prepare(self, statistics: Statistics) -> Sequence[Summary]:
        """Settle what is fixed during the update but for its normalisation."""
        return (self._shard.prepare(statistics),)

    def backward(
        self, minibatches: Sequence[Minibatch], normalisation: Normalisation, coefficients: Coefficients
    ) -> dict[str, float]:
        """Leave the gradient of the loss on a minibatch in the network; returns the metrics."""
        (minibatch,) = minibatches
        return self._shard.backward(minibatch, normalisation, coefficients)


class Shard:
    """Decisions by their number of replicas."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        network: ActorCritic,
        reference: ActorCritic | None,
        parameters: PPOParameters,
    ) -> None:
        """`network`: as it was when the decisions were made; `reference`: what `kl_ref_coef` pulls to, None: prior."""
        self._network, self._parameters = network, parameters
        self._has_reference = reference is not None
        self._has_all_actions = all(rollout.action_rewards is not None for rollout in rollouts)
        sizes = sorted({rollout.num_replicas for rollout in rollouts})
        self._drafts = [
            _Draft([rollout for rollout in rollouts if rollout.num_replicas == size], network, reference)
            for size in sizes
        ]
        if not parameters.enable_critic:
            for draft in self._drafts:
                draft.encoded = torch.empty(0)  # large, and nobody else needs it
        self.contents = Contents(
            num_decisions=sum(map(len, rollouts)),
            rewards=[(rollout.stream, rollout.rewards) for rollout in rollouts],
            not_finite=next(filter(None, map(_not_finite, rollouts)), ""),
        )
        self._normalised: tuple[Normalisation, list[Group], list[Segment]] | None = None

    def prepare(self, statistics: Statistics) -> Summary:
        """Compute advantages, and what the critic learns from: rewards are scaled, nothing is normalised yet."""
        summary = Summary(advantages=Moments(), action_advantages_square=0.0, best_rewards=self._best_rewards())
        if self._parameters.enable_critic:
            summary = self._criticise(statistics, summary)
        if self._has_all_actions and self._parameters.all_action_baseline:
            for draft in self._drafts:
                draft.compare_all_actions(statistics.reward_scale, keeps_all=self._parameters.expected_gradient)
        attention: dict[str, float] = {}
        if self._drafts:  # of the first group: the figures depend on the number of replicas
            tensors = self._drafts[0].tensors
            attention = self._network.attention_summary(tensors["replicas"], tensors["request"])
        return replace(
            summary,
            advantages=Moments.of(_joined([draft.advantages for draft in self._drafts])),
            action_advantages_square=sum(draft.action_advantages_square for draft in self._drafts),
            attention=attention,
        )

    def _best_rewards(self) -> dict[str, float]:
        if not self._has_all_actions:
            return {}
        scores = {
            "own": [draft.logits for draft in self._drafts],
            "prior": [draft.tensors["prior_logits"] for draft in self._drafts],
        }
        if self._has_reference:
            scores["reference"] = [draft.reference_logits for draft in self._drafts]
        rewards = [draft.action_rewards for draft in self._drafts]
        return {
            name: float(_joined([reward_of_best(*pair) for pair in zip(rewards, _arrays(every), strict=True)]).sum())
            for name, every in scores.items()
        }

    @torch.no_grad()
    def _criticise(self, statistics: Statistics, summary: Summary) -> Summary:
        """GAE by the critic, stream by stream: advantages, returns and how far the critic missed them, its memory."""
        mean, scale, parameters = statistics.return_mean, statistics.return_scale, self._parameters
        hiddens: dict[int, Float32Array | None] = {}
        residuals = []
        for draft in self._drafts:
            draft.critic_values, advantages, predictions = [], [], []
            encoded = torch.split(draft.encoded, [len(rollout) for rollout in draft.rollouts])
            for rollout, states in zip(draft.rollouts, encoded, strict=True):
                critic = self._follow(states, rollout, statistics.hiddens)
                values = torch.cat(critic.values).numpy().astype(np.float64) * scale + mean
                gae = generalised_advantages(
                    rollout.rewards * statistics.reward_scale,
                    values,
                    critic.next_value * scale + mean if rollout.next_observation is not None else 0.0,
                    gamma=parameters.gamma,
                    gae_lambda=parameters.gae_lambda,
                )
                draft.critic_values.append(critic)
                advantages.append(gae)
                predictions.append(values)
                is_over = rollout.next_observation is None or rollout.is_last_of_stream
                hiddens[rollout.stream] = None if is_over else critic.next_hidden.numpy()
            draft.advantages, predicted = np.concatenate(advantages), np.concatenate(predictions)
            draft.returns = draft.advantages + predicted
            residuals.append(draft.returns - predicted)
        critic_values = [critic for draft in self._drafts for critic in draft.critic_values]
        return replace(
            summary,
            segment_lengths=[len(values) for critic in critic_values for values in critic.values],
            returns=Moments.of(_joined([draft.returns for draft in self._drafts])),
            residuals=Moments.of(_joined(residuals)),
            hiddens=hiddens,
        )

    def _follow(self, encoded: Tensor, rollout: Rollout, hiddens: Mapping[int, Float32Array]) -> "_CriticValues":
        """The critic's values of the states of a rollout, in order, and of the one after it."""
        network, remembered = self._network, hiddens.get(rollout.stream)
        hidden = network.initial_hidden() if remembered is None else torch.tensor(remembered)
        befores, values = [], []
        num_segments = max(1, round(len(rollout) / self._parameters.minibatch_size))
        for segment in torch.tensor_split(encoded, num_segments):
            befores.append(hidden)
            segment_values, hidden = network.values(segment, hidden)
            values.append(segment_values)
        next_value, following = 0.0, rollout.next_observation
        if following is not None:
            state = network.encode(torch.tensor(following.replicas)[None], torch.tensor(following.request)[None])
            next_value = float(network.values(state, hidden)[0][0])
        return _CriticValues(values, befores, next_value, hidden)

    def backward(
        self, minibatch: Minibatch, normalisation: Normalisation, coefficients: Coefficients
    ) -> dict[str, float]:
        """Add the gradient of the loss on a part of a minibatch to the network's; metrics are weighed by its share."""
        groups, segments = self._normalise(normalisation)
        loss = torch.zeros(())
        told: dict[str, float] = {}
        if len(minibatch.rows):
            parts = _by_group(groups, torch.from_numpy(minibatch.rows))
            policy, told = policy_loss(self._network, parts, self._parameters, coefficients)
            loss, share = minibatch.share * policy, minibatch.share
            told = {name: value if name == "ratio_error" else share * value for name, value in told.items()}
        if self._parameters.enable_critic:
            chosen = [segments[index] for index in minibatch.segments.tolist()]
            value = minibatch.segment_share * value_loss(self._network, chosen, self._parameters.value_clip)
            loss = loss + self._parameters.value_coef * value
            told["value_loss"] = value.item()
        loss.backward()  # type: ignore[no-untyped-call]
        return told

    def _normalise(self, normalisation: Normalisation) -> tuple[list[Group], list[Segment]]:
        """Groups and segments with normalised advantages and returns, made once for each update."""
        if self._normalised is None or self._normalised[0] != normalisation:
            groups = [draft.group(normalisation) for draft in self._drafts]
            segments = [
                segment
                for draft, group in zip(self._drafts, groups, strict=True)
                for segment in draft.segments(group, normalisation)
            ]
            self._normalised = normalisation, groups, segments
        return self._normalised[1:]


@dataclass(frozen=True)
class _CriticValues:
    """The critic's values of a rollout, in its own scale: segment by segment, and after the last."""

    values: list[Tensor]
    #: Its memory before each segment.
    hiddens: list[Tensor]
    next_value: float
    next_hidden: Tensor


class _Draft:
    """Decisions among the same number of replicas, before they are normalised."""

    def __init__(self, rollouts: Sequence[Rollout], network: ActorCritic, reference: ActorCritic | None) -> None:
        self.rollouts = rollouts
        # Copies: torch aligns its own memory, and the last bit of a product depends on the alignment.
        self.tensors = {
            name: torch.tensor(np.concatenate([getattr(rollout, name) for rollout in rollouts])) for name in _TENSORS
        }
        prior_logits = self.tensors["prior_logits"]
        with torch.no_grad():
            self.encoded = network.encode(self.tensors["replicas"], self.tensors["request"])
            self.logits = network.logits(self.encoded, prior_logits)
            self.old_log_probs = log_probabilities(self.logits, self.tensors["temperatures"], self.tensors["epsilons"])
            self.reference_logits = prior_logits
            if reference is not None:
                encoded = reference.encode(self.tensors["replicas"], self.tensors["request"])
                self.reference_logits = reference.logits(encoded, prior_logits)
        self.advantages: FloatArray = np.empty(0)
        self.returns: FloatArray = np.empty(0)
        self.action_advantages: FloatArray | None = None
        self.action_advantages_square = 0.0
        self.critic_values: list[_CriticValues] = []

    @property
    def action_rewards(self) -> FloatArray:
        """The rewards of every action, [decisions, actions], rollout after rollout."""
        every = [rollout.action_rewards for rollout in self.rollouts]
        return np.concatenate([rewards for rewards in every if rewards is not None])

    def compare_all_actions(self, reward_scale: float, *, keeps_all: bool) -> None:
        """Compute advantages without a critic; those of every action too, if they are kept."""
        probabilities = self.old_log_probs.exp().numpy().astype(np.float64)
        every = all_action_advantages(self.action_rewards * reward_scale, probabilities)
        self.advantages = every[np.arange(len(every)), self.tensors["actions"].numpy()]
        if keeps_all:
            self.action_advantages = every
            self.action_advantages_square = float((probabilities * every**2).sum())

    def group(self, normalisation: Normalisation) -> Group:
        """The decisions as tensors, with normalised advantages."""
        advantages = (self.advantages - normalisation.advantage_mean) / normalisation.advantage_deviation
        every = self.action_advantages
        return Group(
            **self.tensors,
            reference_logits=self.reference_logits,
            old_log_probs=self.old_log_probs,
            old_action_log_probs=self.old_log_probs.gather(1, self.tensors["actions"][:, None])[:, 0],
            advantages=_float32(advantages),
            action_advantages=None if every is None else _float32(every / normalisation.action_advantage_deviation),
        )

    def segments(self, group: Group, normalisation: Normalisation) -> list[Segment]:
        """The critic's segments, with normalised returns."""
        if not self.critic_values:
            return []
        old_values = [values for critic in self.critic_values for values in critic.values]
        hiddens = [hidden for critic in self.critic_values for hidden in critic.hiddens]
        returns = _float32((self.returns - normalisation.return_mean) / normalisation.return_scale)
        # Numbers and not slices: those would give views, which are not aligned.
        rows = torch.split(torch.arange(len(returns)), [len(values) for values in old_values])
        targets = torch.split(returns, [len(values) for values in old_values])
        return [
            Segment(group=group, rows=its_rows, hidden=hidden, old_values=values, returns=its_targets)
            for its_rows, hidden, values, its_targets in zip(rows, hiddens, old_values, targets, strict=True)
        ]


def _by_group(groups: Sequence[Group], chosen: Tensor) -> list[tuple[Group, Tensor]]:
    """The chosen decisions, numbered through the groups: each group that has some, with its rows."""
    if len(groups) == 1:
        return [(groups[0], chosen)]
    parts, first = [], 0
    for group in groups:
        rows = chosen[(chosen >= first) & (chosen < first + len(group))] - first
        if len(rows):
            parts.append((group, rows))
        first += len(group)
    return parts


def _not_finite(rollout: Rollout) -> str:
    """Names the first number of a rollout that is not finite; empty if all are."""
    for name in _MUST_BE_FINITE:
        values = getattr(rollout, name)
        if values is not None and not np.all(np.isfinite(values)):
            where = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
            return f"{name}{list(where)} of the rollout is not finite: {values[where]}"
    return ""


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(parts) if parts else np.empty(0)


def _arrays(tensors: Sequence[Tensor]) -> list[Float32Array]:
    return [tensor.numpy() for tensor in tensors]


def _float32(values: FloatArray) -> Tensor:
    return torch.tensor(values.astype(np.float32))
