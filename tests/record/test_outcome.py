"""The summary of a run, against figures worked out by hand."""

import math

import pytest

from vidur_ppo_plugin.record.outcome import Distribution, RequestOutcome, RunOutcome, format_summary


def outcome(requests: list[RequestOutcome], num_replicas: int = 2) -> RunOutcome:
    return RunOutcome("least_tokens", num_replicas, wall_s=1.5, output_dir="out/x", requests=requests)


SERVED = [
    RequestOutcome(1.0, 100, 10, 0, first_token_at_s=1.5, completed_at_s=3.0, num_restarts=0),
    RequestOutcome(2.0, 200, 30, 1, first_token_at_s=3.5, completed_at_s=6.0, num_restarts=2),
]
UNSERVED = RequestOutcome(5.0, 50, 5, 1, first_token_at_s=None, completed_at_s=None, num_restarts=0)


def test_latencies_are_of_completed_requests() -> None:
    run = outcome([*SERVED, UNSERVED])
    assert run.ttft_s.mean == pytest.approx((0.5 + 1.5) / 2)
    assert run.e2e_s.mean == pytest.approx((2.0 + 4.0) / 2)
    assert run.e2e_s.p50 == pytest.approx(3.0)
    assert run.duration_s == pytest.approx(5.0)
    assert run.replica_shares == pytest.approx([1 / 3, 2 / 3])


def test_percentiles() -> None:
    values = Distribution.of([float(value) for value in range(101)])
    assert (values.mean, values.p50, values.p90, values.p99) == (50, 50, 90, 99)
    assert math.isnan(Distribution.of([]).mean)


def test_summary_says_what_happened() -> None:
    text = format_summary(outcome([*SERVED, UNSERVED]))
    assert "2 of 3 requests completed" in text
    assert "0.40 requests/s, 8 output tokens/s" in text
    assert "33.3% 66.7%" in text
    assert text.splitlines()[-1].endswith("out/x")
    (preemptions,) = [line for line in text.splitlines() if line.startswith("preemptions")]
    assert preemptions.split() == ["preemptions", "2"]


def test_summary_of_nothing_and_of_many_replicas() -> None:
    assert "0 of 1 requests completed" in format_summary(outcome([UNSERVED]))
    assert "0.0% to 50.0% of 16 replicas" in format_summary(outcome(SERVED, num_replicas=16))
