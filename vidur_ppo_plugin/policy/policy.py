"""A policy: features, prior and actor, which together are a router like any other.

Snapshot and request in, replica out: observe, mask, logits, choose. Whoever learns samples with a temperature; whoever
does not takes the best replica, ties broken by seed. It needs torch only where the network has attention.
"""

import math
import random
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable, Float32Array, Observation
from vidur_ppo_plugin.routing.heuristics import choose
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.routers import Scored
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from .actor import Actor

#: Logit of a replica that must not be chosen: finite, so that arithmetic stays finite; nothing comes near it.
MASKED = np.float32(-1e9)


class Logits(Protocol):
    """What scores replicas: `actor.Actor`, or a network with attention in torch."""

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of the network, as plain values."""

    def logits(self, replicas: Float32Array, request: Float32Array, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica."""


class Observed(NamedTuple):
    """What a policy sees at a decision."""

    observation: Observation
    #: Those that must not be chosen have `MASKED`.
    prior_logits: Float32Array
    #: The replicas that these are of; None: all of them.
    chosen: NDArray[np.intp] | None


class Observer:
    """Features and prior, decision after decision of one run."""

    def __init__(self, features: FeatureTable, prior: Prior) -> None:
        self.features = features
        self.prior = prior

    def observe(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Observed:
        """The observation of all replicas; advances the trends."""
        snapshot = snapshot.showing(self.features.num_waiting_slots)
        logits = masked(self.prior.logits(self.prior.cost(snapshot, request)), snapshot.available)
        return Observed(self.features.observe(snapshot, request), logits, None)

    def reset(self) -> None:
        """Forget the trends: a run begins, or the replicas are others than before."""
        self.features.reset()


class Policy(Observer):
    """A router that is learned: features, prior and actor."""

    def __init__(
        self,
        actor: Logits,
        features: FeatureTable,
        prior: Prior,
        rng: random.Random,
        *,
        max_candidates: int = 0,
        source: str = "the policy",
    ) -> None:
        """`max_candidates`: so many replicas are scored, the prior's choice among them; 0: all.

        `source`: what errors call it.
        """
        super().__init__(features, prior)
        self.actor = actor
        self.rng = rng
        self._max_candidates = max_candidates
        self._source = source

    @classmethod
    def load(
        cls, path: Path, *, rng: random.Random, delay_model: DelayModel, tail_preference: float | None = None
    ) -> "Policy":
        """A policy from an .npz file that `vidur-ppo export` wrote; ValueError naming it if it cannot be used.

        `tail_preference`: what the policy is asked for, from 0 (the mean) to 1 (the tail); None for the usual.
        """
        actor, metadata = Actor.load(path)
        missing = [key for key in ("features", "feature_hash", "prior", "prior_weight") if key not in metadata]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}: export the checkpoint anew with `vidur-ppo export`")
        features = features_of(metadata, str(path), tail_preference)
        prior = Prior(metadata["prior"], weight=metadata["prior_weight"], delay_model=delay_model)
        return cls(actor, features, prior, rng, source=str(path))

    @property
    def num_waiting_slots(self) -> int:
        """How many waiting requests of each replica the policy wants to see."""
        return self.features.num_waiting_slots

    @property
    def num_replicas(self) -> int:
        """The only number of replicas that the policy can decide for; 0 for any."""
        return int(self.actor.shape["flat_replicas"])

    def observe(
        self, snapshot: ClusterSnapshot, request: RequestInfo, allowed: NDArray[np.bool_] | None = None
    ) -> Observed:
        """The policy's observation of all replicas or of the candidates; `allowed`: who may be chosen, None for all."""
        snapshot = snapshot.showing(self.num_waiting_slots)
        cost = self.prior.cost(snapshot, request)
        if snapshot.available is not None:
            allowed = snapshot.available if allowed is None else _both(allowed, snapshot.available)
        logits = masked(self.prior.logits(cost), allowed)
        chosen = self._candidates(cost, snapshot.num_replicas)
        observation = self.features.observe(snapshot, request, chosen)
        return Observed(observation, logits if chosen is None else logits[chosen], chosen)

    def _candidates(self, cost: NDArray[np.float64], num_replicas: int) -> NDArray[np.intp] | None:
        """A seeded sample of replicas, the heuristic's choice always among them; None for all."""
        size = self._max_candidates
        if size == 0 or num_replicas <= size:
            return None
        best = choose(cost, self.rng)
        sample = self.rng.sample(range(num_replicas), size)
        if best not in sample:
            sample[0] = best
        return np.array(sample, dtype=np.intp)

    def logits(self, observation: Observation, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica; FloatingPointError if one is not finite."""
        logits = self.actor.logits(observation.replicas, observation.request, prior_logits)
        if not math.isfinite(sum(logits.tolist())):
            names = _non_finite_features(self.features, observation) or "finite"
            raise FloatingPointError(
                f"the logits of {self._source} are not finite: {logits.tolist()}; features: {names}"
            )
        return logits

    def best(self, logits: list[float]) -> int:
        """Index of the largest logit; of several equal ones each is equally likely."""
        highest = max(logits)
        if logits.count(highest) == 1:
            return logits.index(highest)
        ties = [index for index, logit in enumerate(logits) if logit == highest]
        return ties[self.rng.randrange(len(ties))]

    def sample(self, logits: list[float], temperature: float, epsilon: float) -> int:
        """Draw from softmax(logits / temperature), or uniformly with probability epsilon."""
        if epsilon and self.rng.random() < epsilon:
            return self.rng.randrange(len(logits))
        highest, exp = max(logits), math.exp
        cumulative = list(accumulate([exp((logit - highest) / temperature) for logit in logits]))
        return min(bisect(cumulative, self.rng.random() * cumulative[-1]), len(logits) - 1)

    def scored(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Scored:
        """The best replica, and the logits that it was chosen by: of those that are not candidates, minus infinity."""
        observation, prior_logits, chosen = self.observe(snapshot, request)
        logits = self.logits(observation, prior_logits)
        action = self.best(logits.tolist())
        if chosen is None:
            return Scored(action, logits.astype(np.float64))
        scores = np.full(snapshot.num_replicas, -np.inf)
        scores[chosen] = logits
        return Scored(int(chosen[action]), scores)

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        observation, prior_logits, chosen = self.observe(snapshot, request)
        action = self.best(self.logits(observation, prior_logits).tolist())
        return action if chosen is None else int(chosen[action])


def masked(logits: Float32Array, allowed: NDArray[np.bool_] | None) -> Float32Array:
    """The prior's logits, with `MASKED` for replicas that must not be chosen."""
    return logits if allowed is None else np.where(allowed, logits, MASKED)


def features_of(metadata: dict[str, Any], source: str, tail_preference: float | None = None) -> FeatureTable:
    """The features that a policy was learned with; ValueError naming it if this version computes others."""
    table = FeatureTable.of(metadata["features"], tail_preference)
    if table.hash != metadata["feature_hash"]:
        raise ValueError(
            f"{source} was learned with other features ({metadata['feature_hash']}) than this version computes "
            f"({table.hash})"
        )
    return table


def _both(allowed: NDArray[np.bool_], available: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Replicas that are both allowed and available; if there are none, those that are available."""
    both = allowed & available
    return both if both.any() else available


def _non_finite_features(features: FeatureTable, observation: Observation) -> list[str]:
    replica = [
        f"{features.replica_features[column].name} of replica {row}"
        for row, column in np.argwhere(~np.isfinite(observation.replicas))
    ]
    request = [features.request_features[index].name for (index,) in np.argwhere(~np.isfinite(observation.request))]
    return replica + request
