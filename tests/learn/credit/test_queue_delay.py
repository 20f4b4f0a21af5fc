"""Queue delay: its sum is minus the latencies, whoever asks and however often."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards, Stretch, follow
from vidur_ppo_plugin.learn.credit.queue_delay import QueueDelay


@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=30),
    takes=st.lists(st.integers(0, 200), max_size=30),
    power=st.sampled_from([1.0, 2.0, 1.5, 0.5]),
    start_s=st.sampled_from([0.0, 12345.678]),
)
def test_queue_delay_sums_to_the_latencies(
    requests: list[tuple[int, int]], takes: list[int], power: float, start_s: float
) -> None:
    """Times on a coarse grid, so that arrivals, completions and decisions coincide."""
    arrivals = [(arrival, 0, index) for index, (arrival, _) in enumerate(requests)]
    ends = [(arrival + length, 1, index) for index, (arrival, length) in enumerate(requests)]
    events = sorted(arrivals + ends + [(time, 2, 0) for time in [*takes, 200]])
    delay, total = QueueDelay(latency_power=power), 0.0
    for time, kind, index in events:
        now_s = start_s + time / 7.0
        if kind == 0:
            delay.on_arrival(now_s, index)
        elif kind == 1:
            delay.on_completion(now_s, index)
        else:
            taken = delay.take(now_s)
            assert taken <= 0.0
            total += taken
    latencies_s = [(start_s + (a + length) / 7.0) - (start_s + a / 7.0) for a, length in requests]
    assert total == pytest.approx(-math.fsum(latency**power for latency in latencies_s), rel=1e-9, abs=1e-12)


def test_queue_delay_between_decisions() -> None:
    linear, squared = QueueDelay(), QueueDelay(latency_power=2.0)
    for delay in (linear, squared):
        delay.on_arrival(1.0, 7)
        delay.on_arrival(2.0, 8)
    assert [linear.take(3.0), squared.take(3.0)] == [-(2.0 + 1.0), -(4.0 + 1.0)]
    for delay in (linear, squared):
        delay.on_completion(4.0, 7)
    assert [linear.take(5.0), squared.take(5.0)] == [-(1.0 + 2.0), -((9.0 - 4.0) + (9.0 - 1.0))]
    with pytest.raises(ValueError, match="now_s must be"):
        linear.take(4.9)
    with pytest.raises(ValueError, match="request_id must be"):
        linear.on_completion(5.0, 7)
    with pytest.raises(ValueError, match="request_id must be"):
        linear.on_arrival(5.0, 8)
    with pytest.raises(ValueError, match="latency_power must be"):
        QueueDelay(latency_power=0.0)
    linear.start_run()
    assert linear.take(0.0) == 0.0


def test_decisions_in_a_row_are_paid_as_one_by_one() -> None:
    """Two parts of a run; a request leaves in the second part that arrived in the first."""
    arrivals, completions = [0.0, 1.0, 1.5, 4.0, 7.0], {0: 3.0, 1: 5.0, 2: 4.0, 3: 6.5}
    rewards, whole = DecisionRewards(PPOModularFlags(reward_mode="queue_delay")), QueueDelay()
    earned: list[float] = []
    for first, last in ((0, 2), (2, 4)):
        done = [k for k, at in completions.items() if arrivals[first] < at <= arrivals[last]]
        stretch = Stretch(
            moments_s=np.array(arrivals[first : last + 1]),
            loads=np.zeros((3, 2)),
            queue_lengths=np.zeros((3, 2)),
            prompt_tokens=np.ones(2, np.int64),
            requests=np.array(done, dtype=np.int64),
            arrived_at_s=np.array([arrivals[k] for k in done]),
            completed_at_s=np.array([completions[k] for k in done]),
            increases_s=None,
        )
        paid, every = follow(rewards, first, stretch)
        assert every is None
        earned += paid
    expected = []
    for number, (now_s, next_s) in enumerate(pairwise(arrivals)):
        whole.on_arrival(now_s, number)
        for at, k in sorted((at, k) for k, at in completions.items() if now_s < at <= next_s):
            whole.on_completion(at, k)
        expected.append(whole.take(next_s))
    assert earned == expected
    assert sum(earned) == pytest.approx(-sum(at - arrivals[k] for k, at in completions.items()))
