"""Credit that sees those who come later: every choice is tried out with the same future, and rewarded for it.

For the next request of each cluster, copies of the cluster place it on one replica each; then the policy goes on with
the requests that come next, the same ones in every copy, and in the end everybody is served to the last token. What the
copies differ in is what the placement did: to the request itself, to those in flight, and to those who came later,
under the policy as it is. (Schulman et al. 2015, "Trust Region Policy Optimization", section 5.2, call this the vine.)
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vidur_ppo_plugin.flags import flag
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin

#: What is summed up over requests, in this order.
COSTS = ("latency", "latency squared", "time to first token", "time to first token squared")
# Most that a replica's reward may differ from the mean of all, in standard deviations. Single futures in which
# everything goes wrong would otherwise outweigh thousands of usual ones.
_MOST = 10.0
# Keeps rewards finite where all replicas are alike.
_EPSILON = 1e-9


# --- What each placement leads to ---


@dataclass(frozen=True)
class Prospects:
    """Sums of COSTS over everybody in sight: [clusters, replicas, costs]; and how many they are, of each cluster."""

    sums: FloatArray
    num_requests: FloatArray

    @property
    def means(self) -> FloatArray:
        """The mean of each cost over requests and replicas: [clusters, costs]."""
        means: FloatArray = self.sums.mean(axis=1) / self.num_requests[:, None]
        return means


def look_ahead(twin: PolicyTwin, actor: Actor, num_later: int, rng: np.random.Generator) -> Prospects:
    """The prospects of the next request of every cluster, on every replica, with the `num_later` that follow it.

    Every cluster must have a next request. The generator breaks ties of the policy, alike in all copies of a cluster.
    """
    if twin.is_done.any():
        raise ValueError(f"clusters {np.flatnonzero(twin.is_done).tolist()} have no next request to place")
    size, num_replicas, steps = twin.num_clusters, twin.num_replicas, num_later + 1
    forced = np.full((size * num_replicas, steps), -1)
    forced[:, 0] = np.tile(np.arange(num_replicas), size)
    future = twin.fork(np.repeat(np.arange(size), num_replicas))
    future.play(actor, steps, uniforms=np.repeat(rng.random((size, steps, 2)), num_replicas, axis=0), forced=forced)
    future.drain()
    copies, served = future.completions()
    latency_s = served.completed_at_s - served.arrived_at_s
    first_token_s = served.first_token_at_s - served.arrived_at_s
    columns = (latency_s, latency_s**2, first_token_s, first_token_s**2)
    num_copies = size * num_replicas
    sums: FloatArray = np.stack([np.bincount(copies, column, num_copies) for column in columns], axis=-1)
    counts = np.bincount(copies, minlength=num_copies).reshape(size, num_replicas)
    return Prospects(sums.reshape(size, num_replicas, len(COSTS)), counts[:, 0].astype(np.float64))


# --- What it is worth ---


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
        """The weight of each of `COSTS` and, last, of marginal delay, with a sum of 1: [clusters, costs]."""
        ends = np.array(
            [self.latency, self.latency_squared, self.first_token, self.first_token_squared, self.marginal_delay]
        )
        weights = _between(ends, tail_preferences)
        scaled: FloatArray = weights / weights.sum(axis=1, keepdims=True)
        return scaled

    def rewards(
        self, prospects: Sequence[Prospects], marginal_s: FloatArray, tail_preferences: Sequence[float]
    ) -> FloatArray:
        """What `rewards` gives by these weights, times the boldness of each cluster."""
        # A factor: half-way between 4 and 1 is 2.
        boldness = np.exp(_between(np.log([self.boldness]), tail_preferences))
        scaled: FloatArray = boldness[:, :, None] * rewards(prospects, marginal_s, self.weights(tail_preferences))
        return scaled


def _between(ends: FloatArray, tail_preferences: Sequence[float]) -> FloatArray:
    """What lies between the values at tail preference 0 and at 1, [values, 2]: [clusters, values]."""
    found: FloatArray = ends[:, 0] + np.array(tail_preferences)[:, None] * (ends[:, 1] - ends[:, 0])
    return found


def rewards(prospects: Sequence[Prospects], marginal_s: FloatArray, weights: FloatArray) -> FloatArray:
    """Rewards of every replica in each of several decisions: [clusters, decisions, replicas], like the marginal delays.

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
