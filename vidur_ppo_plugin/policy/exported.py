"""A learned policy from a file that `vidur-ppo export` wrote: the agent's greedy decisions, without torch."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable, Float32Array
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.routers import Scored
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from . import greedy
from .compiled_actor import CompiledActor
from .numpy_actor import NumpyActor


class ExportedPolicy:
    """A router: snapshot and request in, replica out; the same placements as `ppo_modular` makes in inference."""

    def __init__(
        self,
        actor: NumpyActor,
        metadata: dict[str, Any],
        *,
        rng: random.Random,
        delay_model: DelayModel,
        source: str,
        tail_preference: float | None = None,
    ) -> None:
        """`tail_preference`: what the policy is asked for, from 0 (the mean) to 1 (the tail); None for the usual."""
        self.source = source
        self.metadata = metadata
        self.features = _feature_table(metadata, source, tail_preference)
        self.rng = rng
        self._actor = actor
        self._prior = Prior(metadata["prior"], weight=metadata["prior_weight"], delay_model=delay_model)

    @classmethod
    def load(
        cls, path: Path, *, rng: random.Random, delay_model: DelayModel, tail_preference: float | None = None
    ) -> "ExportedPolicy":
        """From an .npz file; ValueError naming it if it cannot be used."""
        actor, metadata = NumpyActor.load(path)
        if not actor.shape["flat_replicas"]:
            actor = CompiledActor(actor.weights, actor.shape)
        missing = [key for key in ("features", "feature_hash", "prior", "prior_weight") if key not in metadata]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}: export the checkpoint anew with `vidur-ppo export`")
        return cls(actor, metadata, rng=rng, delay_model=delay_model, source=str(path), tail_preference=tail_preference)

    @property
    def num_waiting_slots(self) -> int:
        """How many waiting requests of each replica the policy wants to see."""
        return self.features.num_waiting_slots

    @property
    def num_replicas(self) -> int:
        """The only number of replicas that the policy can decide for; 0 for any."""
        return int(self._actor.shape["flat_replicas"])

    def logits(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Float32Array:
        """One logit a replica; FloatingPointError if one is not finite. Advances the trends of the features."""
        snapshot = snapshot.showing(self.num_waiting_slots)
        prior_logits = self._prior.logits(self._prior.cost(snapshot, request))
        observation = self.features.observe(snapshot, request)
        logits = self._actor.logits(
            observation.replicas, observation.request, greedy.masked(prior_logits, snapshot.available)
        )
        return logits

    def scored(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Scored:
        """The replica, and the logits that it was chosen by."""
        logits = self.logits(snapshot, request)
        values: list[float] = logits.tolist()
        if not math.isfinite(sum(values)):
            raise FloatingPointError(f"the logits of {self.source} are not finite: {values}")
        return Scored(greedy.best(values, self.rng), logits.astype(np.float64))

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        return self.scored(snapshot, request).replica

    def reset(self) -> None:
        """Forget the trends: the replicas are others than before."""
        self.features.reset()


def _feature_table(metadata: dict[str, Any], source: str, tail_preference: float | None) -> FeatureTable:
    definition = metadata["features"]
    given = {} if tail_preference is None else {"tail_preference": tail_preference}
    table = FeatureTable(
        num_waiting_slots=definition["num_waiting_slots"],
        trend_window=definition["trend_window"],
        scales=FeatureScales(**definition["scales"]),
        **given,
    )
    if table.hash != metadata["feature_hash"]:
        raise ValueError(
            f"{source} was learned with other features ({metadata['feature_hash']}) than this version computes "
            f"({table.hash})"
        )
    return table
