"""What an update learns from, and what the learner and the shards that hold it tell each other.

The decisions of an update lie in one or more shards: in one, in this process (`shard.LocalShards`), or in one with
each worker of a training (`train.gradients.WorkerShards`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from vidur_ppo_plugin.routing.features import Float32Array

from .normalise import Moments
from .parameters import Coefficients
from .rollout import FloatArray, IntArray

# --- Tensors ---


@dataclass(frozen=True, kw_only=True)
class Group:
    """Decisions among the same number of replicas: others cannot share a tensor with them."""

    replicas: Tensor
    request: Tensor
    prior_logits: Tensor
    reference_logits: Tensor
    actions: Tensor
    temperatures: Tensor
    epsilons: Tensor
    old_log_probs: Tensor
    old_action_log_probs: Tensor
    advantages: Tensor
    #: Of every action, where the update takes the expectation over them; else None.
    action_advantages: Tensor | None

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of time of one stream, for the recurrent critic: rows of a group, and the memory before the first."""

    group: Group
    rows: Tensor
    hidden: Tensor
    old_values: Tensor
    returns: Tensor


# --- Between learner and shards ---


@dataclass(frozen=True)
class Contents:
    """The number of decisions in a shard, and their rewards."""

    num_decisions: int
    #: Rewards of each rollout, by its stream.
    rewards: Sequence[tuple[int, FloatArray]]
    #: Names the first number that is not finite; empty if all are.
    not_finite: str


@dataclass(frozen=True)
class Statistics:
    """What the learner knows as an update begins: shards weigh their decisions by it."""

    reward_scale: float
    #: Of the returns so far; the critic predicts them normalised.
    return_mean: float
    return_scale: float
    #: The critic's memory of each stream at its next decision; none of a stream that begins.
    hiddens: Mapping[int, Float32Array]


@dataclass(frozen=True)
class Summary:
    """What the learner has to know of a shard's decisions before the first step."""

    #: Of the actions taken.
    advantages: Moments
    #: Sum of the squared advantages of every action, weighed by their probabilities.
    action_advantages_square: float
    #: Sums of what the best actions earn in the eyes of the policy (`own`), of its `prior` and of the `reference`.
    best_rewards: Mapping[str, float]
    #: Of the critic, where there is one: number of states of each segment; returns, and what it missed of them.
    segment_lengths: Sequence[int] = ()
    returns: Moments = field(default_factory=Moments)
    residuals: Moments = field(default_factory=Moments)
    #: The critic's memory at the next decision of each stream; None if the stream ended.
    hiddens: Mapping[int, Float32Array | None] = field(default_factory=dict)
    #: Where replicas look, with attention.
    attention: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Normalisation:
    """Means and deviations over the decisions of all shards, and of returns; they hold for a whole update."""

    advantage_mean: float = 0.0
    advantage_deviation: float = 1.0
    action_advantage_deviation: float = 1.0
    return_mean: float = 0.0
    return_scale: float = 1.0


@dataclass(frozen=True)
class Minibatch:
    """What one shard has of a minibatch: decisions for the policy, stretches of time for the critic."""

    rows: IntArray
    #: Of these decisions in the minibatch.
    share: float
    #: Numbers of segments, and the share of their states.
    segments: IntArray
    segment_share: float

    def __len__(self) -> int:
        return len(self.rows) + len(self.segments)


class Shards(Protocol):
    """The decisions of an update, wherever they are."""

    @property
    def contents(self) -> Sequence[Contents]:
        """What is in each shard."""

    def prepare(self, statistics: Statistics) -> Sequence[Summary]:
        """Settle what is fixed during the update but for its normalisation."""

    def backward(
        self, minibatches: Sequence[Minibatch], normalisation: Normalisation, coefficients: Coefficients
    ) -> dict[str, float]:
        """Leave the gradient of the loss on a minibatch, a part from each shard, in the learner's network.

        The metrics are means over the minibatch; `ratio_error` is the largest.
        """
