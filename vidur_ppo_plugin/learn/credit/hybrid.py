"""The hybrid reward: its components, each a function, and their sum over a sliding window of completions.

To add a component, write its formula here, and a flag that weighs it, with its `HybridComponent`, in `flags/reward.py`.

Whoever drives it passes times, completions and loads. Penalties are logged as positive numbers and subtracted.
"""

import copy
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vidur_ppo_plugin.flags import (
    COMPONENT_FLAGS,
    HYBRID_COMPONENTS,
    RewardFlags,
    check_reward,
    require_value,
    validate,
)
from vidur_ppo_plugin.routing.snapshot import FloatArray

# Below these, a ratio would measure rounding or the first moments of a run rather than the policy.
_LEAST_SPAN_S = 1e-3
_LEAST_THROUGHPUT = 1e-3  # requests per second
_LEAST_RELATIVE_LATENCY = 1e-3  # of the latency threshold
# About thirty years: keeps every product finite without touching any real latency.
_LARGEST_LATENCY_S = 1e9
# Decisions that averages remember: those of the delta score and of the adaptive target, and the reference latency.
_AVERAGE_DECISIONS = 100
_REFERENCE_DECISIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What components are made of: of the sliding window, of the decisions before, and of the replicas now."""

    throughput: float  # completions per second
    latency_s: float
    target: float  # throughput that scores 1
    mean_throughput: float
    mean_latency_s: float
    reference_latency_s: float


# --- Components: a formula for each of `flags.HYBRID_COMPONENTS`, found by its name ---


def absolute_score(figures: Figures, flags: RewardFlags) -> float:
    """throughput / target - alpha * latency / latency_threshold."""
    return figures.throughput / figures.target - flags.alpha * figures.latency_s / flags.latency_threshold


def delta_score(figures: Figures, flags: RewardFlags) -> float:
    """Change of throughput minus change of latency, each relative to its moving average."""
    mean = figures.mean_throughput
    throughput_change = (figures.throughput - mean) / max(mean, _LEAST_THROUGHPUT)
    return throughput_change - _relative_change(figures.latency_s, figures.mean_latency_s, flags)


def _relative_change(latency_s: float, from_latency_s: float, flags: RewardFlags) -> float:
    least_s = _LEAST_RELATIVE_LATENCY * flags.latency_threshold
    return (latency_s - from_latency_s) / max(from_latency_s, least_s)


def logistic_penalty(figures: Figures, flags: RewardFlags) -> float:
    """kappa * [sigmoid(x) + max(x, 0)], x = (latency - latency_threshold) / sigma.

    The linear part keeps bad and terrible apart, where a sigmoid alone is flat.
    """
    x = (figures.latency_s - flags.latency_threshold) / flags.sigma
    small = math.exp(-abs(x))
    return flags.kappa * ((1.0 if x >= 0.0 else small) / (1.0 + small) + max(x, 0.0))


def latency_penalty(figures: Figures, flags: RewardFlags) -> float:
    """latency_penalty_scale * max(0, latency / latency_threshold - 1)."""
    return flags.latency_penalty_scale * max(0.0, figures.latency_s / flags.latency_threshold - 1.0)


def latency_bonus(figures: Figures, flags: RewardFlags) -> float:
    """latency_bonus_weight * max(0, 1 - latency / latency_threshold)."""
    return flags.latency_bonus_weight * max(0.0, 1.0 - figures.latency_s / flags.latency_threshold)


def reference_gain(figures: Figures, flags: RewardFlags) -> float:
    """reference_weight * relative gain of latency over the reference; negative when worse than it."""
    return -flags.reference_weight * _relative_change(figures.latency_s, figures.reference_latency_s, flags)


def balance_penalty(loads: ArrayLike, queue_lengths: ArrayLike, flags: RewardFlags) -> float:
    """load_balance_penalty * coefficient of variation (standard deviation / mean) of the replicas' loads."""
    _, mean, deviation = _spread("loads", loads)
    return flags.load_balance_penalty * deviation / mean


def queue_penalty(loads: ArrayLike, queue_lengths: ArrayLike, flags: RewardFlags) -> float:
    """balance_penalty_weight * standard deviation of the replicas' queue lengths."""
    largest, _, deviation = _spread("queue_lengths", queue_lengths)
    return flags.balance_penalty_weight * deviation * largest


#: Formulas by the name of their component: of completions, 0 until the first one; and of the replicas as they are.
OF_COMPLETIONS = {
    formula.__name__: formula
    for formula in (absolute_score, delta_score, logistic_penalty, latency_penalty, latency_bonus, reference_gain)
}
OF_REPLICAS = {formula.__name__: formula for formula in (balance_penalty, queue_penalty)}


def normalised(loads: FloatArray) -> FloatArray:
    """Loads relative to their mean."""
    mean = loads.mean()
    return loads / mean if mean > 0 else loads


def _spread(name: str, values: ArrayLike) -> tuple[float, float, float]:
    """The largest value, and mean and standard deviation in units of it (so that no square overflows)."""
    array = np.asarray(values, dtype=np.float64)
    largest = float(array.max(initial=0.0))
    is_right = array.size > 0 and float(array.min()) >= 0.0 and largest < math.inf
    require_value(is_right, name, values, "one value for each replica, finite and >= 0")
    if largest == 0.0:
        return 0.0, 1.0, 0.0
    scaled = array / largest
    mean = float(scaled.sum()) / array.size
    centred = scaled - mean
    return largest, mean, math.sqrt(float(centred @ centred) / array.size)


@dataclass
class _Average:
    """The plain mean of the first `memory` values, from then on exponential with rate 1 / memory."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, memory)

    def value_or(self, default: float) -> float:
        return self.value if self.count else default


@dataclass
class _HybridState:
    completed_at_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    decisions: int = 0  # of this run
    now_s: float = 0.0
    window_start_s: float = 0.0  # the earliest arrival seen
    peak_throughput: float = 0.0
    throughput: _Average = field(default_factory=_Average)
    latency: _Average = field(default_factory=_Average)
    reference: _Average = field(default_factory=_Average)


def weighed(parts: dict[str, float], flags: RewardFlags, penalty_scale: float) -> dict[str, float]:
    """The components with penalties scaled, `raw_reward` before and `total_reward` after clipping."""
    parts, raw = dict(parts), 0.0
    for component in HYBRID_COMPONENTS:
        if component.kind == "score":
            raw += getattr(flags, COMPONENT_FLAGS[component.name]) * parts[component.name]
    raw += sum(parts[component.name] for component in HYBRID_COMPONENTS if component.kind == "bonus")
    for component in HYBRID_COMPONENTS:
        if component.kind == "penalty":
            parts[component.name] *= penalty_scale
            raw -= parts[component.name]
    low, high = flags.reward_clip_low, flags.reward_clip_high
    total = raw if low is None else max(raw, low)
    return {**parts, "raw_reward": raw, "total_reward": total if high is None else min(total, high)}


class HybridReward:
    """The plan's reward over a sliding window of completions: scores - penalties + bonuses, unclipped by default.

    Averages and the adaptive target are those of the decisions before, so a better value now always pays more now.
    """

    def __init__(self, flags: RewardFlags) -> None:
        validate(flags)
        check_reward(flags)
        self._flags = flags
        self._state = _HybridState()
        self._figures: Figures | None = None

    def reward(
        self,
        now_s: float,
        completions_since_last: Iterable[tuple[float, float]],
        loads: ArrayLike,
        queue_lengths: ArrayLike,
        *,
        penalty_scale: float = 1.0,
    ) -> dict[str, float]:
        """Every component by its name, `raw_reward` before and `total_reward` after clipping.

        Completions are (completed_at_s, latency_s). Until the first one, `latency_is_known` is 0 and so are all
        parts made of latency and throughput. If the window has emptied since, the latest latency stands: silence
        must not pay. The reference is the own past. `penalty_scale` is the curriculum's and multiplies all penalties.
        """
        flags = self._flags
        require_value(0.0 <= penalty_scale < math.inf, "penalty_scale", penalty_scale, "finite and >= 0")
        parts = {name: formula(loads, queue_lengths, flags) for name, formula in OF_REPLICAS.items()}
        self._slide(now_s, completions_since_last)
        parts |= self._of_completions()
        return weighed(parts, flags, penalty_scale)

    @property
    def figures(self) -> Figures | None:
        """What the components of the latest decision were made of; None before the first completion."""
        return self._figures

    def _of_completions(self) -> dict[str, float]:
        """The components that are made of latency and throughput, with those; then advances the averages."""
        flags, state = self._flags, self._state
        if not state.latencies_s:
            return dict.fromkeys(("latency_is_known", "throughput", "latency", *OF_COMPLETIONS), 0.0)
        throughput = self._throughput()
        latency_s = sum(state.latencies_s) / len(state.latencies_s)
        figures = Figures(
            throughput=throughput,
            latency_s=latency_s,
            target=flags.throughput_target or max(state.peak_throughput or throughput, _LEAST_THROUGHPUT),
            mean_throughput=state.throughput.value_or(throughput),
            mean_latency_s=state.latency.value_or(latency_s),
            reference_latency_s=state.reference.value_or(latency_s),
        )
        fallen = state.peak_throughput + (throughput - state.peak_throughput) / _AVERAGE_DECISIONS
        state.peak_throughput = max(throughput, fallen)
        state.throughput.add(throughput, _AVERAGE_DECISIONS)
        state.latency.add(latency_s, _AVERAGE_DECISIONS)
        state.reference.add(latency_s, _REFERENCE_DECISIONS)
        self._figures = figures
        parts = {name: formula(figures, flags) for name, formula in OF_COMPLETIONS.items()}
        return {"latency_is_known": 1.0, "throughput": throughput, "latency": latency_s, **parts}

    def _slide(self, now_s: float, completions: Iterable[tuple[float, float]]) -> None:
        """Move the window's end to `now_s`; at least one completion stays, for its latency."""
        state = self._state
        earliest_s = state.now_s if state.decisions else -math.inf
        require_value(
            earliest_s <= now_s < math.inf and now_s > -math.inf, "now_s", now_s, f"finite and >= {earliest_s}"
        )
        if not state.decisions:
            state.window_start_s = now_s
        state.decisions, state.now_s = state.decisions + 1, now_s
        for completed_at_s, latency_s in sorted(completions):
            require_value(0.0 <= latency_s < math.inf, "latency_s", latency_s, "finite and >= 0")
            require_value(completed_at_s <= now_s, "completed_at_s", completed_at_s, f"<= now_s ({now_s})")
            if not state.completed_at_s:
                state.window_start_s = min(state.window_start_s, completed_at_s - latency_s)
            state.completed_at_s.append(completed_at_s)
            state.latencies_s.append(min(latency_s, _LARGEST_LATENCY_S))
        outdated = bisect_right(state.completed_at_s, now_s - self._flags.reward_window_s)
        excess = min(outdated, len(state.completed_at_s) - 1)
        if excess > 0:
            del state.completed_at_s[:excess], state.latencies_s[:excess]

    def _throughput(self) -> float:
        """Completions per second in the window; falls while nothing completes."""
        state, window_s = self._state, self._flags.reward_window_s
        span_s = max(state.now_s - state.window_start_s, _LEAST_SPAN_S)
        is_empty = state.completed_at_s[-1] <= state.now_s - window_s
        return 0.0 if is_empty else len(state.completed_at_s) / min(span_s, window_s)

    def start_run(self) -> None:
        """A new simulation, whose clock starts again: empties the window and keeps the averages."""
        self._state = replace(self._state, completed_at_s=[], latencies_s=[], decisions=0)
        self._figures = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that later rewards depend on, as plain numbers, lists and dicts of them."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        values = copy.deepcopy(state)
        for name in ("throughput", "latency", "reference"):
            values[name] = _Average(**values[name])
        self._state = _HybridState(**values)
