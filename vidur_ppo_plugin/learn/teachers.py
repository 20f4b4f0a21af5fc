"""Demonstrations: known routers decide in place of the policy, and what they do is recorded."""

import logging
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vidur_ppo_plugin.clusters.drive import Listener
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from . import demonstrations

logger = logging.getLogger(__name__)

DEMONSTRATIONS_FILE = "demonstrations.npz"


class Demonstrator(Listener):
    """A router that decides with teachers, each drawn by its share of the mixture, and keeps every decision."""

    def __init__(
        self,
        shares: Mapping[str, float],
        path: Path,
        *,
        features: FeatureTable,
        delay_model: DelayModel,
        seed: int,
        flag: str,
    ) -> None:
        """`flag` is the one that names the file, for the error if it cannot be written: now, not after the run."""
        if path.is_dir():
            raise ValueError(f"{flag} must be a file, got the directory {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._features = features
        self._priors = [Prior(name, weight=1.0, delay_model=delay_model) for name in demonstrations.PRIORS]
        self._teachers = [build_router(name, seed=seed, delay_model=delay_model) for name in shares]
        self._shares = list(shares.values())
        # Its own generator: who decides must not depend on how the one before broke ties.
        self._rng = random.Random(f"mixture {seed}")
        self._buffer = demonstrations.DemonstrationBuffer(feature_hash=features.hash, teachers=dict(shares))

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        """The replica that the teacher whose turn it is chooses; all replicas are recorded, whatever max_candidates."""
        teacher = self._teachers[0]
        if len(self._teachers) > 1:
            teacher = self._rng.choices(self._teachers, self._shares)[0]
        action = teacher(snapshot, request)
        costs = np.stack([prior.cost(snapshot, request) for prior in self._priors], axis=1)
        self._buffer.add(self._features.observe(snapshot, request), costs, action)
        return action

    def on_end(self, now_s: float, snapshot: ClusterSnapshot) -> None:
        """Write the file; nothing if there was no decision."""
        if not len(self._buffer):
            logger.warning("demonstrations: no decision was made, %s is not written", self._path)
            return
        demonstrations.save(self._buffer.collect(), self._path)
        logger.info("demonstrations: %d decisions written to %s", len(self._buffer), self._path)
