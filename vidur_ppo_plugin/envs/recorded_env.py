"""`vidur_ppo/Recorded-v0`: the decisions of a real router, one after the other, for policies of any library.

Nothing is simulated: what would have come of another action is not known. A step's reward is minus the recorded cost,
weighted by the inverse of the recorded probability if the action is the recorded one, and 0 if not: its mean over an
episode estimates the mean of a policy without bias (Horvitz & Thompson 1952). `info` has all it takes for better
estimators.
"""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from vidur_ppo_plugin.hardware.reference import CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.learn.off_policy import LoggedDecisions, with_costs
from vidur_ppo_plugin.record.decision_log import read_record
from vidur_ppo_plugin.routing.delay_model import DelayModel

from .observations import Observation, ObservationMaker
from .settings import ppo_flags


class RecordedEnv(gymnasium.Env[Observation, np.int64]):
    """Steps through a record; observations are those of `RoutingEnv`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(
        self,
        record: str | Path,
        *,
        cost: str = "latency_s",
        flatten: bool = False,
        render_mode: str | None = None,
        **flags: Any,
    ) -> None:
        """`cost`: latency_s or ttft_s. `flags`: those of the observation, as for `RoutingEnv`.

        Only decisions among the usual number of backends are shown: an environment has one action space.
        """
        if render_mode is not None:
            raise ValueError(f"render_mode must be None, there is nothing to draw, got {render_mode!r}")
        self.render_mode = None
        self._logged, size = _of_one_size(with_costs(read_record(Path(record)), cost))
        delay_model = DelayModel.from_roofline(reference_roofline(), CHUNK_SIZE)
        self._observer = ObservationMaker(ppo_flags(flags), size, delay_model, flatten=flatten)
        self.observation_space = self._observer.space
        self.action_space = spaces.Discrete(size)
        self._index = len(self._logged)

    def __len__(self) -> int:
        return len(self._logged)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin with the first decision."""
        super().reset(seed=seed)
        self._index = 0
        self._observer.reset()
        return self._observe(), {"action_mask": self.action_masks().astype(np.int8)}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """What the recorded outcome is worth for this action, and the next decision."""
        if self._index >= len(self._logged):
            raise RuntimeError("the episode is over, or none has begun: call reset() first")
        if not self.action_space.contains(action):
            raise ValueError(f"action must be a replica in 0 ... {self.action_space.n - 1}, got {action!r}")  # type: ignore[attr-defined]
        decision, cost = self._logged.decisions[self._index], float(self._logged.costs[self._index])
        is_recorded = int(action) == decision.action
        info: dict[str, Any] = {
            "recorded_action": decision.action,
            "recorded_probability": decision.probability,
            "recorded_cost": cost,
            "is_recorded_action": is_recorded,
        }
        self._index += 1
        is_over = self._index >= len(self._logged)
        observation = self._observer.nothing() if is_over else self._observe()
        info["action_mask"] = self.action_masks().astype(np.int8)
        return observation, -cost / decision.probability if is_recorded else 0.0, is_over, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which backends took requests, as sb3-contrib's MaskablePPO asks for it."""
        index = min(self._index, len(self._logged) - 1)
        available = self._logged.decisions[index].snapshot.available
        size = self._logged.decisions[index].snapshot.num_replicas
        return np.ones(size, np.bool_) if available is None else available.copy()

    def _observe(self) -> Observation:
        decision = self._logged.decisions[self._index]
        snapshot = decision.snapshot.showing(self._observer.features.num_waiting_slots)
        return self._observer.observe(snapshot, decision.request)


def _of_one_size(logged: LoggedDecisions) -> tuple[LoggedDecisions, int]:
    sizes = np.array([decision.snapshot.num_replicas for decision in logged.decisions])
    size = int(np.bincount(sizes).argmax())
    kept = np.flatnonzero(sizes == size)
    return LoggedDecisions(tuple(logged.decisions[index] for index in kept), logged.costs[kept]), size
