"""Observations: the features of `ppo_modular`, its prior's logits, and which replicas take requests."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.features import build_features, build_prior
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import Float32Array
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.twin.vector import VectorObservation

Parts: TypeAlias = dict[str, Float32Array]
Observation: TypeAlias = Parts | Float32Array

# Features are logarithms of scaled figures, differences of those, or fractions: none comes near this.
_MOST_LOG = 100.0


class ObservationMaker:
    """Turns what a router sees into observations, and knows their space."""

    def __init__(self, flags: PPOModularFlags, num_replicas: int, delay_model: DelayModel, *, flatten: bool) -> None:
        """`flatten`: one vector instead of a dict of arrays."""
        self.features = build_features(flags)
        self._prior = build_prior(flags, delay_model)
        self._num_replicas = num_replicas
        self._flatten = flatten
        table, most = self.features, float(np.finfo(np.float32).max)
        boxes = {
            "replicas": spaces.Box(-_MOST_LOG, _MOST_LOG, (num_replicas, table.num_replica_features), np.float32),
            "request": spaces.Box(-_MOST_LOG, _MOST_LOG, (table.num_request_features,), np.float32),
            "prior": spaces.Box(-most, 0.0, (num_replicas,), np.float32),
            "available": spaces.Box(0.0, 1.0, (num_replicas,), np.float32),
        }
        self._parts = spaces.Dict(boxes)  # type: ignore[arg-type]  # a dict is invariant in what it holds
        self.space: spaces.Space[Any] = self._parts
        if flatten:
            low, high = (
                np.concatenate([getattr(box, side).ravel() for box in boxes.values()]) for side in ("low", "high")
            )
            self.space = spaces.Box(low, high, dtype=np.float32)

    def reset(self) -> None:
        """A new episode begins: trends start anew."""
        self.features.reset()

    def observe(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Observation:
        """The observation of one decision; advances the trends."""
        observation = self.features.observe(snapshot, request)
        available = np.ones(self._num_replicas, np.float32)
        if snapshot.available is not None:
            available[~snapshot.available] = 0.0
        return self._joined(
            {
                "replicas": observation.replicas,
                "request": observation.request,
                "prior": self._prior.logits(self._prior.cost(snapshot, request)),
                "available": available,
            }
        )

    @property
    def sees_many(self) -> bool:
        """Whether `observe_many` works: the prior is one that the twin computes along with the features."""
        return self._prior.name in ("least_tokens", "none")

    def observe_many(self, seen: VectorObservation, available: NDArray[np.bool_]) -> Observation:
        """The observations of many clusters at once, whose features the twin has computed."""
        cost = seen.token_load if self._prior.name == "least_tokens" else np.zeros_like(seen.token_load)
        parts = {
            "replicas": seen.replicas.copy(),
            "request": seen.request.copy(),
            "prior": np.ascontiguousarray(self._prior.logits(cost)),
            "available": available.astype(np.float32),
        }
        if not self._flatten:
            return parts
        joined: Float32Array = np.concatenate([part.reshape(len(part), -1) for part in parts.values()], axis=1)
        return joined

    def nothing(self) -> Observation:
        """The observation after the last decision: zeros."""
        return self._joined({name: np.zeros(box.shape or (), np.float32) for name, box in self._parts.items()})

    def _joined(self, parts: Parts) -> Observation:
        if not self._flatten:
            return parts
        joined: Float32Array = np.concatenate([part.ravel() for part in parts.values()])
        return joined


def stacked(observations: Sequence[Observation]) -> Observation:
    """Observations of several clusters as one."""
    first = observations[0]
    if isinstance(first, dict):
        return {name: np.stack([part[name] for part in observations]) for name in first}  # type: ignore[call-overload]
    together: Float32Array = np.stack(observations)  # type: ignore[arg-type]
    return together
