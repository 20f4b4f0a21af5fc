"""The snapshot of real replicas: what the router sent and saw, and what reports add to it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.routing.snapshot import ROWS
from vidur_ppo_plugin.serve.breaker import CLOSED, HALF_OPEN, OPEN, CircuitBreaker
from vidur_ppo_plugin.serve.reports import Report
from vidur_ppo_plugin.serve.source import RequestInFlight, VllmReplicaSource


def source_of(count: int, **options: int) -> VllmReplicaSource:
    source = VllmReplicaSource(**options)
    for index in range(count):
        source.add(f"http://{index}")
    return source


def test_a_request_goes_from_prefill_to_context_and_away() -> None:
    source = source_of(2)
    replica = source.replicas[1]
    flight = source.on_dispatch(replica, 100, 1.0, is_hidden=False)
    seen = source.snapshot(1.5)
    assert seen.outstanding_requests.tolist() == [0, 1]
    assert seen.prefill_tokens.tolist() == [0, 100]
    assert seen.context_tokens.tolist() == [0, 0]
    source.on_tokens(flight, 1, 2.0)
    source.on_tokens(flight, 9, 2.5)
    seen = source.snapshot(2.5)
    assert seen.prefill_tokens[1] == 0 and seen.context_tokens[1] == 110 and seen.decoded_tokens[1] == 10
    assert seen.kv_blocks_used[1] == 110 / 16
    source.on_end(flight, 4.0, completed_tokens=10)
    seen = source.snapshot(4.0)
    assert seen.values[:4].sum() == 0 and seen.decoded_tokens.sum() == 0
    assert seen.recent_latency_s.tolist() == [0, 3.0]
    assert seen.completion_rate_per_s[1] == pytest.approx(0.1)
    assert source.snapshot(14.0).completion_rate_per_s[1] == pytest.approx(0.1 / math.e)
    assert seen.expected_decode_tokens == 10
    assert seen.token_time_s[1] == pytest.approx(2.0 / 9)
    assert seen.typical_prompt_tokens.tolist() == [0, 100]


def test_a_request_that_failed_leaves_no_trace_in_averages() -> None:
    source = source_of(1)
    flight = source.on_dispatch(source.replicas[0], 100, 0.0, is_hidden=False)
    source.on_end(flight, 5.0, completed_tokens=None)
    seen = source.snapshot(5.0)
    assert seen.outstanding_requests[0] == seen.prefill_tokens[0] == seen.recent_latency_s[0] == 0
    assert seen.expected_decode_tokens == 128


def test_without_reports_all_but_the_first_that_shows_nothing_wait() -> None:
    source = source_of(1, num_waiting_slots=2)
    flights = [source.on_dispatch(source.replicas[0], 10 * (k + 1), float(k), is_hidden=False) for k in range(4)]
    seen = source.snapshot(10.0)
    assert seen.waiting_requests[0] == 3
    assert seen.oldest_wait_s[0] == 9.0
    assert seen.waiting[:, 0].tolist() == [20, 30, 9, 8]
    source.on_tokens(flights[0], 1, 10.0)
    assert source.snapshot(10.0).waiting_requests[0] == 2


def test_a_report_says_who_waits_what_is_used_and_what_others_sent() -> None:
    source = source_of(1)
    replica = source.replicas[0]
    for _ in range(4):
        source.on_dispatch(replica, 100, 0.0, is_hidden=False)
    source.request_info(100, 0.0)
    source.on_report(replica, Report(running=5, waiting=3, kv_used_fraction=0.5, kv_blocks_total=200, kv_block_size=16))
    seen = source.snapshot(1.0)
    assert seen.outstanding_requests[0] == 8  # four of ours, four of others
    assert seen.waiting_requests[0] == 3 and seen.running_requests[0] == 5
    assert (seen.kv_blocks_used[0], seen.kv_blocks_total[0]) == (100, 200)
    assert seen.context_tokens[0] == 1600
    # Stale: back to what we know ourselves.
    source.on_stale(replica)
    seen = source.snapshot(1.0)
    assert seen.outstanding_requests[0] == 4 and seen.context_tokens[0] == 0 and seen.kv_blocks_used[0] == 0


def test_between_reports_newcomers_wait_behind_a_queue_and_not_without_one() -> None:
    source = source_of(1)
    replica = source.replicas[0]
    source.on_report(replica, Report(running=0, waiting=0))
    source.on_dispatch(replica, 10, 0.0, is_hidden=False)
    assert source.snapshot(0.0).waiting_requests[0] == 0
    source.on_report(replica, Report(running=0, waiting=1))
    source.on_dispatch(replica, 10, 0.0, is_hidden=False)
    assert source.snapshot(0.0).waiting_requests[0] == 2 - 1 + 0  # one of two unstarted is being worked on


def test_progress_that_cannot_be_seen_is_estimated_by_the_backends_times() -> None:
    source = source_of(1)
    replica = source.replicas[0]
    source.on_report(replica, Report(running=0, waiting=0, ttft_s=(1.0, 10.0), tbt_s=(2.0, 100.0)))
    assert (replica.ttft_s, replica.tbt_s) == (0.1, 0.02)
    source.on_report(replica, Report(running=0, waiting=0, ttft_s=(3.0, 14.0), tbt_s=(2.0, 100.0)))
    assert (replica.ttft_s, replica.tbt_s) == (0.5, 0.02)  # of what came since; nothing came for the other
    source.on_dispatch(replica, 100, 0.0, is_hidden=True, max_tokens=30)
    source.estimate_hidden(replica, 0.4)
    assert source.snapshot(0.4).prefill_tokens[0] == 100
    source.estimate_hidden(replica, 0.7)
    assert source.snapshot(0.7).decoded_tokens[0] == 1 + 10 or source.snapshot(0.7).decoded_tokens[0] == 10
    source.estimate_hidden(replica, 100.0)
    assert source.snapshot(100.0).decoded_tokens[0] == 30


def test_dimensions_follow_the_replicas_that_are_shown() -> None:
    source = source_of(3, num_waiting_slots=4)
    assert source.snapshot(0.0).values.shape == (len(ROWS), 3) and source.snapshot(0.0).waiting.shape == (8, 3)
    assert source.snapshot(0.0, source.replicas[1:]).num_replicas == 2
    source.remove(source.replicas[0])
    assert source.snapshot(0.0).num_replicas == source.num_replicas == 2


@given(st.lists(st.tuples(st.sampled_from("dtehrs"), st.integers(0, 10)), max_size=80))
def test_counters_never_go_wrong_whatever_happens(events: list[tuple[str, int]]) -> None:
    source = source_of(2, num_waiting_slots=3)
    flights: list[RequestInFlight] = []
    now_s = 0.0
    for kind, number in events:
        now_s += 0.1
        replica = source.replicas[number % 2]
        if kind == "d":
            flights.append(source.on_dispatch(replica, 1 + number, now_s, is_hidden=number % 3 == 0, max_tokens=9))
        elif kind == "t" and flights:
            source.on_tokens(flights[number % len(flights)], number, now_s)
        elif kind == "e" and flights:
            source.on_end(flights.pop(number % len(flights)), now_s, completed_tokens=number if number % 2 else None)
        elif kind == "h":
            source.estimate_hidden(replica, now_s)
        elif kind == "r":
            source.on_report(replica, Report(running=number, waiting=number // 2, kv_used_fraction=number / 10))
        elif kind == "s":
            source.on_stale(replica)
        seen = source.snapshot(now_s)
        assert (seen.values >= 0).all()
        assert (seen.waiting_requests >= 0).all()
        assert (seen.kv_blocks_used <= seen.kv_blocks_total).all()
    for flight in flights:
        source.on_end(flight, now_s, completed_tokens=None)
    for replica in source.replicas:
        source.on_stale(replica)
    seen = source.snapshot(now_s)
    for row in ("outstanding_requests", "running_requests", "prefill_tokens", "context_tokens", "decoded_tokens"):
        assert getattr(seen, row).tolist() == [0, 0], row


# --- The breaker ---


def test_the_breaker_opens_tries_and_closes() -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=1.0, max_cooldown_s=3.0)
    breaker.on_failure(0.0)
    assert breaker.allows(0.0)
    breaker.on_failure(0.0)
    assert breaker.state == OPEN and not breaker.allows(0.9) and breaker.allows(1.0)
    breaker.on_send(1.0)
    assert breaker.state == HALF_OPEN and not breaker.allows(1.1)  # one at a time
    breaker.on_failure(1.2)
    assert not breaker.allows(3.1) and breaker.allows(3.2)  # twice as long
    breaker.on_send(3.2)
    breaker.on_given_up(3.3)
    assert breaker.allows(3.3)
    breaker.on_send(3.3)
    breaker.on_success()
    assert breaker.state == CLOSED
    breaker.on_failure(4.0)
    assert breaker.allows(4.0)
