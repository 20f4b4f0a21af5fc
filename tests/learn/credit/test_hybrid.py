"""Sign and slope of every component of the hybrid reward, and of their sum."""

import copy
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vidur_ppo_plugin.flags import HYBRID_COMPONENTS, RewardFlags
from vidur_ppo_plugin.learn.credit import hybrid as reward
from vidur_ppo_plugin.learn.credit.hybrid import Figures, HybridReward

FLAGS = RewardFlags(throughput_target=0.05)  # as in the plan of 2025-09-18
PENALTIES = ("logistic_penalty", "latency_penalty", "balance_penalty", "queue_penalty")
LATENCIES_S = st.floats(0.01, 100.0)
LOADS = st.lists(st.floats(0.0, 10.0), min_size=2, max_size=8)
EVEN = [1.0, 1.0]


# --- The components alone ---


def figures(**given: float) -> Figures:
    """Figures at which nothing is unusual, but for those that are given."""
    usual = {"throughput": 1.0, "latency_s": 6.0, "target": 1.0, "mean_throughput": 1.0}
    return Figures(**{**usual, "mean_latency_s": 6.0, "reference_latency_s": 6.0, **given})


def test_components_by_hand() -> None:
    """At twice the threshold: x = 3, sigmoid(3) = 0.95257."""
    late = figures(throughput=0.1, latency_s=12.0, target=0.05)
    assert reward.absolute_score(late, FLAGS) == pytest.approx(2.0 - 0.1 * 2.0)
    changed = figures(throughput=3.0, latency_s=6.0, mean_throughput=2.0, mean_latency_s=8.0, reference_latency_s=8.0)
    assert reward.delta_score(changed, FLAGS) == pytest.approx(0.5 + 0.25)
    assert reward.logistic_penalty(late, FLAGS) == pytest.approx(0.05 * (0.9525741268 + 3.0))
    assert reward.latency_penalty(late, FLAGS) == pytest.approx(0.5)
    assert reward.latency_bonus(figures(latency_s=3.0), FLAGS) == pytest.approx(0.1 * 0.5)
    assert reward.reference_gain(changed, FLAGS) == pytest.approx(0.1 * 0.25)
    assert reward.balance_penalty([1.0, 3.0], EVEN, FLAGS) == pytest.approx(0.15 * 0.5)
    assert reward.queue_penalty(EVEN, [1.0, 3.0], FLAGS) == pytest.approx(0.02 * 1.0)


def test_every_component_has_its_formula() -> None:
    formulas = [*reward.OF_COMPLETIONS, *reward.OF_REPLICAS]
    assert sorted(formulas) == sorted(component.name for component in HYBRID_COMPONENTS)


def falls(function: Any, low: float, high: float) -> bool:
    """Whether the function falls by a noticeable amount on every twentieth of the range: nowhere flat."""
    values = [function(x) for x in np.linspace(low, high, 21)]
    return all(after < before - 1e-5 for before, after in pairwise(values))


def test_no_component_is_flat_in_its_range() -> None:
    """Latency from nothing to ten times the threshold; the bonus below the threshold, the penalty above it."""
    assert falls(lambda latency: reward.absolute_score(figures(latency_s=latency), FLAGS), 0.0, 60.0)
    assert falls(lambda latency: reward.delta_score(figures(latency_s=latency), FLAGS), 0.0, 60.0)
    assert falls(lambda latency: reward.reference_gain(figures(latency_s=latency), FLAGS), 0.0, 60.0)
    assert falls(lambda latency: -reward.logistic_penalty(figures(latency_s=latency), FLAGS), 0.0, 60.0)
    assert falls(lambda latency: -reward.latency_penalty(figures(latency_s=latency), FLAGS), 6.0, 60.0)
    assert falls(lambda latency: reward.latency_bonus(figures(latency_s=latency), FLAGS), 0.0, 6.0)
    assert falls(lambda throughput: -reward.absolute_score(figures(throughput=throughput), FLAGS), 0.0, 10.0)
    assert falls(lambda throughput: -reward.delta_score(figures(throughput=throughput), FLAGS), 0.0, 10.0)
    assert falls(lambda moved: -reward.balance_penalty([1.0 - moved, 1.0 + moved], EVEN, FLAGS), 0.0, 1.0)
    assert falls(lambda moved: -reward.queue_penalty(EVEN, [10.0 - moved, 10.0 + moved], FLAGS), 0.0, 10.0)


# --- Their sum ---


def after_history(history: list[tuple[float, float]], flags: RewardFlags) -> HybridReward:
    """A reward that has seen decisions so many seconds apart, one completion of so many seconds before each."""
    hybrid, now_s = HybridReward(flags), 0.0
    hybrid.reward(now_s, [], EVEN, EVEN)
    for gap_s, latency_s in history:
        now_s += gap_s
        hybrid.reward(now_s, [(now_s, latency_s)], EVEN, EVEN)
    return hybrid


def after_and_then(hybrid: HybridReward, latencies_s: list[float], loads: Any = EVEN) -> dict[str, float]:
    """What the next decision would pay, a second later; the reward itself is left as it was."""
    hybrid = copy.deepcopy(hybrid)
    now_s = hybrid.state_dict()["now_s"] + 1.0
    return hybrid.reward(now_s, [(now_s, latency_s) for latency_s in latencies_s], loads, loads)


HISTORIES = st.lists(st.tuples(st.floats(0.01, 20.0), LATENCIES_S), max_size=12)
SOME_FLAGS = st.builds(
    RewardFlags,
    throughput_target=st.sampled_from([0.0, 0.05, 3.0]),
    latency_threshold=st.sampled_from([0.5, 6.0, 30.0]),
)


@given(history=HISTORIES, flags=SOME_FLAGS, latency_s=LATENCIES_S, factor=st.floats(1.01, 10.0))
def test_a_worse_latency_pays_less_at_every_load(
    history: list[tuple[float, float]], flags: RewardFlags, latency_s: float, factor: float
) -> None:
    hybrid = after_history(history, flags)
    better, worse = after_and_then(hybrid, [latency_s]), after_and_then(hybrid, [latency_s * factor])
    assert worse["total_reward"] < better["total_reward"]
    assert worse["latency"] > better["latency"]
    for name in ("absolute_score", "delta_score", "latency_bonus", "reference_gain"):
        assert worse[name] <= better[name]
    for name in PENALTIES:
        assert worse[name] >= better[name]


@given(history=HISTORIES, flags=SOME_FLAGS, latency_s=LATENCIES_S, count=st.integers(1, 20))
def test_more_throughput_never_pays_less(
    history: list[tuple[float, float]], flags: RewardFlags, latency_s: float, count: int
) -> None:
    """Of equal latencies, so that only throughput differs."""
    hybrid = after_history([(gap_s, latency_s) for gap_s, _ in history], flags)
    less, more = after_and_then(hybrid, [latency_s] * count), after_and_then(hybrid, [latency_s] * (count + 1))
    assert more["total_reward"] >= less["total_reward"] - 1e-9
    if history:
        assert more["throughput"] > less["throughput"]
        assert more["total_reward"] > less["total_reward"]


@given(loads=LOADS, data=st.data(), latency_s=LATENCIES_S)
def test_more_imbalance_never_pays_more(loads: list[float], data: st.DataObject, latency_s: float) -> None:
    """Load moves from a replica that has less to one that has more."""
    low, high = sorted(data.draw(st.permutations(range(len(loads))))[:2], key=loads.__getitem__)
    moved = list(loads)
    amount = data.draw(st.floats(0.0, 1.0)) * loads[low]
    moved[low], moved[high] = loads[low] - amount, loads[high] + amount
    hybrid = after_history([(1.0, 6.0)], FLAGS)
    before, after = after_and_then(hybrid, [latency_s], loads), after_and_then(hybrid, [latency_s], moved)
    assert after["total_reward"] <= before["total_reward"] + 1e-9
    if amount > 1e-3:
        assert after["total_reward"] < before["total_reward"]
        assert after["balance_penalty"] > before["balance_penalty"]
        assert after["queue_penalty"] > before["queue_penalty"]


BIG = st.floats(0.0, 1e300)


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 1e12), BIG, BIG, BIG), min_size=1, max_size=6),
    flags=SOME_FLAGS,
    scale=st.floats(0.0, 10.0),
)
def test_finite_for_any_finite_input(
    steps: list[tuple[float, float, float, float]], flags: RewardFlags, scale: float
) -> None:
    hybrid, now_s = HybridReward(flags), 0.0
    for gap_s, latency_s, load, queue in steps:
        now_s += gap_s
        parts = hybrid.reward(now_s, [(now_s, latency_s)], [load, 1.0], [queue, 0.0], penalty_scale=scale)
        assert all(math.isfinite(value) for value in parts.values()), parts


def test_the_total_is_the_documented_sum_and_unclipped() -> None:
    hybrid = after_history([(1.0, 5.0), (1.0, 8.0)], FLAGS)
    parts = hybrid.reward(3.0, [(2.5, 500.0)], [1.0, 3.0], [0.0, 9.0], penalty_scale=0.5)
    expected = 0.8 * parts["absolute_score"] + 0.2 * parts["delta_score"]
    expected += parts["latency_bonus"] + parts["reference_gain"] - sum(parts[name] for name in PENALTIES)
    assert parts["total_reward"] == parts["raw_reward"] == pytest.approx(expected)
    assert parts["latency"] == pytest.approx((5.0 + 8.0 + 500.0) / 3)
    assert parts["balance_penalty"] == pytest.approx(0.5 * 0.15 * 0.5)
    assert parts["total_reward"] < -4.0  # where an earlier attempt stopped counting

    clipped = HybridReward(RewardFlags(reward_clip_low=-0.1, reward_clip_high=0.1))
    seen = [clipped.reward(t, [(t, latency_s)], EVEN, EVEN) for t, latency_s in ((1.0, 1e4), (100.0, 1e-3))]
    assert [parts["total_reward"] for parts in seen] == [-0.1, 0.1]
    assert seen[0]["raw_reward"] < -0.1 < 0.1 < seen[1]["raw_reward"]


def test_nothing_completed_yet() -> None:
    parts = HybridReward(FLAGS).reward(1.0, [], [1.0, 3.0], [0.0, 0.0])
    assert parts["latency_is_known"] == 0.0
    assert parts["total_reward"] == pytest.approx(-0.15 * 0.5)
    assert {name for name, value in parts.items() if value} == {"balance_penalty", "raw_reward", "total_reward"}


def test_the_window_slides_and_falls_when_nothing_completes() -> None:
    hybrid = after_history([(1.0, 20.0)] * 30 + [(1.0, 2.0)] * 12, RewardFlags(reward_window_s=10.0))
    now_s = 42.0
    parts = hybrid.reward(now_s, [], EVEN, EVEN)
    assert parts["latency"] == pytest.approx(2.0)  # the long ones left the window
    assert parts["throughput"] == pytest.approx(1.0)
    silent = [hybrid.reward(now_s + wait_s, [], EVEN, EVEN) for wait_s in (3.0, 6.0, 12.0)]
    throughputs = [1.0] + [parts["throughput"] for parts in silent]
    assert all(after < before for before, after in pairwise(throughputs))
    assert all(parts["latency"] == 2.0 and parts["latency_is_known"] for parts in silent)  # silence does not pay
    assert throughputs[-1] == 0.0


def test_adaptive_target_rises_at_once_and_falls_slowly() -> None:
    flags = RewardFlags(throughput_target=0.0, alpha=0.0, reward_window_s=10.0)
    hybrid = after_history([(1.0, 5.0)] * 50, flags)
    assert after_and_then(hybrid, [5.0])["absolute_score"] == pytest.approx(1.0)
    assert after_and_then(hybrid, [5.0] * 11)["absolute_score"] == pytest.approx(2.0)  # better than ever: not capped
    for _ in range(30):
        now_s = hybrid.state_dict()["now_s"] + 9.0
        parts = hybrid.reward(now_s, [(now_s, 5.0)], EVEN, EVEN)
    # 2 in 10 s, against a target that has come down by a hundredth of the way at each decision.
    assert parts["absolute_score"] == pytest.approx(0.2 / (0.2 + 0.8 * 0.99**29), rel=1e-2)


def test_the_reference_is_the_own_past() -> None:
    own = after_history([(1.0, 8.0)] * 5, FLAGS)
    assert own.reward(20.0, [], EVEN, EVEN)["reference_gain"] == pytest.approx(0.0)
    assert own.reward(60.0, [(60.0, 4.0)], EVEN, EVEN)["reference_gain"] == pytest.approx(0.1 * (8.0 - 4.0) / 8.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", value) for value in (-1.0, math.nan, math.inf)),
        *((name, 0.0) for name in ("sigma", "latency_threshold", "reward_window_s")),
        ("reward_clip_low", 2.0),
        ("reward_clip_high", math.nan),
    ],
)
def test_bad_flags_are_named(name: str, value: float) -> None:
    """All ranges: tests/flags/test_flags.py."""
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        HybridReward(RewardFlags(**{"reward_clip_high": 1.0, name: value}))  # type: ignore[arg-type]


def test_bad_inputs_are_named() -> None:
    def rewarded(now_s: float = 5.0, completion: Any = (5.0, 1.0), loads: Any = EVEN, **more: float) -> None:
        hybrid = HybridReward(FLAGS)
        hybrid.reward(4.0, [(3.0, 1.0)], EVEN, EVEN)
        hybrid.reward(now_s, [completion], loads, EVEN, **more)

    rewarded()
    bad_arguments: dict[str, list[dict[str, Any]]] = {
        "now_s": [{"now_s": 3.0}, {"now_s": math.nan}, {"now_s": math.inf}],
        "latency_s": [{"completion": (5.0, math.nan)}, {"completion": (5.0, -1.0)}, {"completion": (5.0, math.inf)}],
        "completed_at_s": [{"completion": (5.1, 1.0)}, {"completion": (math.nan, 1.0)}],
        "loads": [{"loads": []}, {"loads": [math.nan, 1.0]}, {"loads": [1.0, -1.0]}, {"loads": [math.inf, 1.0]}],
        "penalty_scale": [{"penalty_scale": -1.0}, {"penalty_scale": math.nan}],
    }
    for name, bad in bad_arguments.items():
        for arguments in bad:
            with pytest.raises(ValueError, match=f"{name} must be"):
                rewarded(**arguments)


@given(history=HISTORIES, more=HISTORIES, flags=SOME_FLAGS)
@settings(max_examples=30)
def test_it_continues_from_its_state(history: Any, more: Any, flags: RewardFlags) -> None:
    hybrid, restored = after_history(history, flags), HybridReward(flags)
    state = hybrid.state_dict()
    restored.load_state_dict(state)
    kept = copy.deepcopy(state)
    now_s = state["now_s"]
    for gap_s, latency_s in more:
        now_s += gap_s
        step = (now_s, [(now_s, latency_s)], [1.0, latency_s], EVEN)
        assert hybrid.reward(*step) == restored.reward(*step)
    assert state == kept  # a state is a copy
    for each in (hybrid, restored):
        each.start_run()
    assert hybrid.reward(0.5, [(0.5, 1.0)], EVEN, EVEN) == restored.reward(0.5, [(0.5, 1.0)], EVEN, EVEN)
