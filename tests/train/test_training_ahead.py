"""Training that looks ahead: its rewards by hand, and runs that come out the same however they are made."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import SMALL, clusters_of, learned, small, train

from vidur_ppo_plugin.train.engines import LocalEngine
from vidur_ppo_plugin.train.look_ahead import LookAhead, rewards
from vidur_ppo_plugin.twin.look_ahead import Prospects

AHEAD: dict[str, Any] = {
    "look_ahead": {"requests_per_replica": 4, "every": 8},
    "mixture": [{**part, "tail_preference": [0.0, 1.0]} for part in SMALL["mixture"]],
}
MEAN_ONLY = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), latency_squared=(0.0, 0.0), first_token=(0.0, 0.0))


def prospects(latencies: list[list[float]], num_requests: float = 10.0) -> Prospects:
    """Of clusters whose total latency on each replica is given; the other costs are the same everywhere."""
    sums = np.ones((len(latencies), len(latencies[0]), 4))
    sums[..., 0] = latencies
    return Prospects(sums, np.full(len(latencies), num_requests))


def test_a_reward_counts_in_standard_deviations_of_the_cluster() -> None:
    # In the second cluster replicas differ by a hundred times as much; what is learned from it is the same.
    decisions = [prospects([[18.0, 22.0], [1800.0, 2200.0]]), prospects([[21.0, 19.0], [2100.0, 1900.0]])]
    every = rewards(decisions, MEAN_ONLY.weights([0.0, 0.0]))
    apart = np.array([[1.0, -1.0], [-0.5, 0.5]])
    expected = apart / np.sqrt(np.mean(apart**2))
    for cluster in every:
        np.testing.assert_allclose(cluster - cluster.mean(axis=1, keepdims=True), expected)


def test_rewards_know_no_unit() -> None:
    rng = np.random.default_rng(0)
    weights = LookAhead(requests_per_replica=1).weights([0.0, 0.7])
    seen = [Prospects(rng.random((2, 3, 4)) + 9.0, np.full(2, 8.0)) for _ in range(5)]
    slower = [Prospects(one.sums * np.array([10.0, 100.0, 10.0, 100.0]), one.num_requests) for one in seen]
    np.testing.assert_allclose(rewards(slower, weights), rewards(seen, weights))


def test_a_single_bad_future_is_bounded() -> None:
    ordinary = [prospects([[20.0, 20.0]]) for _ in range(200)]
    every = rewards([*ordinary, prospects([[20.0, 9000.0]])], MEAN_ONLY.weights([0.0]))
    assert every[0, -1, 0] - every[0, -1, 1] == pytest.approx(20.0)


def test_the_preference_moves_the_weights() -> None:
    ahead = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), first_token_squared=(0.0, 2.0))
    mean, middle, tail = ahead.weights([0.0, 0.5, 1.0])
    assert mean.sum() == pytest.approx(1.0) and tail.sum() == pytest.approx(1.0)
    assert mean[3] == 0.0 < middle[3] < tail[3]
    assert mean[0] > middle[0] > tail[0]


def test_less_of_the_preference_counts_with_a_smaller_tail_weight() -> None:
    ahead = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), first_token_squared=(0.0, 2.0))
    costs = np.array([[[10.0, 100.0, 2.0, 4.0], [9.0, 90.0, 3.0, 9.0]]])  # faster on the whole, first token later
    seen = [Prospects(costs, np.array([4.0]))]

    def prefers_second(tail_weight: float) -> bool:
        every = ahead.rewards(seen, [1.0], tail_weight=tail_weight)
        return bool(every[0, 0, 1] > every[0, 0, 0])

    assert prefers_second(0.0) and not prefers_second(1.0)
    np.testing.assert_allclose(ahead.rewards(seen, [1.0], tail_weight=0.5), ahead.rewards(seen, [0.5]))


def test_boldness_makes_differences_count_for_more() -> None:
    ahead = LookAhead(requests_per_replica=1, boldness=(4.0, 1.0))
    seen = [prospects([[18.0, 22.0]] * 3)]
    bold, middle, careful = (np.ptp(every) for every in ahead.rewards(seen, [0.0, 0.5, 1.0]))
    assert (bold, middle) == (pytest.approx(4 * careful), pytest.approx(2 * careful))


def test_boldness_of_a_part_reaches_its_rewards(tmp_path: Path) -> None:
    def gains(boldness: float) -> float:
        parts = [{**part, "boldness": boldness} for part in AHEAD["mixture"]]
        config = small(**{**AHEAD, "mixture": parts, "decisions": 128})
        train(config, tmp_path / str(boldness))
        header, row, *_ = (
            line.split(",") for line in (tmp_path / str(boldness) / "ppo_metrics.csv").read_text().splitlines()
        )
        return float(dict(zip(header, row, strict=True))["look_ahead"])

    assert gains(3.0) == pytest.approx(3.0 * gains(1.0))


def test_only_some_decisions_are_learned_from(tmp_path: Path) -> None:
    config = small(**AHEAD)
    outcome = train(config, tmp_path)
    assert outcome.decisions == 512 and outcome.updates == 4
    header, *rows = (line.split(",") for line in (tmp_path / "ppo_metrics.csv").read_text().splitlines())
    figures = [dict(zip(header, row, strict=True)) for row in rows]
    assert all(float(row["look_ahead"]) < 0 for row in figures if row["look_ahead"])
    assert float(figures[0]["grad_norm"]) > 0


def test_workers_and_a_lost_one_change_nothing(tmp_path: Path) -> None:
    config = small(**AHEAD)
    train(config, tmp_path / "one", num_jobs=2)
    engine = LocalEngine(config, clusters_of(config), workers=2)
    run, calls = engine.run, []

    def run_and_kill(jobs: Any, weights: Any) -> list[Any]:
        calls.append(jobs)
        if len(calls) == 3:
            os.kill(engine.process_ids[0], signal.SIGKILL)
        return run(jobs, weights)

    engine.run = run_and_kill  # type: ignore[method-assign]
    try:
        train(config, tmp_path / "two", engine=engine, num_jobs=2)
    finally:
        engine.close()
    assert learned(tmp_path / "one") == learned(tmp_path / "two")


def test_resuming_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    train(small(**AHEAD), tmp_path / "whole")
    train(small(**AHEAD, decisions=256), tmp_path / "parts")
    train(small(**AHEAD), tmp_path / "parts", resume=True)
    assert learned(tmp_path / "whole") == learned(tmp_path / "parts")
