"""Credit that sees those who come later: what each replica would have led to, as a reward."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vidur_ppo_plugin.flags import flag
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.look_ahead import Prospects

# Most that a replica's reward may differ from the mean of all, in standard deviations. Single futures in which
# everything goes wrong would otherwise outweigh thousands of usual ones.
_MOST = 10.0
# Keeps rewards finite where all replicas are alike.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """How far decisions are followed, and what counts; weights are given at tail preference 0 and at 1."""

    requests_per_replica: int = flag(
        0,
        "Requests that arrive after a decision and are served as the policy would, for each replica; 0 for marginal "
        "delay, as if nobody came. Raise it if what counts shows late, lower it for speed and less noise.",
        low=0,
        high=10_000,
    )
    every: int = flag(
        8, "Decisions of a cluster from one that is learned from to the next. Lower it if collecting is cheap.", low=1
    )
    latency: tuple[float, ...] = flag([1.0, 1.0], "Weight of the mean latency.", low=0)
    latency_squared: tuple[float, ...] = flag([0.0, 0.5], "Weight of the mean squared latency.", low=0)
    first_token: tuple[float, ...] = flag([0.05, 0.5], "Weight of the mean time to first token.", low=0)
    first_token_squared: tuple[float, ...] = flag([0.0, 1.6], "Weight of its mean square.", low=0)
    marginal_delay: tuple[float, ...] = flag(
        [0.0, 0.0],
        "Weight of what a placement adds to the latency of everybody in flight if nobody came (with "
        "policy.backlog_weight): it has no noise, and sees nobody who comes later.",
        low=0,
    )
    boldness: tuple[float, ...] = flag(
        [1.0, 1.0],
        "How much differences between replicas count against policy.kl_ref_coef. Raise it where there is much to win, "
        "lower it where the policy had better stay with its prior.",
        above=0,
    )

    @property
    def is_on(self) -> bool:
        """Whether credit comes from looking ahead."""
        return self.requests_per_replica > 0

    @property
    def weighed(self) -> dict[str, tuple[float, ...]]:
        """What is given at tail preference 0 and at 1, by name: a part of the mixture may have its own."""
        names = [item.name for item in dataclasses.fields(self) if item.name not in ("requests_per_replica", "every")]
        return {name: getattr(self, name) for name in names}

    def weights(self, tail_preferences: Sequence[float]) -> FloatArray:
        """Of each of `twin.look_ahead.COSTS`, and of marginal delay, with a sum of 1: [clusters, costs]."""
        ends = np.array(
            [self.latency, self.latency_squared, self.first_token, self.first_token_squared, self.marginal_delay]
        )
        weights = _between(ends, tail_preferences)
        scaled: FloatArray = weights / weights.sum(axis=1, keepdims=True)
        return scaled

    def rewards(
        self, prospects: Sequence[Prospects], marginal_s: FloatArray, tail_preferences: Sequence[float]
    ) -> FloatArray:
        """Of every replica in each of several decisions, as `rewards` has them, with the boldness of each cluster."""
        # A factor: half-way between 4 and 1 is 2.
        boldness = np.exp(_between(np.log([self.boldness]), tail_preferences))
        scaled: FloatArray = boldness[:, :, None] * rewards(prospects, marginal_s, self.weights(tail_preferences))
        return scaled


def _between(ends: FloatArray, tail_preferences: Sequence[float]) -> FloatArray:
    """Values between those at tail preference 0 and at 1, [values, 2]; [clusters, values]."""
    found: FloatArray = ends[:, 0] + np.array(tail_preferences)[:, None] * (ends[:, 1] - ends[:, 0])
    return found


def rewards(prospects: Sequence[Prospects], marginal_s: FloatArray, weights: FloatArray) -> FloatArray:
    """Of every replica in each of several decisions: [clusters, decisions, replicas], as the marginal delays are.

    Minus the weighted sum of all costs over everybody in sight, each relative to its mean in this cluster over the
    decisions; then the differences between replicas in standard deviations of them in this cluster. Futures near
    saturation differ by far more than others, mostly by chance: every cluster has the same say.
    """
    means = np.mean([one.means for one in prospects], axis=0)
    relative = weights[:, :-1] / means
    costs = np.stack([np.einsum("crk,ck->cr", one.sums, relative) for one in prospects], axis=1)
    costs += (weights[:, -1] / means[:, 0])[:, None, None] * marginal_s
    centre = costs.mean(axis=2, keepdims=True)
    apart = costs - centre
    spread = np.sqrt(np.square(apart).mean(axis=(1, 2), keepdims=True)) + _EPSILON
    every: FloatArray = -(centre + np.clip(apart / spread, -_MOST, _MOST))
    return every
