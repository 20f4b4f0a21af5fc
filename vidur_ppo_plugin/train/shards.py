"""A shard: the decisions that one job has collected. They stay where they were made; sums and gradients travel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.learn.advantages import all_action_advantages, every_action_advantages, reward_of_best
from vidur_ppo_plugin.learn.batch import Batch, Group
from vidur_ppo_plugin.learn.build import ppo_parameters
from vidur_ppo_plugin.learn.loss import Loss
from vidur_ppo_plugin.learn.parameters import Coefficients
from vidur_ppo_plugin.learn.preparation import log_probabilities
from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.policy.actor import Weights
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.features import Float32Array
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.layout import IntArray

#: The gradient of a part of a minibatch by the names of parameters, times its share; and what the loss told.
PartGradient = tuple[dict[str, Float32Array], dict[str, float]]


@dataclass(frozen=True)
class ShardSums:
    """What the learner has to know of a shard before the first step; sums over its decisions."""

    num_decisions: int
    #: Rewards of each rollout, by its stream.
    rewards: Sequence[tuple[int, FloatArray]]
    #: Of the advantages of the actions taken, and of their squares.
    advantage: float
    advantage_square: float
    #: Of the squared advantages of every action, by their probabilities.
    every_square: float
    #: Rewards of the greedy policy's choices, and of its prior's.
    own_reward: float
    prior_reward: float


@dataclass(frozen=True)
class Scaling:
    """What normalises advantages: times a factor, minus a shift; every action's have a factor of their own."""

    factor: float
    shift: float
    every_factor: float


class Shard:
    """Decisions by their number of replicas, with all that is fixed during an update."""

    def __init__(
        self, flags: PPOModularFlags, rollouts: Sequence[Rollout], network: ActorCritic, reference: ActorCritic | None
    ) -> None:
        """`network`: as it was when the decisions were made; `reference`: what `kl_ref_coef` pulls to, None: prior."""
        self._flags = flags
        sizes = sorted({rollout.num_replicas for rollout in rollouts})
        self._parts = [
            _Part([rollout for rollout in rollouts if rollout.num_replicas == size], network, reference)
            for size in sizes
        ]
        self._rewards = [(rollout.stream, rollout.rewards) for rollout in rollouts]
        self._scaled: tuple[Scaling, Batch] | None = None

    def sums(self) -> ShardSums:
        """Over all decisions."""
        parts = self._parts
        taken = [part.advantages for part in parts]
        return ShardSums(
            num_decisions=sum(len(part.advantages) for part in parts),
            rewards=self._rewards,
            advantage=float(sum(part.sum() for part in taken)),
            advantage_square=float(sum((part**2).sum() for part in taken)),
            every_square=float(sum((part.probabilities * part.every**2).sum() for part in parts)),
            own_reward=float(sum(reward_of_best(part.rewards, part.logits).sum() for part in parts)),
            prior_reward=float(sum(reward_of_best(part.rewards, part.prior_logits).sum() for part in parts)),
        )

    def batch(self, scaling: Scaling) -> Batch:
        """What is learned from, with normalised advantages; the same for a whole update."""
        if self._scaled is None or self._scaled[0] != scaling:
            has_every = self._flags.expected_gradient
            groups = [
                replace(
                    part.group,
                    advantages=_float32(part.advantages * scaling.factor - scaling.shift),
                    action_advantages=_float32(part.every * scaling.every_factor) if has_every else None,
                )
                for part in self._parts
            ]
            self._scaled = scaling, Batch(groups, [])
        return self._scaled[1]


class _Part:
    """Decisions among the same number of replicas."""

    def __init__(self, rollouts: Sequence[Rollout], network: ActorCritic, reference: ActorCritic | None) -> None:
        # Copies: torch aligns its own memory, and the last bit of a product depends on the alignment.
        names = ("replicas", "request", "prior_logits", "actions", "temperatures", "epsilons")
        tensors = {
            name: torch.tensor(np.concatenate([getattr(rollout, name) for rollout in rollouts])) for name in names
        }
        with torch.no_grad():
            logits = network.logits(network.encode(tensors["replicas"], tensors["request"]), tensors["prior_logits"])
            old_log_probs = log_probabilities(logits, tensors["temperatures"], tensors["epsilons"])
            reference_logits = tensors["prior_logits"]
            if reference is not None:
                encoded = reference.encode(tensors["replicas"], tensors["request"])
                reference_logits = reference.logits(encoded, reference_logits)
        every = [rollout.action_rewards for rollout in rollouts]
        self.rewards: FloatArray = np.concatenate([rewards for rewards in every if rewards is not None])
        self.logits, self.prior_logits = logits.numpy(), tensors["prior_logits"].numpy()
        self.probabilities = old_log_probs.exp().numpy().astype(np.float64)
        self.every = every_action_advantages(self.rewards, self.probabilities)
        self.advantages = all_action_advantages(self.rewards, self.probabilities, tensors["actions"].numpy())
        self.group = Group(
            **tensors,
            reference_logits=reference_logits,
            old_log_probs=old_log_probs,
            old_action_log_probs=old_log_probs.gather(1, tensors["actions"][:, None])[:, 0],
            advantages=torch.empty(0),
            action_advantages=None,
        )


def _float32(values: FloatArray) -> Tensor:
    return torch.tensor(values.astype(np.float32))


class ShardLearner:
    """Computes gradients on shards, with a network of its own."""

    def __init__(self, flags: PPOModularFlags, shape: dict[str, int | bool]) -> None:
        torch.set_num_threads(1)
        self._flags = flags
        self._network = ActorCritic(NetworkShape(**shape))  # type: ignore[arg-type]
        self._parameters = dict(self._network.named_parameters())
        self._loss = Loss(self._network, replace(ppo_parameters(flags), enable_critic=False))

    def shard(self, rollouts: Sequence[Rollout], weights: Weights, reference: Weights | None) -> Shard:
        """Of rollouts that were made with these weights."""
        other = None
        if reference is not None:
            other = ActorCritic(self._network.shape)
            _load(dict(other.named_parameters()), reference)
        _load(self._parameters, weights)
        return Shard(self._flags, rollouts, self._network, other)

    def gradient(
        self, shard: Shard, rows: IntArray, scaling: Scaling, coefficients: Coefficients, share: float, weights: Weights
    ) -> PartGradient:
        """Of the loss on some decisions of a shard, times their share of the minibatch."""
        _load(self._parameters, weights)
        loss, metrics = self._loss.of_policy(shard.batch(scaling), torch.tensor(rows), coefficients)
        self._network.zero_grad()
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return {name: self._parameters[name].grad.numpy() for name in weights[0]}, metrics  # type: ignore[union-attr]


def _load(parameters: dict[str, Parameter], weights: Weights) -> None:
    with torch.no_grad():
        for name, values in weights[0].items():
            parameters[name].copy_(torch.from_numpy(values))
