"""Schedules and the KL controllers against figures worked out by hand, and what holds for any of them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.learn.schedules import (
    KINDS,
    KlAdaptiveLearningRate,
    KlController,
    Schedule,
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [8.0, 6.5, 5.0, 3.5, 2.0]),
        ("constant", [8.0] * 5),
    ],
)
def test_schedule_by_hand(kind: str, expected: list[float]) -> None:
    schedule = Schedule(start=8.0, end=2.0, steps=4, kind=kind)
    assert [schedule.value(step) for step in range(5)] == pytest.approx(expected)
    assert schedule.value(-3) == 8.0
    assert schedule.value(1000) == expected[-1]


@given(
    start=st.floats(1e-6, 1e6),
    end=st.floats(1e-6, 1e6),
    steps=st.integers(1, 1000),
    kind=st.sampled_from(KINDS),
    step=st.integers(0, 1100),
)
def test_schedule_stays_between_its_ends_and_never_turns(
    start: float, end: float, steps: int, kind: str, step: int
) -> None:
    schedule = Schedule(start=start, end=end, steps=steps, kind=kind)
    here, there = schedule.value(step), schedule.value(step + 1)
    slack = 1e-9 * max(start, end)
    assert min(start, end) - slack <= here <= max(start, end) + slack
    assert (there - here) * (end - start) >= -slack * slack


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("kind", {"kind": "cosine"}),
        ("steps", {"steps": 0}),
        ("start", {"start": math.nan}),
        ("end", {"end": math.inf}),
    ],
)
def test_schedule_names_what_is_wrong(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{bad[name]}"):
        Schedule(**{"start": 1.0, "end": 0.5, "steps": 10, **bad})


def test_kl_coefficient_doubles_and_halves_within_bounds() -> None:
    control = KlController(kl_coef=6.0, target_kl=0.01)
    # Just inside and just outside of [target / 1.5, 1.5 x target] = [0.00667, 0.015].
    moves = [0.0149, 0.0067, 0.0151, 1.0, 0.0066, 0.0, -0.001, 0.0]
    assert [control.update(kl) for kl in moves] == pytest.approx([6.0, 6.0, 10.0, 10.0, 5.0, 2.5, 1.25, 0.625])
    assert [control.update(0.0) for _ in range(20)][-1] == 1e-3
    assert KlController(kl_coef=20.0, target_kl=0.01).update(1.0) == 20.0  # who starts outside stays within that
    assert KlController(kl_coef=1e-4, target_kl=0.01).update(0.0) == 1e-4
    assert KlController(kl_coef=0.0, target_kl=0.01).update(1.0) == 0.0


def test_learning_rate_follows_the_kl_within_bounds() -> None:
    control = KlAdaptiveLearningRate(lr=9e-3, target_kl=0.01)
    # Between half and twice the target nothing changes, nor at 0 or below.
    moves = [0.019, 0.0051, 0.0, -0.1, 0.021, 0.021, 0.0049, 0.0049]
    expected = [9e-3, 9e-3, 9e-3, 9e-3, 6e-3, 4e-3, 6e-3, 9e-3]
    assert [control.update(kl) for kl in moves] == pytest.approx(expected)
    assert control.update(0.001) == 1e-2
    assert [control.update(1.0) for _ in range(20)][-1] == 1e-5
    assert KlAdaptiveLearningRate(lr=0.1, target_kl=0.01).update(0.001) == 0.1
    assert KlAdaptiveLearningRate(lr=1e-6, target_kl=0.01).update(1.0) == 1e-6


@pytest.mark.parametrize(
    ("make", "right", "bad"),
    [
        (
            KlController,
            {"kl_coef": 0.2, "target_kl": 0.01},
            [("target_kl", 0.0), ("kl_coef", -0.1), ("kl_coef", math.inf)],
        ),
        (
            KlAdaptiveLearningRate,
            {"lr": 3e-4, "target_kl": 0.01},
            [("target_kl", -1.0), ("lr", 0.0), ("lr", math.inf), ("lr", math.nan)],
        ),
    ],
)
def test_kl_controllers_name_what_is_wrong(make: Any, right: dict[str, float], bad: list[tuple[str, float]]) -> None:
    for name, value in bad:
        with pytest.raises(ValueError, match=f"{name} must be"):
            make(**{**right, name: value})
    with pytest.raises(ValueError, match="approx_kl must be finite, got nan"):
        make(**right).update(math.nan)


@given(before=st.lists(st.floats(-0.1, 0.1), max_size=30), after=st.lists(st.floats(-0.1, 0.1), max_size=30))
def test_kl_controllers_continue_from_their_state(before: list[float], after: list[float]) -> None:
    for make in (
        lambda: KlController(kl_coef=0.2, target_kl=0.01),
        lambda: KlAdaptiveLearningRate(lr=3e-4, target_kl=0.01),
    ):
        control: Any = make()
        restored: Any = make()
        for kl in before:
            control.update(kl)
        restored.load_state_dict(control.state_dict())
        assert [control.update(kl) for kl in after] == [restored.update(kl) for kl in after]
