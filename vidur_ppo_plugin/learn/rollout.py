"""A rollout: the decisions between two updates, with what is needed to weigh them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.features import Float32Array, Observation

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One placement, as it was made: acting and learning see the same numbers."""

    observation: Observation
    prior_logits: Float32Array
    action: int
    temperature: float
    epsilon: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """T decisions in order, and the state after the last."""

    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    actions: NDArray[np.int64]
    temperatures: Float32Array
    epsilons: Float32Array
    rewards: FloatArray
    #: Reward of every action, where the reward mode gives it; else None.
    action_rewards: FloatArray | None
    #: The observation at the decision after the last, to bootstrap from; None if the run is over.
    next_observation: Observation | None
    #: Which stream of decisions it continues: the critic remembers each by itself.
    stream: int = 0
    #: The stream starts anew after it, whether or not there is a state to bootstrap from.
    is_last_of_stream: bool = False

    @property
    def num_replicas(self) -> int:
        """How many replicas each decision chose from."""
        return int(self.prior_logits.shape[1])

    def __len__(self) -> int:
        return len(self.actions)


class RolloutBuffer:
    """Collects decisions; a decision's reward arrives later, when its effect is known."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"rollout_len must be >= 1, got {length}")
        self.length = length
        self._decisions: list[Decision] = []
        self._rewards: list[float] = []
        self._action_rewards: list[FloatArray] = []

    def __len__(self) -> int:
        return len(self._decisions)

    @property
    def is_full(self) -> bool:
        """Whether every decision of the rollout has been made and settled."""
        return len(self._decisions) >= self.length and len(self._rewards) == len(self._decisions)

    def add(self, decision: Decision) -> None:
        """Add a decision that was just made; the one before must have its reward."""
        if len(self._rewards) != len(self._decisions):
            raise RuntimeError("a decision was made before the reward of the last one was settled")
        self._decisions.append(decision)

    def settle(self, reward: float, action_rewards: FloatArray | None = None) -> None:
        """Give the newest decision its reward; ValueError if that is not finite."""
        if len(self._rewards) + 1 != len(self._decisions):
            raise RuntimeError("there is no decision that waits for a reward")
        if not np.isfinite(reward) or (action_rewards is not None and not np.all(np.isfinite(action_rewards))):
            raise ValueError(
                f"the reward of decision {len(self._decisions) - 1} is not finite: {reward}, {action_rewards}"
            )
        self._rewards.append(float(reward))
        if action_rewards is not None:
            self._action_rewards.append(action_rewards)

    @property
    def awaits_reward(self) -> bool:
        """Whether the newest decision has no reward yet."""
        return len(self._rewards) < len(self._decisions)

    def take(self, next_observation: Observation | None) -> Rollout:
        """The rollout, leaving the buffer empty."""
        decisions = self._decisions
        rollout = Rollout(
            replicas=np.stack([d.observation.replicas for d in decisions]),
            request=np.stack([d.observation.request for d in decisions]),
            prior_logits=np.stack([d.prior_logits for d in decisions]),
            actions=np.array([d.action for d in decisions], dtype=np.int64),
            temperatures=np.array([d.temperature for d in decisions], dtype=np.float32),
            epsilons=np.array([d.epsilon for d in decisions], dtype=np.float32),
            rewards=np.array(self._rewards),
            action_rewards=np.stack(self._action_rewards) if self._action_rewards else None,
            next_observation=next_observation,
        )
        self._decisions, self._rewards, self._action_rewards = [], [], []
        return rollout
