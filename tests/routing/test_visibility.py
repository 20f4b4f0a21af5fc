"""What a router sees: old reports with its own dispatches added, and who takes new requests."""

import random

import numpy as np
import pytest

from vidur_ppo_plugin.flags import Drain
from vidur_ppo_plugin.routing import heuristics
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK, build_router
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility

OUTSTANDING, PREFILL, CONTEXT = ROW["outstanding_requests"], ROW["prefill_tokens"], ROW["context_tokens"]


def snapshot(now_s: float, outstanding: list[float], prefill: list[float] | None = None) -> ClusterSnapshot:
    values = np.zeros((len(ROWS), len(outstanding)))
    values[OUTSTANDING] = outstanding
    values[PREFILL] = prefill or [0.0] * len(outstanding)
    values[ROW["kv_blocks_total"]] = 1000
    values[ROW["speed_factor"]] = 1
    return ClusterSnapshot(now_s, values, kv_block_size=16, expected_decode_tokens=100.0)


def test_without_a_delay_the_truth_is_seen() -> None:
    truth = snapshot(1.0, [3, 4])
    assert Visibility().view(truth) is truth
    assert truth.available is None
    assert Visibility().is_clear and not Visibility(report_delay_s=1.0).is_clear


def test_a_report_is_seen_when_it_is_old_enough() -> None:
    visibility = Visibility(report_delay_s=0.5)
    seen = [
        visibility.view(snapshot(now_s, [number, 0])).outstanding_requests[0]
        for now_s, number in ((0.0, 0), (0.3, 3), (0.6, 6), (0.8, 8), (1.2, 12), (9.0, 90))
    ]
    # At 0.6 the newest report that is half a second old is that of 0; at 0.8 of 0.3; at 1.2 of 0.6; at 9 of 1.2.
    assert seen == [0, 0, 0, 3, 6, 12]


def test_own_dispatches_are_known_at_once_and_counted_once() -> None:
    visibility = Visibility(report_delay_s=0.5)
    visibility.view(snapshot(0.0, [0, 0]))
    visibility.on_dispatch(1, 700)
    second = visibility.view(snapshot(0.1, [0, 1], [0.0, 700.0]))
    assert second.outstanding_requests.tolist() == [0, 1]  # of the report at 0, plus the request just sent
    assert second.prefill_tokens.tolist() == [0, 700]
    assert second.typical_prompt_tokens.tolist() == [0, 700]
    visibility.on_dispatch(1, 50)
    # The report of 0.1 has the first request in it, half prefilled by then; the second comes on top.
    third = visibility.view(snapshot(0.7, [0, 2], [0.0, 10.0]))
    assert third.outstanding_requests.tolist() == [0, 2]
    assert third.prefill_tokens.tolist() == [0, 750]
    assert third.now_s == 0.7


def test_the_truth_is_not_touched() -> None:
    visibility = Visibility(report_delay_s=0.5)
    truth = snapshot(0.0, [0, 0])
    visibility.view(truth)
    visibility.on_dispatch(0, 9)
    visibility.view(snapshot(0.1, [1, 0]))
    assert truth.outstanding_requests.tolist() == [0, 0]


def test_a_drained_replica_is_not_available_meanwhile() -> None:
    visibility = Visibility(drains=(Drain(1, 10.0, 20.0), Drain(0, 15.0, 16.0)))
    seen = {now_s: visibility.view(snapshot(now_s, [0, 0, 0])).available for now_s in (9.9, 10.0, 15.0, 19.9, 20.0)}
    lists = {now_s: None if mask is None else mask.tolist() for now_s, mask in seen.items()}
    assert lists == {
        9.9: None,
        10.0: [True, False, True],
        15.0: [False, False, True],
        19.9: [True, False, True],
        20.0: None,
    }


def test_requests_must_go_somewhere() -> None:
    assert Visibility(drains=(Drain(0, 0.0, 1.0), Drain(1, 0.0, 1.0))).available(0.5, 2) is None


@pytest.mark.parametrize("name", [*STOCK, *HEURISTICS])
def test_no_router_uses_a_drained_replica(name: str) -> None:
    """Replica 2 is empty and the others are not; for size_split it is the only one for long prompts."""
    options = {"threshold_tokens": 50, "num_long_replicas": 1} if name == "size_split" else {}
    router = build_router(name, seed=1, delay_model=DelayModel(1e-4, 1e-4, 1e-7), options=options)
    visibility = Visibility(drains=(Drain(2, 0.0, 100.0),))
    chosen = {router(visibility.view(snapshot(1.0, [5, 5, 0])), RequestInfo(100, 1.0)) for _ in range(40)}
    assert chosen <= {0, 1} and chosen


def test_two_choices_are_drawn_from_the_available() -> None:
    seen = snapshot(1.0, [5, 4, 3, 0])
    seen.available = np.array([True, True, True, False])
    costs = [heuristics.drawn_cost(seen.outstanding_requests, seen, 2, random.Random(seed)) for seed in range(30)]
    assert all(np.isinf(cost[3]) and np.isfinite(cost[:3]).sum() == 2 for cost in costs)
