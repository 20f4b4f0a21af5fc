"""The sampling temperature: a base that moves toward 1, pressure, entropy and pulses, always within its bounds."""

import math
from typing import Any

from vidur_ppo_plugin.flags import ExplorationFlags, check_exploration, validate

# How much full load lowers the temperature (0.3: by 30 %): a wrong placement costs most when queues are long.
_LOAD_WEIGHT = 0.3
# How much full latency pressure raises it: latency that load does not explain is the policy's own fault.
_LATENCY_WEIGHT = 0.3
# Rise of the temperature at zero entropy (1.0: doubled), in proportion to the missing entropy.
_ENTROPY_GAIN = 1.0
# Below this, the relative change of a metric would divide by nothing.
_LEAST_METRIC = 1e-12


class TemperatureController:
    """Sets the temperature once an update.

    temperature = base(update) * (1 - _LOAD_WEIGHT * load + _LATENCY_WEIGHT * latency)
    * (1 + _ENTROPY_GAIN * missing share of target_entropy) * (pulse_magnitude in a pulse), within [min, max].

    Load lowers it, latency raises it: when both are high, latency is the load's doing and they cancel; when latency
    is high without load, the policy is at fault and should look elsewhere, which is also cheap then.
    """

    def __init__(self, flags: ExplorationFlags, *, schedule_updates: int = 0) -> None:
        """`schedule_updates`: updates over which the base moves linearly to 1.0; 0: it stays."""
        validate(flags)
        check_exploration(flags)
        self._flags = flags
        self._schedule_updates = schedule_updates
        #: The temperature to sample with until the next update.
        self.temperature = flags.base_temperature
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
        flags = self._flags
        _check_pressure("load_pressure", load_pressure)
        _check_pressure("latency_pressure", latency_pressure)
        if not 0.0 <= entropy < math.inf:
            raise ValueError(f"entropy must be finite and >= 0 nats, got {entropy!r}")
        for name, value in (("metric", metric), ("gain_over_reference", gain_over_reference)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, or None while it is not known, got {value!r}")
        self._updates += 1
        temperature = self._scheduled_base()
        if flags.enable_dynamic_temperature:
            self._remember(metric, gain_over_reference)
            self._advance_pulse()
            temperature *= 1.0 - _LOAD_WEIGHT * load_pressure + _LATENCY_WEIGHT * latency_pressure
            temperature *= 1.0 + _ENTROPY_GAIN * self._missing_entropy(entropy)
            temperature *= flags.pulse_magnitude if self.is_pulsing else 1.0
        self.temperature = min(max(temperature, flags.min_temperature), flags.max_temperature)
        return self.temperature

    def _scheduled_base(self) -> float:
        base, updates = self._flags.base_temperature, self._schedule_updates
        return base + (1.0 - base) * min(1.0, self._updates / updates) if updates else base

    def _missing_entropy(self, entropy: float) -> float:
        target = self._flags.target_entropy
        return max(0.0, 1.0 - entropy / target) if target > 0.0 else 0.0

    def _remember(self, metric: float | None, gain_over_reference: float | None) -> None:
        if metric is not None:
            self._metrics = [*self._metrics, metric][-2 * self._flags.stagnation_memory :]
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
            self._pulse_updates_left = self._flags.pulse_length
        # What asked for this pulse must be seen anew before it asks again.
        if self.pulse_reason == "reference":
            self._worse_in_a_row = 0
        if self.pulse_reason == "stagnation":
            self._metrics = []

    def _reason_to_pulse(self) -> str:
        flags = self._flags
        if flags.reference_patience and self._worse_in_a_row >= flags.reference_patience:
            return "reference"
        if self._is_stagnant():
            return "stagnation"
        return "interval" if flags.pulse_interval and self._updates % flags.pulse_interval == 0 else ""

    def _is_stagnant(self) -> bool:
        """Whether the mean of the last updates differs little from the mean of as many before them."""
        memory = self._flags.stagnation_memory
        if len(self._metrics) < 2 * memory:
            return False
        before, after = sum(self._metrics[:memory]) / memory, sum(self._metrics[memory:]) / memory
        return abs(after - before) < self._flags.stagnation_threshold * max(abs(before), _LEAST_METRIC)

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
