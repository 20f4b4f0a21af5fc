"""The collapse alarm and the safety limit: onset, end, counts, log, mask and state."""

import logging
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.learn.alarms import CollapseAlarm, SafetyLimit


def test_alarm_starts_above_the_threshold_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    alarm = CollapseAlarm(num_replicas=4, share_threshold=0.8, window=10)
    with caplog.at_level(logging.INFO, logger="vidur_ppo_plugin"):
        assert not any(alarm.on_decision(replica) for replica in (0, 1, 2, 2, 2, 2, 2, 2, 2, 2))
        assert alarm.share == 0.8  # exactly the threshold is not above it
        assert alarm.on_decision(2)  # 9 of the last 10
        assert (alarm.active, alarm.replica, alarm.onsets, alarm.share) == (True, 2, 1, 0.9)
        assert all(alarm.on_decision(2) for _ in range(30))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "replica 2 got 90 % of the last 10 decisions (threshold 80 %)" in caplog.text

        # Over only below 0.95 x 0.8 = 7.6 of 10: at 7.
        assert [alarm.on_decision(3) for _ in range(4)] == [True, True, False, False]
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        for _ in range(9):
            alarm.on_decision(3)
        assert (alarm.replica, alarm.onsets) == (3, 2)


def test_a_share_that_hovers_is_one_alarm() -> None:
    """It starts above 50 of 100 and ends below 47.5."""
    alarm = CollapseAlarm(num_replicas=3, share_threshold=0.5, window=100)
    for replica in [0] * 51 + [1, 2] * 24 + [1]:
        alarm.on_decision(replica)
    assert alarm.active
    assert [alarm.on_decision(replica) for replica in (1, 2, 1, 2)] == [True, True, True, False]  # 50, 49, 48, 47
    assert alarm.onsets == 1


def test_alarm_counts_against_the_whole_window_from_the_start() -> None:
    """The first decisions all go to one replica: an alarm only when they exceed 0.9 x 20."""
    alarm = CollapseAlarm(num_replicas=2, window=20)
    assert [alarm.on_decision(1) for _ in range(20)] == [False] * 18 + [True] * 2


def test_one_replica_is_no_collapse() -> None:
    alarm = CollapseAlarm(num_replicas=1, window=5)
    assert not any(alarm.on_decision(0) for _ in range(50))
    assert alarm.share == 1.0


@given(
    decisions=st.lists(st.integers(0, 2), max_size=80),
    window=st.integers(1, 15),
    threshold=st.sampled_from([0.4, 0.6, 0.9]),
)
def test_alarm_agrees_with_counting(decisions: list[int], window: int, threshold: float) -> None:
    alarm = CollapseAlarm(num_replicas=3, share_threshold=threshold, window=window)
    onsets = 0
    for index, replica in enumerate(decisions):
        was_active = alarm.active
        alarm.on_decision(replica)
        recent = decisions[: index + 1][-window:]
        shares = [recent.count(each) / len(recent) for each in range(3)]
        assert alarm.share == max(shares)
        if len(recent) == window and max(shares) > threshold:
            assert alarm.active
        if alarm.active:
            assert recent.count(alarm.replica) / window >= 0.95 * threshold - 1e-9
        onsets += alarm.active and not was_active
    # An alarm may pass from one replica to another within one decision, without a pause.
    assert onsets <= alarm.onsets


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("share_threshold", {"share_threshold": 0.25}),
        ("share_threshold", {"share_threshold": 1.0}),
        ("share_threshold", {"share_threshold": math.nan}),
        ("num_replicas", {"num_replicas": 0}),
        ("window", {"window": 0}),
    ],
)
def test_alarm_names_what_is_wrong(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{bad[name]}"):
        CollapseAlarm(**{"num_replicas": 4, **bad})


def test_alarm_refuses_unknown_replicas() -> None:
    alarm = CollapseAlarm(num_replicas=4)
    for replica in (4, -1):
        with pytest.raises(ValueError, match="replica must be"):
            alarm.on_decision(replica)


def test_safety_limit_counts_and_logs_sparsely(caplog: pytest.LogCaptureFixture) -> None:
    limit = SafetyLimit(latency_limit_s=10.0)
    with caplog.at_level(logging.WARNING, logger="vidur_ppo_plugin"):
        assert [limit.on_completion(latency_s) for latency_s in (9.9, 10.0, 10.1)] == [False, False, True]
        assert "a request took 10.10 s, the limit is 10.00 s (violation 1)" in caplog.text
        assert (limit.take_violations(), limit.take_violations()) == (1, 0)
        for _ in range(8):
            limit.on_completion(99.0)
    assert limit.violations == 9
    assert limit.take_violations() == 8
    assert len(caplog.records) == 4  # violations 1, 2, 4, 8
    assert not SafetyLimit(latency_limit_s=0.0).on_completion(1e9)  # no limit


def test_safety_mask_never_masks_everyone() -> None:
    limit = SafetyLimit(latency_limit_s=10.0, mask=True)
    assert limit.allowed([0.0, 10.0, 10.1]).tolist() == [True, True, False]
    assert limit.masked_decisions == 1
    assert limit.allowed([11.0, 12.0]).tolist() == [True, True]
    assert limit.allowed([1.0, 2.0]).tolist() == [True, True]
    assert limit.masked_decisions == 1
    assert SafetyLimit(latency_limit_s=10.0).allowed([11.0, 0.0]).tolist() == [True, True]


@given(waits=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20), limit_s=st.floats(0.1, 100.0))
def test_safety_mask_keeps_those_within_the_limit(waits: list[float], limit_s: float) -> None:
    allowed = SafetyLimit(latency_limit_s=limit_s, mask=True).allowed(np.array(waits))
    assert allowed.any()
    within = [wait <= limit_s for wait in waits]
    assert allowed.tolist() == (within if any(within) else [True] * len(waits))


def test_safety_limit_names_what_is_wrong() -> None:
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="latency_limit_s must be"):
            SafetyLimit(latency_limit_s=value)
    with pytest.raises(ValueError, match="mask must be False without a latency_limit_s"):
        SafetyLimit(latency_limit_s=0.0, mask=True)
    with pytest.raises(ValueError, match="latency_s must be"):
        SafetyLimit(latency_limit_s=1.0).on_completion(math.nan)
