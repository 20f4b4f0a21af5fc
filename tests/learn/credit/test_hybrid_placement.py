"""Hybrid, asked of the placement: what each component would be had the request gone to each replica."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.flags import HYBRID_COMPONENTS, PPOModularFlags, RewardFlags
from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards, Stretch, follow
from vidur_ppo_plugin.learn.credit.hybrid import Figures
from vidur_ppo_plugin.learn.credit.hybrid_placement import placement_rewards

#: The weights of the plan of 2025-09-18, and those of the package.
PLAN = RewardFlags(throughput_target=0.05)
FLAGS = RewardFlags()
USUAL = Figures(
    throughput=10.0,
    latency_s=4.0,
    target=10.0,
    mean_throughput=10.0,
    mean_latency_s=4.0,
    reference_latency_s=4.0,
)
EVEN = np.array([3.0, 3.0])


def test_by_hand() -> None:
    """Six in flight, 4 s each; the request adds 4 s to everybody on one replica and 11 s on the other."""
    parts = placement_rewards(USUAL, np.array([4.0, 11.0]), np.array([80.0, 80.0]), EVEN, 20.0, FLAGS)
    latency_s = np.array([(6 * 4 + 4) / 7, (6 * 4 + 11) / 7])
    throughput = 10.0 * 4.0 / latency_s
    absolute = throughput / 10.0 - 0.1 * latency_s / 6.0
    np.testing.assert_allclose(parts["absolute_score"], absolute)
    np.testing.assert_allclose(parts["delta_score"], (throughput - 10.0) / 10.0 - (latency_s - 4.0) / 4.0)
    np.testing.assert_allclose(parts["reference_gain"], -0.1 * (latency_s - 4.0) / 4.0)
    # 120 and 80 tokens, of which the mean is 100; 4 and 3 requests.
    np.testing.assert_allclose(parts["balance_penalty"], 0.15 * 0.2)
    np.testing.assert_allclose(parts["queue_penalty"], 0.02 * 0.5)
    total = (
        0.8 * parts["absolute_score"] + 0.2 * parts["delta_score"] + parts["latency_bonus"] + parts["reference_gain"]
    )
    for name in ("logistic_penalty", "latency_penalty", "balance_penalty", "queue_penalty"):
        total -= parts[name]
    np.testing.assert_allclose(parts["total_reward"], total)
    assert set(parts) == {
        "total_reward",
        *(component.name for component in HYBRID_COMPONENTS),
    }


@given(
    increases=st.lists(st.floats(0.05, 200.0), min_size=2, max_size=6, unique=True),
    in_flight=st.integers(0, 200),
    throughput=st.floats(0.1, 100.0),
    latency_s=st.floats(0.1, 60.0),
)
@pytest.mark.parametrize("flags", [FLAGS, PLAN], ids=["package", "plan"])
def test_whoever_is_delayed_more_is_never_paid_more(
    flags: RewardFlags, increases: list[float], in_flight: int, throughput: float, latency_s: float
) -> None:
    """With loads that are the same wherever it goes, the order of totals is that of marginal delays, at every load."""
    figures = Figures(
        throughput=throughput,
        latency_s=latency_s,
        target=flags.throughput_target or throughput,
        mean_throughput=throughput,
        mean_latency_s=latency_s,
        reference_latency_s=latency_s,
    )
    size = len(increases)
    queues = np.full(size, in_flight / size)
    for known in (figures, None):
        totals = placement_rewards(known, np.array(increases), np.full(size, 100.0), queues, 50.0, flags)[
            "total_reward"
        ]
        order = np.argsort(increases)
        assert np.all(np.diff(totals[order]) <= 1e-9 * np.abs(totals).max())


def test_an_emptier_replica_is_paid_more_where_delays_are_equal() -> None:
    loads, queues = np.array([500.0, 100.0]), np.array([5.0, 1.0])
    parts = placement_rewards(USUAL, np.array([4.0, 4.0]), loads, queues, 20.0, FLAGS)
    assert parts["balance_penalty"][1] < parts["balance_penalty"][0]
    assert parts["queue_penalty"][1] < parts["queue_penalty"][0]
    assert parts["total_reward"][1] > parts["total_reward"][0]
    # The curriculum's multiplier reaches penalties only.
    free = placement_rewards(USUAL, np.array([4.0, 4.0]), loads, queues, 20.0, FLAGS, penalty_scale=0.0)
    assert free["total_reward"][0] == free["total_reward"][1]


def test_nothing_given_is_changed() -> None:
    loads, queues = np.array([500.0, 100.0]), np.array([5.0, 1.0])
    placement_rewards(USUAL, np.array([4.0, 4.0]), loads, queues, 20.0, FLAGS)
    assert loads.tolist() == [500.0, 100.0] and queues.tolist() == [5.0, 1.0]


def rewards_of(**flags: Any) -> DecisionRewards:
    return DecisionRewards(PPOModularFlags(reward_mode="hybrid", **flags))


def test_what_is_recorded_is_the_window_and_what_was_learned_from() -> None:
    rewards = rewards_of()
    rewards.leaves(0, 0.0, 2.0)
    rewards.since_last_decision(3.0, np.array([80.0, 80.0]), EVEN)
    totals = rewards.of_placements(np.array([4.0, 11.0]), np.array([80.0, 80.0]), EVEN, 20.0)
    rewards.note_placement(0)
    means = rewards.take_components()
    assert means["credit_total_reward"] == pytest.approx(float(totals[0] - totals.mean())) and totals[0] > totals[1]
    assert {f"credit_{component.name}" for component in HYBRID_COMPONENTS} <= set(means)
    # The window's own levels stay: one request in three seconds, two seconds long.
    assert means["absolute_score"] == pytest.approx(1.0 - 0.1 * 2.0 / 6.0)


def test_following_a_stretch_is_deciding_one_by_one() -> None:
    """What a worker works out after many decisions is what a run pays at each."""
    rng = np.random.default_rng(0)
    moments_s = np.cumsum(rng.random(6))
    loads, queues, increases = (rng.random((6, 2)) * scale for scale in (500.0, 5.0, 20.0))
    prompts, completed_at_s = rng.integers(1, 900, 5), moments_s[2:5] - 0.01
    stretch = Stretch(
        moments_s=moments_s,
        loads=loads,
        queue_lengths=queues,
        prompt_tokens=prompts,
        requests=np.array([2, 0, 1]),
        arrived_at_s=moments_s[[2, 0, 1]],
        completed_at_s=completed_at_s[[2, 0, 1]],
        increases_s=increases[:5],
    )
    earned, every = follow(rewards_of(), 0, stretch)
    one_by_one, single = rewards_of(), []
    for step in range(5):
        if step:
            for request in range(3):
                if moments_s[step - 1] < completed_at_s[request] <= moments_s[step]:
                    one_by_one.leaves(request, moments_s[request], completed_at_s[request])
            one_by_one.since_last_decision(moments_s[step], loads[step], queues[step])
        single.append(one_by_one.of_placements(increases[step], loads[step], queues[step], int(prompts[step])))
    assert every is not None and len(earned) == 5
    np.testing.assert_array_equal(every, np.stack(single))
