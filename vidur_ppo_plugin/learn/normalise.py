"""Mean and variance of what was seen so far, for normalising rewards, advantages and value targets."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Below it a variance is rounding: nothing is divided by its root.
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of some values; those of two sets add up (Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    sum_of_squares: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Moments":
        """The moments of an array; ValueError if a value is not finite."""
        if not np.all(np.isfinite(values)):
            raise ValueError(f"moments of a value that is not finite: {values[~np.isfinite(values)][0]}")
        if len(values) == 0:
            return cls()
        mean = float(values.mean())
        return cls(float(len(values)), mean, float(((values - mean) ** 2).sum()))

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of both sets together."""
        if other.count == 0:
            return self
        delta, total = other.mean - self.mean, self.count + other.count
        between = delta * delta * self.count * other.count / total
        return Moments(
            count=total,
            mean=self.mean + delta * other.count / total,
            sum_of_squares=self.sum_of_squares + (other.sum_of_squares + between),
        )

    @property
    def variance(self) -> float:
        """Mean squared deviation; 0 of nothing."""
        return self.sum_of_squares / self.count if self.count > 0 else 0.0

    @property
    def scale(self) -> float:
        """Standard deviation; 1 before two different values were seen, so that dividing by it is harmless."""
        return math.sqrt(self.variance) if self.variance > _LEAST_VARIANCE else 1.0

    def state_dict(self) -> dict[str, float]:
        """Plain values, for a checkpoint."""
        return asdict(self)


class RewardNormaliser:
    """Divides rewards by the running standard deviation of their discounted sum (Engstrom et al. 2020, section 3).

    Only the scale changes, never the sign or the zero. Several streams share the scale; each has its own sum.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._discounted_sums: dict[int, float] = {}
        self._moments = Moments()

    def observe(self, rewards: NDArray[np.float64], stream: int = 0) -> None:
        """Add the rewards of a stream's rollout, in order, to the statistics."""
        if self._gamma == 0.0:  # a sum is the reward itself
            self._moments += Moments.of(rewards)
            return
        sums, discounted_sum = np.empty(len(rewards)), self._discounted_sums.get(stream, 0.0)
        for index, reward in enumerate(rewards):
            discounted_sum = self._gamma * discounted_sum + float(reward)
            sums[index] = discounted_sum
        self._discounted_sums[stream] = discounted_sum
        self._moments += Moments.of(sums)

    @property
    def factor(self) -> float:
        """The factor that rewards are multiplied by, from what was observed so far."""
        return 1.0 / self._moments.scale

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, for a checkpoint."""
        return {"discounted_sums": dict(self._discounted_sums), **self._moments.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        moments = dict(state)
        self._discounted_sums = dict(moments.pop("discounted_sums"))
        self._moments = Moments(**moments)
