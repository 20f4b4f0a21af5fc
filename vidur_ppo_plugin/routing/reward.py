"""The reward components and their sum, free of the simulator: `HybridReward` and `QueueDelay`.

Whoever drives them passes times, completions and loads. Penalties are logged as positive numbers and subtracted.
"""

import copy
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Below these, a ratio would measure rounding or the first moments of a run rather than the policy.
_LEAST_SPAN_S = 1e-3
_LEAST_THROUGHPUT = 1e-3  # requests per second
_LEAST_RELATIVE_LATENCY = 1e-3  # of the latency threshold
# About thirty years: keeps every product finite without touching any real latency.
_LARGEST_LATENCY_S = 1e9


def require(is_right: bool, name: str, value: object, right: str) -> None:
    """ValueError naming the parameter, its value and what would be right."""
    if not is_right:
        raise ValueError(f"{name} must be {right}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class HybridParams:
    """Weights and scales of `HybridReward`; the defaults are those of the 2025-09-18 plan where it names one."""

    throughput_target: float = 0.05  # requests per second that score 1; 0 adapts to a slowly falling maximum
    absolute_weight: float = 0.8
    delta_weight: float = 0.2
    alpha: float = 0.1  # weight of latency against throughput within the absolute score
    kappa: float = 0.05
    sigma: float = 2.0  # seconds over which the logistic penalty rises around the threshold
    latency_threshold: float = 6.0  # seconds
    latency_penalty_scale: float = 0.5
    load_balance_penalty: float = 0.15
    balance_penalty_weight: float = 0.02
    latency_bonus_weight: float = 0.1
    reference_weight: float = 0.1
    reward_clip_low: float | None = None
    reward_clip_high: float | None = None
    window_s: float = 30.0  # seconds of completions that count, unless `window_requests` counts them
    window_requests: int = 0  # number of latest completions that count; 0: by time
    average_decisions: int = 100  # memory of the delta score's averages and of the adaptive target
    reference_decisions: int = 1000  # memory of the reference latency

    def __post_init__(self) -> None:
        """Refuse values that would turn a penalty into a reward or divide by zero."""
        low, high = self.clip_range()
        require(low < high, "reward_clip_low", low, f"below reward_clip_high ({high})")
        for name in ("sigma", "latency_threshold", "window_s", "average_decisions", "reference_decisions"):
            require(getattr(self, name) > 0, name, getattr(self, name), "> 0")
        for name, value in vars(self).items():
            require(name.startswith("reward_clip") or 0 <= value < math.inf, name, value, "finite and >= 0")

    def clip_range(self) -> tuple[float, float]:
        """The least and the largest total; infinite where no limit is set."""
        low, high = self.reward_clip_low, self.reward_clip_high
        return -math.inf if low is None else low, math.inf if high is None else high


def absolute_score(throughput: float, latency_s: float, target: float, params: HybridParams) -> float:
    """throughput / target - alpha * latency / latency_threshold."""
    return throughput / target - params.alpha * latency_s / params.latency_threshold


def delta_score(throughput: float, latency_s: float, means: tuple[float, float], params: HybridParams) -> float:
    """Change of throughput minus change of latency, each relative to its moving average (`means`)."""
    throughput_change = (throughput - means[0]) / max(means[0], _LEAST_THROUGHPUT)
    return throughput_change - _relative_change(latency_s, means[1], params)


def _relative_change(latency_s: float, from_latency_s: float, params: HybridParams) -> float:
    least_s = _LEAST_RELATIVE_LATENCY * params.latency_threshold
    return (latency_s - from_latency_s) / max(from_latency_s, least_s)


def logistic_penalty(latency_s: float, params: HybridParams) -> float:
    """kappa * [sigmoid(x) + max(x, 0)], x = (latency - latency_threshold) / sigma.

    The linear part keeps bad and terrible apart, where a sigmoid alone is flat.
    """
    x = (latency_s - params.latency_threshold) / params.sigma
    small = math.exp(-abs(x))
    return params.kappa * ((1.0 if x >= 0.0 else small) / (1.0 + small) + max(x, 0.0))


def latency_penalty(latency_s: float, params: HybridParams) -> float:
    """latency_penalty_scale * max(0, latency / latency_threshold - 1)."""
    return params.latency_penalty_scale * max(0.0, latency_s / params.latency_threshold - 1.0)


def latency_bonus(latency_s: float, params: HybridParams) -> float:
    """latency_bonus_weight * max(0, 1 - latency / latency_threshold)."""
    return params.latency_bonus_weight * max(0.0, 1.0 - latency_s / params.latency_threshold)


def reference_gain(latency_s: float, reference_latency_s: float, params: HybridParams) -> float:
    """reference_weight * relative gain of latency over the reference; negative when worse than it."""
    return -params.reference_weight * _relative_change(latency_s, reference_latency_s, params)


def balance_penalty(loads: ArrayLike, params: HybridParams) -> float:
    """load_balance_penalty * coefficient of variation (standard deviation / mean) of the replicas' loads."""
    _, mean, deviation = _spread("loads", loads)
    return params.load_balance_penalty * deviation / mean


def queue_penalty(queue_lengths: ArrayLike, params: HybridParams) -> float:
    """balance_penalty_weight * standard deviation of the replicas' queue lengths."""
    largest, _, deviation = _spread("queue_lengths", queue_lengths)
    return params.balance_penalty_weight * deviation * largest


def _spread(name: str, values: ArrayLike) -> tuple[float, float, float]:
    """The largest value, and mean and standard deviation in units of it (so that no square overflows)."""
    array = np.asarray(values, dtype=np.float64)
    largest = float(array.max(initial=0.0))
    is_right = array.size > 0 and float(array.min()) >= 0.0 and largest < math.inf
    require(is_right, name, values, "one value for each replica, finite and >= 0")
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
    window_start_s: float = 0.0  # the earliest arrival seen or, counting by requests, the last completion that left
    peak_throughput: float = 0.0
    throughput: _Average = field(default_factory=_Average)
    latency: _Average = field(default_factory=_Average)
    reference: _Average = field(default_factory=_Average)


class HybridReward:
    """The plan's reward over a sliding window of completions: scores - penalties + bonuses, unclipped by default.

    Averages and the adaptive target are those of the decisions before, so a better value now always pays more now.
    """

    def __init__(self, params: HybridParams) -> None:
        self._params = params
        self._state = _HybridState()

    def reward(
        self,
        now_s: float,
        completions_since_last: Iterable[tuple[float, float]],
        loads: ArrayLike,
        queue_lengths: ArrayLike,
        *,
        reference_latency_s: float | None = None,
        penalty_scale: float = 1.0,
    ) -> dict[str, float]:
        """Every component by its name, `raw_reward` before and `total_reward` after clipping.

        Completions are (completed_at_s, latency_s). Until the first one, `latency_is_known` is 0 and so are all
        parts made of latency and throughput. If the window has emptied since, the latest latency stands: silence
        must not pay. Without `reference_latency_s` the reference is the own past. `penalty_scale` is the
        curriculum's and multiplies all penalties.
        """
        params = self._params
        require(0.0 <= penalty_scale < math.inf, "penalty_scale", penalty_scale, "finite and >= 0")
        penalties = balance_penalty(loads, params), queue_penalty(queue_lengths, params)
        self._slide(now_s, completions_since_last)
        parts = dict(zip(_LATENCY_PARTS, self._latency_parts(reference_latency_s), strict=True))
        parts["balance_penalty"], parts["queue_penalty"] = penalties
        raw = params.absolute_weight * parts["absolute_score"] + params.delta_weight * parts["delta_score"]
        raw += parts["latency_bonus"] + parts["reference_gain"]
        for name in ("logistic_penalty", "latency_penalty", "balance_penalty", "queue_penalty"):
            parts[name] *= penalty_scale
            raw -= parts[name]
        low, high = params.clip_range()
        return {**parts, "raw_reward": raw, "total_reward": min(max(raw, low), high)}

    def _latency_parts(self, reference_latency_s: float | None) -> Sequence[float]:
        params, state = self._params, self._state
        if not state.latencies_s:
            return [0.0] * len(_LATENCY_PARTS)
        throughput = self._throughput()
        latency_s = sum(state.latencies_s) / len(state.latencies_s)
        reference_s = min(latency_s if reference_latency_s is None else reference_latency_s, _LARGEST_LATENCY_S)
        require(reference_s >= 0.0, "reference_latency_s", reference_latency_s, ">= 0")
        target = params.throughput_target or max(state.peak_throughput or throughput, _LEAST_THROUGHPUT)
        means = state.throughput.value_or(throughput), state.latency.value_or(latency_s)
        parts = (
            1.0,
            throughput,
            latency_s,
            absolute_score(throughput, latency_s, target, params),
            delta_score(throughput, latency_s, means, params),
            logistic_penalty(latency_s, params),
            latency_penalty(latency_s, params),
            latency_bonus(latency_s, params),
            reference_gain(latency_s, state.reference.value_or(reference_s), params),
        )
        fallen = state.peak_throughput + (throughput - state.peak_throughput) / params.average_decisions
        state.peak_throughput = max(throughput, fallen)
        state.throughput.add(throughput, params.average_decisions)
        state.latency.add(latency_s, params.average_decisions)
        state.reference.add(reference_s, params.reference_decisions)
        return parts

    def _slide(self, now_s: float, completions: Iterable[tuple[float, float]]) -> None:
        """Move the window's end to `now_s`; at least one completion stays, for its latency."""
        state, limit = self._state, self._params.window_requests
        earliest_s = state.now_s if state.decisions else -math.inf
        require(earliest_s <= now_s < math.inf and now_s > -math.inf, "now_s", now_s, f"finite and >= {earliest_s}")
        if not state.decisions:
            state.window_start_s = now_s
        state.decisions, state.now_s = state.decisions + 1, now_s
        for completed_at_s, latency_s in sorted(completions):
            require(0.0 <= latency_s < math.inf, "latency_s", latency_s, "finite and >= 0")
            require(completed_at_s <= now_s, "completed_at_s", completed_at_s, f"<= now_s ({now_s})")
            if not state.completed_at_s:
                state.window_start_s = min(state.window_start_s, completed_at_s - latency_s)
            state.completed_at_s.append(completed_at_s)
            state.latencies_s.append(min(latency_s, _LARGEST_LATENCY_S))
        outdated = bisect_right(state.completed_at_s, now_s - self._params.window_s)
        excess = min(len(state.completed_at_s) - limit if limit else outdated, len(state.completed_at_s) - 1)
        if excess > 0:
            if limit:
                state.window_start_s = state.completed_at_s[excess - 1]
            del state.completed_at_s[:excess], state.latencies_s[:excess]

    def _throughput(self) -> float:
        """Completions per second in the window; falls while nothing completes."""
        state, window_s = self._state, self._params.window_s
        span_s = max(state.now_s - state.window_start_s, _LEAST_SPAN_S)
        if self._params.window_requests:
            return len(state.completed_at_s) / span_s
        is_empty = state.completed_at_s[-1] <= state.now_s - window_s
        return 0.0 if is_empty else len(state.completed_at_s) / min(span_s, window_s)

    def start_run(self) -> None:
        """A new simulation, whose clock starts again: empties the window and keeps the averages."""
        self._state = replace(self._state, completed_at_s=[], latencies_s=[], decisions=0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later rewards depend on, as plain numbers, lists and dicts of them."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        values = copy.deepcopy(state)
        for name in ("throughput", "latency", "reference"):
            values[name] = _Average(**values[name])
        self._state = _HybridState(**values)


_LATENCY_PARTS = (
    *("latency_is_known", "throughput", "latency", "absolute_score", "delta_score"),
    *("logistic_penalty", "latency_penalty", "latency_bonus", "reference_gain"),
)


class QueueDelay:
    """Minus the time-integral of the requests in the system; with power p, of the growth of their age^p.

    Summed over a fully drained run this is minus the sum of latency^p (p = 1: Little's law). An event costs O(1);
    taking the reward costs O(1) for p = 1 and O(requests in flight) otherwise.
    """

    def __init__(self, *, latency_power: float = 1.0) -> None:
        require(0.0 < latency_power < math.inf, "latency_power", latency_power, "finite and > 0")
        self._power = latency_power
        self.start_run()

    def start_run(self) -> None:
        """A new simulation, whose clock starts again; what was in flight is forgotten."""
        self._in_flight: dict[int, list[float]] = {}  # arrived_at_s, age^p already charged
        self._now_s = -math.inf
        self._pending = 0.0

    def on_arrival(self, now_s: float, request_id: int) -> None:
        """A request enters the system."""
        require(request_id not in self._in_flight, "request_id", request_id, "of a request not in flight")
        self._advance(now_s)
        self._in_flight[request_id] = [now_s, 0.0]

    def on_completion(self, now_s: float, request_id: int) -> None:
        """A request leaves the system."""
        require(request_id in self._in_flight, "request_id", request_id, "of a request in flight")
        self._advance(now_s)
        self._charge(self._in_flight.pop(request_id))

    def take(self, now_s: float) -> float:
        """The reward since the last take, up to `now_s`."""
        self._advance(now_s)
        for entry in self._in_flight.values() if self._power != 1.0 else ():
            self._charge(entry)
        taken, self._pending = self._pending, 0.0
        return taken

    def _advance(self, now_s: float) -> None:
        require(self._now_s <= now_s < math.inf, "now_s", now_s, f"finite and >= {self._now_s}")
        if self._power == 1.0 and self._in_flight:
            self._pending -= len(self._in_flight) * (now_s - self._now_s)
        self._now_s = now_s

    def _charge(self, entry: list[float]) -> None:
        if self._power != 1.0:
            grown = (self._now_s - entry[0]) ** self._power
            self._pending -= grown - entry[1]
            entry[1] = grown
