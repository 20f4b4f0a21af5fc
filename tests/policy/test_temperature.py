"""The temperature controller: each term alone, and what holds for any sequence of updates."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.flags import ExplorationFlags
from vidur_ppo_plugin.policy.temperature import TemperatureController

# Every term off: a test switches on the one it looks at.
QUIET: dict[str, Any] = {
    "enable_dynamic_temperature": True,
    "pulse_interval": 0,
    "stagnation_threshold": 0.0,
    "reference_patience": 0,
}


def controller(*, schedule_updates: int = 0, **flags: Any) -> TemperatureController:
    return TemperatureController(ExplorationFlags(**{**QUIET, **flags}), schedule_updates=schedule_updates)


def pulses(
    control: TemperatureController, metrics: Sequence[float | None], gains: Sequence[float | None] | None = None
) -> list[str]:
    """The reason to pulse at each update."""
    reasons = []
    for metric, gain in zip(metrics, gains or [None] * len(metrics), strict=True):
        temperature = control.update(metric, 1.0, 0.0, 0.0, gain)
        assert control.is_pulsing == (control.pulse_reason != "")
        assert temperature == control.temperature == (2.0 if control.is_pulsing else 1.0)
        reasons.append(control.pulse_reason)
    return reasons


def test_nothing_moves_without_terms() -> None:
    assert pulses(controller(), [1.0] * 40, gains=[-0.5] * 40) == [""] * 40


def test_disabled_is_the_scheduled_base_whatever_happens() -> None:
    flags = ExplorationFlags(
        enable_dynamic_temperature=False, base_temperature=1.5, target_entropy=1.0, pulse_interval=1
    )
    control = TemperatureController(flags, schedule_updates=4)
    assert control.temperature == 1.5
    found = [control.update(1.0, 0.0, 1.0, 0.0, 5.0) for _ in range(6)]
    assert found == pytest.approx([1.375, 1.25, 1.125, 1.0, 1.0, 1.0])
    assert not control.is_pulsing


def test_schedule_moves_to_one_from_below_too() -> None:
    control = controller(base_temperature=0.6, schedule_updates=2)
    assert [control.update(None, 1.0, 0.0, 0.0) for _ in range(3)] == pytest.approx([0.8, 1.0, 1.0])


def test_load_lowers_latency_raises_and_both_cancel() -> None:
    control = controller()
    assert control.update(None, 1.0, 1.0, 0.0) == pytest.approx(0.7)
    assert control.update(None, 1.0, 0.5, 0.0) == pytest.approx(0.85)
    assert control.update(None, 1.0, 0.0, 1.0) == pytest.approx(1.3)
    assert control.update(None, 1.0, 1.0, 1.0) == pytest.approx(1.0)


def test_temperature_rises_in_proportion_to_missing_entropy() -> None:
    control = controller(target_entropy=0.8)
    found = [control.update(None, entropy, 0.0, 0.0) for entropy in (1.3, 0.8, 0.4, 0.0)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.0])


def test_pulse_by_interval() -> None:
    found = pulses(controller(pulse_interval=4, pulse_length=2), [None] * 10)
    assert found == ["", "", "", "interval", "interval", "", "", "interval", "interval", ""]


def test_pulse_by_stagnation() -> None:
    """Six updates are needed to compare two means of three; after a pulse, six new ones."""
    control = controller(stagnation_threshold=0.005, stagnation_memory=3, pulse_length=1)
    found = pulses(control, [100.0, 101.0, 99.0, 100.4, 100.0, 100.0] * 2)
    assert found == [""] * 5 + ["stagnation"] + [""] * 5 + ["stagnation"]

    improving = pulses(controller(stagnation_threshold=0.005, stagnation_memory=3), [1.0 + 0.01 * i for i in range(20)])
    assert improving == [""] * 20
    assert "stagnation" in pulses(controller(stagnation_threshold=0.005), [0.0] * 10)


def test_interval_pulses_do_not_hide_stagnation() -> None:
    """At the plan's values (8, 5): the seeds report a plateau without any stagnation pulse."""
    found = pulses(controller(pulse_interval=8, stagnation_threshold=0.005, stagnation_memory=5), [3.0] * 12)
    assert found[7:] == ["interval", "interval", "stagnation", "stagnation", ""]


def test_pulse_when_worse_than_the_reference_in_a_row() -> None:
    control = controller(reference_patience=3, pulse_length=1)
    gains = [-0.1, -0.1, 0.0, -0.1, -0.1, -0.1, -0.2, -0.1, -0.1, 0.1]
    assert pulses(control, [None] * 10, gains) == [""] * 5 + ["reference"] + [""] * 2 + ["reference", ""]


def test_an_unknown_gain_neither_counts_nor_forgives() -> None:
    control = controller(reference_patience=2, pulse_length=1)
    assert pulses(control, [1.0] * 3, [-0.1, None, -0.1]) == ["", "", "reference"]


def test_bounds_win_over_a_pulse_and_over_pressure() -> None:
    assert controller(pulse_interval=1, pulse_magnitude=5.0, max_temperature=1.5).update(None, 1.0, 0.0, 0.0) == 1.5
    assert controller(min_temperature=0.9).update(None, 1.0, 1.0, 0.0) == 0.9


PRESSURE = st.floats(0.0, 1.0)
METRIC = st.none() | st.floats(-1e6, 1e6)
UPDATES = st.lists(st.tuples(METRIC, st.floats(0.0, 7.0), PRESSURE, PRESSURE, METRIC), max_size=40)
FLAGS = st.builds(
    ExplorationFlags,
    enable_dynamic_temperature=st.booleans(),
    base_temperature=st.floats(0.5, 3.0),
    target_entropy=st.floats(0.0, 2.0),
    pulse_interval=st.integers(0, 9),
    pulse_magnitude=st.floats(1.0, 100.0),
    pulse_length=st.integers(1, 4),
    stagnation_threshold=st.floats(0.0, 1.0),
    stagnation_memory=st.integers(2, 4),
    reference_patience=st.integers(0, 3),
)
STEPS = st.integers(0, 20)


@given(flags=FLAGS, steps=STEPS, updates=UPDATES)
def test_always_within_bounds_and_pulses_end(flags: ExplorationFlags, steps: int, updates: list[Any]) -> None:
    control = TemperatureController(flags, schedule_updates=steps)
    for update in updates:
        temperature = control.update(*update)
        assert flags.min_temperature <= temperature <= flags.max_temperature
        assert control.is_pulsing <= flags.enable_dynamic_temperature
        assert control.state_dict()["pulse_updates_left"] <= flags.pulse_length


@given(
    flags=FLAGS,
    steps=STEPS,
    updates=UPDATES,
    entropy=st.floats(0.0, 7.0),
    load=PRESSURE,
    latency=PRESSURE,
)
def test_each_term_has_one_direction(
    flags: ExplorationFlags, steps: int, updates: list[Any], entropy: float, load: float, latency: float
) -> None:
    def then(entropy: float, load: float, latency: float) -> float:
        control = TemperatureController(flags, schedule_updates=steps)
        for update in updates:
            control.update(*update)
        return control.update(None, entropy, load, latency)

    middle = then(entropy, load, latency)
    assert then(entropy / 2, load, latency) >= middle
    assert then(entropy, load / 2, latency) >= middle
    assert then(entropy, load, latency / 2) <= middle


@given(flags=FLAGS, steps=STEPS, before=UPDATES, after=UPDATES)
def test_continues_from_its_state(flags: ExplorationFlags, steps: int, before: list[Any], after: list[Any]) -> None:
    control, restored = (TemperatureController(flags, schedule_updates=steps) for _ in range(2))
    for update in before:
        control.update(*update)
    restored.load_state_dict(control.state_dict())
    assert restored.temperature == control.temperature
    for update in after:
        assert control.update(*update) == restored.update(*update)
        assert control.pulse_reason == restored.pulse_reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_temperature", 0.0),
        ("min_temperature", 1.1),
        ("max_temperature", 0.9),
        ("pulse_magnitude", 0.5),
        ("stagnation_threshold", math.nan),
        ("reference_patience", -1),
    ],
)
def test_bad_flags_are_named(name: str, value: float) -> None:
    """All ranges: tests/flags/test_flags.py."""
    with pytest.raises(ValueError, match=rf"{name}\w* must .*{value}|base_temperature must .*{value}"):
        TemperatureController(ExplorationFlags(**{name: value}))  # type: ignore[arg-type]


def test_bad_inputs_are_named() -> None:
    right: dict[str, Any] = {"metric": 1.0, "entropy": 1.0, "load_pressure": 0.5, "latency_pressure": 0.5}
    controller().update(**right)
    for name in (*right, "gain_over_reference"):
        can_be_negative = name in ("metric", "gain_over_reference")
        for value in (math.nan, math.inf, *(() if can_be_negative else (-0.1,))):
            with pytest.raises(ValueError, match=f"{name} must be"):
                controller().update(**{**right, name: value})
