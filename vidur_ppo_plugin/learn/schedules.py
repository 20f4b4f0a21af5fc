"""Values that change while learning: by a schedule, or by the KL divergence of an update."""

import math
from dataclasses import dataclass
from typing import Any

from vidur_ppo_plugin.flags import require_value

# Where adapted values stay unless they start elsewhere: after many small updates an unbounded one takes as many to come
# back.
_LEAST_KL_COEF, _MOST_KL_COEF = 1e-3, 10.0
_LEAST_LR, _MOST_LR = 1e-5, 1e-2

KINDS = ("constant", "linear")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A value that goes from `start` to `end` over `steps` and stays there.

    linear: at an even pace; constant: `start`, whatever `end` is.
    """

    start: float
    end: float
    steps: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        """Refuse what has no value at some step."""
        require_value(self.kind in KINDS, "kind", self.kind, f"one of {', '.join(KINDS)}")
        require_value(math.isfinite(self.start), "start", self.start, "finite")
        require_value(math.isfinite(self.end), "end", self.end, "finite")
        require_value(self.steps >= 1, "steps", self.steps, ">= 1")

    def value(self, step: int) -> float:
        """The value at a step; before 0 it is `start`, from `steps` on exactly `end`."""
        if self.kind == "constant" or step <= 0:
            return self.start
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * (step / self.steps)


class KlController:
    """The coefficient of the KL penalty, adapted so that an update moves the policy by about `target_kl`.

    Schulman et al. 2017 (PPO), section 4: doubled above 1.5 x the target, halved below the target / 1.5. Bounded.
    A coefficient of 0 stays 0.
    """

    def __init__(self, *, kl_coef: float, target_kl: float) -> None:
        require_value(0.0 < target_kl < math.inf, "target_kl", target_kl, "finite and > 0 nats")
        require_value(0.0 <= kl_coef < math.inf, "kl_coef", kl_coef, "finite and >= 0 (off)")
        self._target_kl = target_kl
        self._bounds = min(_LEAST_KL_COEF, kl_coef or _LEAST_KL_COEF), max(_MOST_KL_COEF, kl_coef)
        self.kl_coef = kl_coef

    def update(self, approx_kl: float) -> float:
        """The coefficient for the next update, after one that moved the policy by `approx_kl`."""
        require_value(math.isfinite(approx_kl), "approx_kl", approx_kl, "finite")
        if self.kl_coef > 0.0:
            if approx_kl > 1.5 * self._target_kl:
                self.kl_coef = min(2.0 * self.kl_coef, self._bounds[1])
            elif approx_kl < self._target_kl / 1.5:
                self.kl_coef = max(0.5 * self.kl_coef, self._bounds[0])
        return self.kl_coef

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.kl_coef = state["kl_coef"]


class KlAdaptiveLearningRate:
    """The learning rate, lowered when an update moved the policy too far and raised when it hardly moved it.

    As in RSL-RL and Isaac (rsl_rl `algorithms/ppo.py`, schedule "adaptive"): divided by 1.5 above twice the target,
    times 1.5 below half of it. A KL of 0 or less is no update, or noise, and changes nothing.
    """

    FACTOR = 1.5

    def __init__(self, *, lr: float, target_kl: float) -> None:
        require_value(0.0 < target_kl < math.inf, "target_kl", target_kl, "finite and > 0 nats")
        require_value(0.0 < lr < math.inf, "lr", lr, "finite and > 0")
        self._target_kl = target_kl
        self._bounds = min(_LEAST_LR, lr), max(_MOST_LR, lr)
        self.lr = lr

    def update(self, approx_kl: float) -> float:
        """The learning rate for what follows, after a step that moved the policy by `approx_kl`."""
        require_value(math.isfinite(approx_kl), "approx_kl", approx_kl, "finite")
        if approx_kl > 2.0 * self._target_kl:
            self.lr = max(self.lr / self.FACTOR, self._bounds[0])
        elif 0.0 < approx_kl < 0.5 * self._target_kl:
            self.lr = min(self.lr * self.FACTOR, self._bounds[1])
        return self.lr

    def state_dict(self) -> dict[str, Any]:
        """The learning rate."""
        return {"lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.lr = state["lr"]
