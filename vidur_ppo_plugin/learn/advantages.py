"""How much better than expected an action was: generalised advantage estimation, or all actions compared."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def generalised_advantages(
    rewards: FloatArray, values: FloatArray, next_value: float, *, gamma: float, gae_lambda: float
) -> FloatArray:
    """GAE (Schulman et al. 2016): sum of (gamma * lambda)^k of the temporal differences.

    `next_value` is the value after the last reward: the bootstrap of a rollout that ends in the middle of a run, or 0.
    """
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"rewards and values must be vectors of one length, got {rewards.shape} and {values.shape}")
    advantages = np.empty_like(rewards)
    following_value, following_advantage = next_value, 0.0
    for index in range(len(rewards) - 1, -1, -1):
        difference = rewards[index] + gamma * following_value - values[index]
        following_advantage = difference + gamma * gae_lambda * following_advantage
        advantages[index] = following_advantage
        following_value = values[index]
    return advantages


def all_action_advantages(
    action_rewards: FloatArray, probabilities: FloatArray, actions: NDArray[np.int64]
) -> FloatArray:
    """The reward of the action taken minus the policy's mean over all actions: no critic, no noise from sampling it.

    Exact only if the future does not count (gamma = 0).
    """
    if action_rewards.shape != probabilities.shape:
        raise ValueError(f"action_rewards {action_rewards.shape} and probabilities {probabilities.shape} must agree")
    expected = (action_rewards * probabilities).sum(axis=1)
    advantages: FloatArray = action_rewards[np.arange(len(actions)), actions] - expected
    return advantages


def every_action_advantages(action_rewards: FloatArray, probabilities: FloatArray) -> FloatArray:
    """The same of every action: [decisions, actions], with mean 0 under the policy."""
    advantages: FloatArray = action_rewards - (action_rewards * probabilities).sum(axis=1, keepdims=True)
    return advantages


def gain_over_prior(
    action_rewards: Sequence[FloatArray], logits: Sequence[FloatArray], prior_logits: Sequence[FloatArray]
) -> float:
    """Relative gain in reward of the greedy policy over its prior's own choices, in the very same states.

    Each argument has an array for each number of replicas that decisions were made among. Where several actions are
    equally good in the eyes of either, each counts equally.
    """
    for parts in zip(action_rewards, logits, prior_logits, strict=True):
        if len({part.shape for part in parts}) > 1:
            shapes = " and ".join(str(part.shape) for part in parts)
            raise ValueError(f"action_rewards, logits and prior_logits must be of one shape, got {shapes}")
    own, prior = (
        float(np.mean(np.concatenate([reward_of_best(*pair) for pair in zip(action_rewards, scores, strict=True)])))
        for scores in (logits, prior_logits)
    )
    return (own - prior) / max(abs(prior), 1e-12)


def reward_of_best(action_rewards: FloatArray, scores: NDArray[np.floating]) -> FloatArray:
    """Of every decision the reward of the action with the highest score; of several such actions, their mean."""
    is_best = scores == scores.max(axis=1, keepdims=True)
    rewards: FloatArray = (action_rewards * is_best).sum(axis=1) / is_best.sum(axis=1)
    return rewards


def explained_variance(predictions: FloatArray, targets: FloatArray) -> float:
    """1 - Var(target - prediction) / Var(target): 1 is perfect, 0 a constant's; NaN if targets are constant."""
    variance = float(np.var(targets))
    return float("nan") if variance == 0 else 1.0 - float(np.var(targets - predictions)) / variance
