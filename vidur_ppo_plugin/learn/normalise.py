"""Running mean and variance of a stream, for normalising rewards and value targets."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RunningMoments:
    """Mean and variance of everything seen so far (Chan et al. 1979, parallel update)."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._sum_of_squares = 0.0

    def update(self, values: NDArray[np.float64]) -> None:
        """Add a batch of values; ValueError if one is not finite."""
        if not np.all(np.isfinite(values)):
            raise ValueError(f"running moments got a value that is not finite: {values[~np.isfinite(values)][0]}")
        size = float(len(values))
        if size == 0:
            return
        batch_mean = float(values.mean())
        delta = batch_mean - self.mean
        total = self.count + size
        self.mean += delta * size / total
        self._sum_of_squares += float(((values - batch_mean) ** 2).sum()) + delta * delta * self.count * size / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation; 1 before two different values were seen, so that dividing by it is harmless."""
        variance = self._sum_of_squares / self.count if self.count > 0 else 0.0
        return math.sqrt(variance) if variance > 1e-12 else 1.0

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self._sum_of_squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave."""
        self.count, self.mean = state["count"], state["mean"]
        self._sum_of_squares = state["sum_of_squares"]


class RewardNormaliser:
    """Divides rewards by the running standard deviation of their discounted sum (Engstrom et al. 2020, section 3).

    Only the scale changes, never the sign or the zero. Several streams share the scale; each has its own sum.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._discounted_sums: dict[int, float] = {}
        self._moments = RunningMoments()

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add a rollout's rewards, in order, to the statistics and return them scaled."""
        self.observe(rewards)
        return self.scaled(rewards)

    def observe(self, rewards: NDArray[np.float64], stream: int = 0) -> None:
        """Add the rewards of a stream's rollout, in order, to the statistics."""
        if self._gamma == 0.0:  # a sum is the reward itself
            self._moments.update(rewards)
            return
        sums, discounted_sum = np.empty(len(rewards)), self._discounted_sums.get(stream, 0.0)
        for index, reward in enumerate(rewards):
            discounted_sum = self._gamma * discounted_sum + float(reward)
            sums[index] = discounted_sum
        self._discounted_sums[stream] = discounted_sum
        self._moments.update(sums)

    @property
    def scale(self) -> float:
        """What rewards are multiplied with, by what was observed so far."""
        return 1.0 / self._moments.std

    def scaled(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rewards by that scale."""
        return rewards * self.scale

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"discounted_sums": dict(self._discounted_sums), **self._moments.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._discounted_sums = dict(state["discounted_sums"])
        self._moments.load_state_dict(state)
