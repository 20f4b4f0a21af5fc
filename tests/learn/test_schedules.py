"""Schedules, decays and the KL controllers against figures worked out by hand, and what holds for any of them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.learn.schedules import (
    KINDS,
    Decay,
    EpsilonGreedy,
    KlAdaptiveLearningRate,
    KlController,
    Schedule,
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [8.0, 6.5, 5.0, 3.5, 2.0]),
        ("cosine", [8.0, 5.0 + 3.0 * math.sqrt(0.5), 5.0, 5.0 - 3.0 * math.sqrt(0.5), 2.0]),
        ("exponential", [8.0, 8.0 / math.sqrt(2.0), 4.0, 4.0 / math.sqrt(2.0), 2.0]),
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
        ("kind", {"kind": "sine"}),
        ("steps", {"steps": 0}),
        ("start", {"start": math.nan}),
        ("end", {"end": math.inf}),
        ("end", {"kind": "exponential", "end": 0.0}),
        ("start", {"kind": "exponential", "start": -1.0}),
    ],
)
def test_schedule_names_what_is_wrong(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{bad[name]}"):
        Schedule(**{"start": 1.0, "end": 0.5, "steps": 10, **bad})


def test_decay_reaches_exactly_zero() -> None:
    decay = Decay(start=0.3, steps=3)
    seen = []
    for _ in range(5):
        seen.append((decay.value, decay.is_over))
        decay.advance()
    assert [value for value, _ in seen] == pytest.approx([0.3, 0.2, 0.1, 0.0, 0.0])
    assert [is_over for _, is_over in seen] == [False, False, False, True, True]
    assert Decay(start=0.0, steps=10).is_over
    wrong: list[dict[str, Any]] = [{"start": -1.0}, {"start": math.nan}, {"steps": 0}, {"kind": "exponential"}]
    for bad in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            Decay(**{"start": 1.0, "steps": 2, **bad})
    with pytest.raises(ValueError, match="steps must be"):
        decay.advance(-1)


def test_epsilon_mixes_and_phases_out() -> None:
    greedy = EpsilonGreedy(start=0.4, end=0.0, steps=4)
    probabilities = np.array([0.7, 0.2, 0.1, 0.0])
    assert greedy.mix(probabilities) == pytest.approx([0.52, 0.22, 0.16, 0.1])
    allowed = np.array([True, False, True, False])
    assert greedy.mix(probabilities, allowed) == pytest.approx([0.62, 0.12, 0.26, 0.0])
    greedy.advance(2)
    assert greedy.epsilon == pytest.approx(0.2)
    greedy.advance(2)
    assert greedy.mix(probabilities).tolist() == probabilities.tolist()
    with pytest.raises(ValueError, match="allowed must be"):
        greedy.mix(probabilities, np.zeros(4, dtype=bool))
    for name, value in (("start", 1.1), ("end", -0.1), ("start", math.nan), ("steps", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            EpsilonGreedy(**{"start": 0.5, "end": 0.0, "steps": 5, name: value})  # type: ignore[arg-type]


@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(lambda w: sum(w) > 0.01),
    start=st.floats(0.0, 1.0),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_mixed_probabilities_are_probabilities(weights: list[float], start: float, dtype: Any) -> None:
    probabilities = (np.array(weights) / sum(weights)).astype(dtype)
    mixed = EpsilonGreedy(start=start, end=0.0, steps=5).mix(probabilities)
    assert mixed.dtype == dtype
    assert mixed.sum() == pytest.approx(1.0, abs=1e-5)
    assert (mixed >= start / len(weights) - 1e-6).all()


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


@given(before=st.integers(0, 20), after=st.integers(0, 20))
def test_steps_continue_from_their_state(before: int, after: int) -> None:
    decay, restored = Decay(start=0.7, steps=17), Decay(start=0.7, steps=17)
    greedy, restored_greedy = (EpsilonGreedy(start=0.7, end=0.1, steps=17) for _ in range(2))
    decay.advance(before)
    greedy.advance(before)
    restored.load_state_dict(decay.state_dict())
    restored_greedy.load_state_dict(greedy.state_dict())
    for each in (decay, restored, greedy, restored_greedy):
        each.advance(after)
    assert decay.value == restored.value == Schedule(start=0.7, end=0.0, steps=17).value(before + after)
    assert greedy.epsilon == restored_greedy.epsilon == Schedule(start=0.7, end=0.1, steps=17).value(before + after)
