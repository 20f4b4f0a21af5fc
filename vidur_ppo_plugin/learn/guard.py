"""Learning on from a loaded policy must not lose what it can: every so often the present one is put to a trial.

The trial is a replay of the latest requests in a twin of the cluster, with the present weights and with the best so far
(at first the loaded ones), both greedy: what each would have made of the very same traffic. The better weights are the
best from then on; weights that are worse are given up for the best. Where no twin covers the cluster, the gain in
credit over the loaded policy, in the states of the rollouts, is judged instead.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .agent import Agent

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
Network = dict[str, Any]
#: Latencies of the latest requests, in order of arrival, had a network routed them greedily; None if they are too few.
Replay = Callable[[Network], FloatArray | None]

# Stretches of requests that a trial is cut into: their spread tells how sure it is.
_NUM_STRETCHES = 8
# Share of the requests, the slowest, whose mean stands for the tail.
_TAIL_SHARE = 0.05
# The replica queues of a replay are empty at first: this share of its requests is not judged.
_WARM_UP_SHARE = 0.125
# Standard errors beyond which a difference is not noise: a wrong step back costs little, a wrong step forward stays.
_SURE_WORSE, _SURE_BETTER = 1.0, 2.0


@dataclass(frozen=True)
class Verdict:
    """Relative change of a policy against another, below 0 if it is better, and the standard error of that.

    `worst` is the larger of the changes that `change` weighs: no gain makes up for a loss elsewhere.
    """

    change: float
    error: float
    worst: float

    def is_worse(self, tolerance: float) -> bool:
        """Beyond noise, or so much that it is not waited for to be sure."""
        return self.change > max(0.0, _SURE_WORSE * self.error) or self.worst > tolerance

    def is_better(self, tolerance: float) -> bool:
        """Beyond noise, and nowhere worse than is borne."""
        return self.change < min(0.0, -_SURE_BETTER * self.error) and self.worst <= tolerance


def judge(ours_s: FloatArray, theirs_s: FloatArray, tail_preference: float) -> Verdict:
    """Latencies of the same requests: the change of their mean and of their slowest, weighed by the preference."""
    first = int(_WARM_UP_SHARE * len(ours_s))
    pairs = zip(
        np.array_split(ours_s[first:], _NUM_STRETCHES), np.array_split(theirs_s[first:], _NUM_STRETCHES), strict=True
    )
    changes = np.array(
        [(ours.mean() / theirs.mean() - 1.0, _slowest(ours) / _slowest(theirs) - 1.0) for ours, theirs in pairs]
    )
    weighed = changes @ (1.0 - tail_preference, tail_preference)
    return _verdict(weighed.tolist(), worst=float(changes.mean(axis=0).max()))


def _slowest(latencies_s: FloatArray) -> float:
    count = max(1, round(_TAIL_SHARE * len(latencies_s)))
    return float(np.partition(latencies_s, -count)[-count:].mean())


def _verdict(changes: list[float], worst: float | None = None) -> Verdict:
    change = float(np.mean(changes))
    error = float(np.std(changes, ddof=1)) / math.sqrt(len(changes)) if len(changes) > 1 else math.inf
    return Verdict(change, error, change if worst is None else worst)


@dataclass
class PolicyGuard:
    """Keeps the best weights and goes back to them."""

    agent: Agent
    #: None where there is no twin.
    replay: Replay | None
    #: Updates between trials.
    interval: int
    #: Loss in the mean or in the tail that is borne although it may be noise.
    tolerance: float
    tail_preference: float
    best: Network = field(default_factory=dict)
    num_reverts: int = 0
    _gains: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """What was loaded is the best so far."""
        if not self.best:
            self.best = self._present()

    def _present(self) -> Network:
        return {name: tensor.clone() for name, tensor in self.agent.ppo.network.state_dict().items()}

    def after_update(self, gain_over_loaded: float | None) -> dict[str, float]:
        """Judge if it is time; what is recorded of it. The open rollout must be empty."""
        if gain_over_loaded is not None:
            self._gains.append(gain_over_loaded)
        row = {"guard_reverts": float(self.num_reverts)}
        if self.agent.ppo.num_updates % self.interval:
            return row
        return self._trial() | {"guard_reverts": float(self.num_reverts)}

    def finish(self) -> None:
        """The run is over: what is saved is the best, unless the present weights have proved better."""
        verdict = self._judge()
        if verdict is None or not verdict.is_better(self.tolerance):
            self._revert()
        else:
            self.best = self._present()

    def _trial(self) -> dict[str, float]:
        verdict = self._judge()
        if verdict is None:
            return {}
        if self.replay is not None and verdict.is_better(self.tolerance):
            self.best = self._present()
        elif verdict.is_worse(self.tolerance):
            self._revert()
            self.num_reverts += 1
            logger.info(
                "the policy was %+.2f %% +- %.2f %% against the best so far, which takes its place again",
                100 * verdict.change,
                100 * verdict.error,
            )
        return {"guard_change": verdict.change}

    def _judge(self) -> Verdict | None:
        """The present policy against the best; None where nothing is known yet."""
        gains, self._gains = self._gains, []
        if self.replay is None:
            return _verdict([-gain for gain in gains]) if gains else None
        ours = self.replay(self._present())
        theirs = None if ours is None else self.replay(self.best)
        return None if ours is None or theirs is None else judge(ours, theirs, self.tail_preference)

    def _revert(self) -> None:
        self.agent.restore_policy(self.best)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "num_reverts": self.num_reverts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.best, self.num_reverts = dict(state["best"]), state["num_reverts"]
