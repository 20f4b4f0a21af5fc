"""The sampling temperature: a base that moves toward 1, pressure, entropy and pulses, always within its bounds."""

import math
from dataclasses import dataclass
from typing import Any

# Below this, the relative change of a metric would divide by nothing.
_LEAST_METRIC = 1e-12


@dataclass(frozen=True, kw_only=True)
class TemperatureParams:
    """Bounds, weights and triggers; the defaults are those of the flags (`ppo_flags.py`)."""

    #: Off: the temperature is the (scheduled) base. On: pressure, entropy and pulses act on it.
    enable_dynamic_temperature: bool = False
    #: Raise it if the policy settles before it has tried every replica.
    base_temperature: float = 1.0
    min_temperature: float = 0.5
    max_temperature: float = 5.0
    #: Updates over which the base moves linearly to 1.0; 0: it stays.
    schedule_updates: int = 0
    #: How much full load lowers the temperature (0.3: by 30 %): a wrong placement costs most when queues are long.
    load_weight: float = 0.3
    #: How much full latency pressure raises it: latency that load does not explain is the policy's own fault.
    latency_weight: float = 0.3
    #: Nats; the temperature rises while the policy's entropy is below it. 0: off.
    target_entropy: float = 0.0
    #: Rise of the temperature at zero entropy (1.0: doubled), in proportion to the missing entropy.
    entropy_gain: float = 1.0
    #: Updates between pulses; 0: none by the clock.
    pulse_interval: int = 0
    #: Factor on the temperature during a pulse.
    pulse_magnitude: float = 2.0
    #: Updates that a pulse lasts.
    pulse_length: int = 2
    #: Relative change of the metric below which it counts as stagnant; 0: never.
    stagnation_threshold: float = 0.005
    #: Updates in each of the two means that are compared.
    stagnation_memory: int = 5
    #: Updates in a row worse than the reference that start a pulse; 0: never.
    reference_patience: int = 3

    def __post_init__(self) -> None:
        """Refuse values out of range, naming them."""
        least: dict[str, float] = {"pulse_magnitude": 1.0, "pulse_length": 1, "stagnation_memory": 1}
        for name, value in vars(self).items():
            if not isinstance(value, bool) and not least.get(name, 0.0) <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= {least.get(name, 0.0)}, got {value!r}")
        if not 0.0 < self.min_temperature <= self.base_temperature <= self.max_temperature:
            bounds = f"{self.min_temperature}, {self.base_temperature}, {self.max_temperature}"
            raise ValueError(f"0 < min_temperature <= base_temperature <= max_temperature must hold, got {bounds}")
        for name in ("load_weight", "latency_weight"):
            if not getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be below 1 (1 would freeze the policy), got {getattr(self, name)!r}")


class TemperatureController:
    """Sets the temperature once an update.

    temperature = base(update) * (1 - load_weight * load + latency_weight * latency)
    * (1 + entropy_gain * missing share of target_entropy) * (pulse_magnitude in a pulse), within [min, max].

    Load lowers it, latency raises it: when both are high, latency is the load's doing and they cancel; when latency
    is high without load, the policy is at fault and should look elsewhere, which is also cheap then.
    """

    def __init__(self, params: TemperatureParams) -> None:
        self._params = params
        #: The temperature to sample with until the next update.
        self.temperature = params.base_temperature
        #: Why the pulse under way started: "reference", "stagnation", "interval", or "" without one.
        self.pulse_reason = ""
        self._updates = 0
        self._pulse_updates_left = 0
        self._worse_in_a_row = 0
        self._metrics: list[float] = []

    @property
    def is_pulsing(self) -> bool:
        """Whether a pulse is under way."""
        return self.pulse_reason != ""

    def update(
        self,
        metric: float | None,
        entropy: float,
        load_pressure: float,
        latency_pressure: float,
        gain_over_reference: float | None = None,
    ) -> float:
        """The new temperature. Pressures are in [0, 1]; a metric or gain that is not known is None."""
        params = self._params
        _check_pressure("load_pressure", load_pressure)
        _check_pressure("latency_pressure", latency_pressure)
        if not 0.0 <= entropy < math.inf:
            raise ValueError(f"entropy must be finite and >= 0 nats, got {entropy!r}")
        for name, value in (("metric", metric), ("gain_over_reference", gain_over_reference)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, or None while it is not known, got {value!r}")
        self._updates += 1
        temperature = self._scheduled_base()
        if params.enable_dynamic_temperature:
            self._remember(metric, gain_over_reference)
            self._advance_pulse()
            temperature *= 1.0 - params.load_weight * load_pressure + params.latency_weight * latency_pressure
            temperature *= 1.0 + params.entropy_gain * self._missing_entropy(entropy)
            temperature *= params.pulse_magnitude if self.is_pulsing else 1.0
        self.temperature = min(max(temperature, params.min_temperature), params.max_temperature)
        return self.temperature

    def _scheduled_base(self) -> float:
        base, updates = self._params.base_temperature, self._params.schedule_updates
        return base + (1.0 - base) * min(1.0, self._updates / updates) if updates else base

    def _missing_entropy(self, entropy: float) -> float:
        target = self._params.target_entropy
        return max(0.0, 1.0 - entropy / target) if target > 0.0 else 0.0

    def _remember(self, metric: float | None, gain_over_reference: float | None) -> None:
        if metric is not None:
            self._metrics = [*self._metrics, metric][-2 * self._params.stagnation_memory :]
        if gain_over_reference is not None:
            self._worse_in_a_row = self._worse_in_a_row + 1 if gain_over_reference < 0.0 else 0

    def _advance_pulse(self) -> None:
        """End a pulse that has lasted long enough, then start one if something asks for it."""
        if self._pulse_updates_left > 0:
            self._pulse_updates_left -= 1
        if self._pulse_updates_left > 0:
            return
        self.pulse_reason = self._reason_to_pulse()
        if self.pulse_reason:
            self._pulse_updates_left = self._params.pulse_length
        # What asked for this pulse must be seen anew before it asks again.
        if self.pulse_reason == "reference":
            self._worse_in_a_row = 0
        if self.pulse_reason == "stagnation":
            self._metrics = []

    def _reason_to_pulse(self) -> str:
        params = self._params
        if params.reference_patience and self._worse_in_a_row >= params.reference_patience:
            return "reference"
        if self._is_stagnant():
            return "stagnation"
        return "interval" if params.pulse_interval and self._updates % params.pulse_interval == 0 else ""

    def _is_stagnant(self) -> bool:
        """Whether the mean of the last updates differs little from the mean of as many before them."""
        memory = self._params.stagnation_memory
        if len(self._metrics) < 2 * memory:
            return False
        before, after = sum(self._metrics[:memory]) / memory, sum(self._metrics[memory:]) / memory
        return abs(after - before) < self._params.stagnation_threshold * max(abs(before), _LEAST_METRIC)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later temperatures depend on, as plain values."""
        return {
            "temperature": self.temperature,
            "pulse_reason": self.pulse_reason,
            "updates": self._updates,
            "pulse_updates_left": self._pulse_updates_left,
            "worse_in_a_row": self._worse_in_a_row,
            "metrics": list(self._metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.temperature = state["temperature"]
        self.pulse_reason = state["pulse_reason"]
        self._updates = state["updates"]
        self._pulse_updates_left = state["pulse_updates_left"]
        self._worse_in_a_row = state["worse_in_a_row"]
        self._metrics = list(state["metrics"])


def _check_pressure(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
