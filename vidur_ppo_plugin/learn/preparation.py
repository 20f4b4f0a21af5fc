"""Before an update: old probabilities, values, advantages and returns of the rollouts, and the statistics they need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic

from .advantages import (
    all_action_advantages,
    every_action_advantages,
    explained_variance,
    gain_over_prior,
    generalised_advantages,
)
from .batch import Batch, Group, Segment
from .normalise import RewardNormaliser, RunningMoments
from .parameters import PPOParameters
from .rollout import Rollout

FloatArray = NDArray[np.float64]
_TENSORS = ("replicas", "request", "prior_logits", "actions", "temperatures", "epsilons")
# Keeps the normalised advantages of a rollout finite in which all decisions were worth the same.
_EPSILON = 1e-8


@dataclass
class _Draft:
    """A group in the making."""

    rollouts: list[Rollout]
    tensors: dict[str, Tensor]
    encoded: Tensor
    logits: Tensor
    reference_logits: Tensor
    old_log_probs: Tensor
    advantages: FloatArray
    action_advantages: FloatArray | None = None


@dataclass
class _Stretch:
    """What the critic said about a rollout: values in its own scale, and where each segment begins."""

    values: Tensor
    hiddens: list[Tensor]
    next_value: float


class Preparation:
    """Turns rollouts into a batch; keeps the running statistics and the critic's memory of each stream."""

    def __init__(self, network: ActorCritic, parameters: PPOParameters) -> None:
        self._network = network
        self._parameters = parameters
        self._reward_normaliser = RewardNormaliser(parameters.gamma)
        self._return_moments = RunningMoments()
        # The critic's memory at the start of the next rollout of each stream; at the beginning where there is none.
        self._hiddens: dict[int, Tensor] = {}

    def batch(self, rollouts: Sequence[Rollout], reference: ActorCritic | None) -> tuple[Batch, dict[str, float]]:
        """The batch, and how good policy and critic were before the update. Advances memory and statistics."""
        rewards, scale = self._scaled_rewards(rollouts)
        drafts = [
            self._draft([rollout for rollout in rollouts if rollout.num_replicas == size], reference)
            for size in sorted({rollout.num_replicas for rollout in rollouts})
        ]
        with torch.no_grad():
            metrics, critic = self._criticise(drafts, rewards)
        has_all_actions = all(rollout.action_rewards is not None for rollout in rollouts)
        if has_all_actions:
            parts = [(_action_rewards(draft), draft.logits.numpy(), _prior_logits(draft)) for draft in drafts]
            metrics["gain_over_prior"] = gain_over_prior(*zip(*parts, strict=True))
            if reference is not None:
                parts = [(*part[:2], draft.reference_logits.numpy()) for part, draft in zip(parts, drafts, strict=True)]
                metrics["gain_over_reference"] = gain_over_prior(*zip(*parts, strict=True))
            if self._parameters.all_action_baseline:
                self._compare_all_actions(drafts, scale)
        metrics |= self._attention_summary(drafts)
        if self._parameters.normalize_advantages:
            _normalise(drafts)
        groups = [_group(draft) for draft in drafts]
        return Batch(groups, self._segments(drafts, groups, *critic) if critic else []), metrics

    def _scaled_rewards(self, rollouts: Sequence[Rollout]) -> tuple[dict[int, FloatArray], float]:
        """Rewards by the id of their rollout, as the critic learns them, and the factor that was applied."""
        scale = self.reward_scale([(rollout.stream, rollout.rewards) for rollout in rollouts])
        return {id(rollout): rollout.rewards * scale for rollout in rollouts}, scale

    def reward_scale(self, rewards: Sequence[tuple[int, FloatArray]]) -> float:
        """What rewards are multiplied with; adds those of each stream, in order, to the statistics."""
        if not self._parameters.normalize_rewards:
            return 1.0
        for stream, values in rewards:
            self._reward_normaliser.observe(values, stream)
        return self._reward_normaliser.scale

    def _draft(self, rollouts: list[Rollout], reference: ActorCritic | None) -> _Draft:
        # Copies: torch aligns its own memory, and the last bit of a product depends on the alignment.
        tensors = {
            name: torch.tensor(np.concatenate([getattr(rollout, name) for rollout in rollouts])) for name in _TENSORS
        }
        with torch.no_grad():
            encoded = self._network.encode(tensors["replicas"], tensors["request"])
            logits = self._network.logits(encoded, tensors["prior_logits"])
            old_log_probs = log_probabilities(logits, tensors["temperatures"], tensors["epsilons"])
            reference_logits = tensors["prior_logits"]
            if reference is not None:
                encoded_by_reference = reference.encode(tensors["replicas"], tensors["request"])
                reference_logits = reference.logits(encoded_by_reference, reference_logits)
        return _Draft(rollouts, tensors, encoded, logits, reference_logits, old_log_probs, np.empty(0))

    # --- the critic ---------------------------------------------------------------------------------------------

    def _criticise(
        self, drafts: list[_Draft], rewards: dict[int, FloatArray]
    ) -> tuple[dict[str, float], tuple[dict[int, _Stretch], dict[int, FloatArray]] | None]:
        """Advantages of the drafts by the critic; the metrics, and what segments are made of: values, returns."""
        if not self._parameters.enable_critic:
            return {}, None
        mean, std = self._return_moments.mean, self._return_moments.std
        stretches, returns, predicted = {}, {}, []
        for draft in drafts:
            encoded = torch.split(draft.encoded, [len(rollout) for rollout in draft.rollouts])
            advantages = []
            for rollout, states in zip(draft.rollouts, encoded, strict=True):
                stretch = self._values(states, rollout)
                unscaled = stretch.values.numpy().astype(np.float64) * std + mean
                bootstrap = stretch.next_value * std + mean if rollout.next_observation is not None else 0.0
                advantage = generalised_advantages(
                    rewards[id(rollout)], unscaled, bootstrap,
                    gamma=self._parameters.gamma, gae_lambda=self._parameters.gae_lambda,
                )  # fmt: skip
                advantages.append(advantage)
                predicted.append(unscaled)
                stretches[id(rollout)], returns[id(rollout)] = stretch, advantage + unscaled
            draft.advantages = np.concatenate(advantages)
        all_returns = np.concatenate(list(returns.values()))
        metrics = {"explained_variance": explained_variance(np.concatenate(predicted), all_returns)}
        self._return_moments.update(all_returns)
        return metrics, (stretches, returns)

    def _values(self, encoded: Tensor, rollout: Rollout) -> _Stretch:
        """Values in order, the critic's memory before each minibatch-sized segment, and the bootstrap value."""
        values, hiddens = [], []
        hidden = self._hiddens.get(rollout.stream, self._network.initial_hidden())
        for segment in torch.tensor_split(encoded, self._num_segments(rollout)):
            hiddens.append(hidden)
            segment_values, hidden = self._network.values(segment, hidden)
            values.append(segment_values)
        self._hiddens[rollout.stream] = hidden
        next_value = 0.0
        if rollout.next_observation is not None:
            following = rollout.next_observation
            state = self._network.encode(torch.tensor(following.replicas)[None], torch.tensor(following.request)[None])
            next_value = float(self._network.values(state, hidden)[0][0])
        if rollout.next_observation is None or rollout.is_last_of_stream:
            del self._hiddens[rollout.stream]
        return _Stretch(torch.cat(values), hiddens, next_value)

    def _num_segments(self, rollout: Rollout) -> int:
        return max(1, round(len(rollout) / self._parameters.minibatch_size))

    def _segments(
        self,
        drafts: list[_Draft],
        groups: list[Group],
        stretches: dict[int, _Stretch],
        returns: dict[int, FloatArray],
    ) -> list[Segment]:
        mean, std = self._return_moments.mean, self._return_moments.std
        segments = []
        for draft, group in zip(drafts, groups, strict=True):
            first = 0
            for rollout in draft.rollouts:
                stretch = stretches[id(rollout)]
                targets = torch.tensor(((returns[id(rollout)] - mean) / std).astype(np.float32))
                num_segments = self._num_segments(rollout)
                parts = (torch.tensor_split(values, num_segments) for values in (stretch.values, targets))
                for hidden, old_values, its_returns in zip(stretch.hiddens, *parts, strict=True):
                    # Not a slice: what it gives is a view, not aligned.
                    rows = torch.arange(first, first + len(its_returns))
                    segments.append(
                        Segment(group=group, rows=rows, hidden=hidden, old_values=old_values, returns=its_returns)
                    )
                    first += len(its_returns)
        return segments

    # --- all actions compared -----------------------------------------------------------------------------------

    def _compare_all_actions(self, drafts: list[_Draft], scale: float) -> None:
        for draft in drafts:
            probabilities = draft.old_log_probs.exp().numpy().astype(np.float64)
            rewards = _action_rewards(draft) * scale
            draft.advantages = all_action_advantages(rewards, probabilities, draft.tensors["actions"].numpy())
            if self._parameters.expected_gradient:
                draft.action_advantages = every_action_advantages(rewards, probabilities)

    def _attention_summary(self, drafts: list[_Draft]) -> dict[str, float]:
        """Of the first group: the figures depend on the number of replicas."""
        tensors = drafts[0].tensors
        return self._network.attention_summary(tensors["replicas"], tensors["request"])

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batch depends on."""
        return {
            "rewards": self._reward_normaliser.state_dict(),
            "returns": self._return_moments.state_dict(),
            "hiddens": dict(self._hiddens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._reward_normaliser.load_state_dict(state["rewards"])
        self._return_moments.load_state_dict(state["returns"])
        self._hiddens = dict(state["hiddens"])


def log_probabilities(logits: Tensor, temperatures: Tensor, epsilons: Tensor) -> Tensor:
    """Log-probabilities of the sampled policy: a softmax at a temperature, mixed with uniform exploration."""
    log_probs = torch.log_softmax(logits / temperatures[:, None], dim=1)
    if not bool(epsilons.any()):
        return log_probs
    uniform = 1.0 / logits.shape[1]
    return torch.log((1 - epsilons[:, None]) * log_probs.exp() + epsilons[:, None] * uniform)


def _action_rewards(draft: _Draft) -> FloatArray:
    return np.concatenate([rollout.action_rewards for rollout in draft.rollouts if rollout.action_rewards is not None])


def _prior_logits(draft: _Draft) -> FloatArray:
    return np.concatenate([rollout.prior_logits for rollout in draft.rollouts])


def _normalise(drafts: list[_Draft]) -> None:
    """Mean 0 and deviation 1 over all decisions; advantages of every action have mean 0 under the policy already."""
    advantages = np.concatenate([draft.advantages for draft in drafts])
    mean, std = advantages.mean(), advantages.std()
    squares = 0.0
    for draft in drafts:
        draft.advantages = (draft.advantages - mean) / (std + _EPSILON)
        if draft.action_advantages is not None:
            squares += float((draft.old_log_probs.exp().numpy() * draft.action_advantages**2).sum())
    for draft in drafts:
        if draft.action_advantages is not None:
            draft.action_advantages = draft.action_advantages / (np.sqrt(squares / len(advantages)) + _EPSILON)


def _group(draft: _Draft) -> Group:
    actions, every = draft.tensors["actions"], draft.action_advantages
    return Group(
        **draft.tensors,
        reference_logits=draft.reference_logits,
        old_log_probs=draft.old_log_probs,
        old_action_log_probs=draft.old_log_probs.gather(1, actions[:, None])[:, 0],
        advantages=torch.tensor(draft.advantages.astype(np.float32)),
        action_advantages=None if every is None else torch.tensor(every.astype(np.float32)),
    )
