"""Training that looks ahead: its rewards by hand, and runs that come out the same however they are made."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import SMALL, clusters_of, learned, small, train

from vidur_ppo_plugin.routing.snapshot import FloatArray
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


def nothing_at_once(seen: list[Prospects]) -> FloatArray:
    """Marginal delays that are the same on all replicas."""
    clusters, replicas, _ = seen[0].sums.shape
    return np.ones((clusters, len(seen), replicas))


def test_a_reward_counts_in_standard_deviations_of_the_cluster() -> None:
    # In the second cluster replicas differ by a hundred times as much; what is learned from it is the same.
    decisions = [prospects([[18.0, 22.0], [1800.0, 2200.0]]), prospects([[21.0, 19.0], [2100.0, 1900.0]])]
    every = rewards(decisions, nothing_at_once(decisions), MEAN_ONLY.weights([0.0, 0.0]))
    apart = np.array([[1.0, -1.0], [-0.5, 0.5]])
    expected = apart / np.sqrt(np.mean(apart**2))
    for cluster in every:
        np.testing.assert_allclose(cluster - cluster.mean(axis=1, keepdims=True), expected)


def test_rewards_know_no_unit() -> None:
    rng = np.random.default_rng(0)
    weights = LookAhead(requests_per_replica=1, marginal_delay=(0.5, 1.0)).weights([0.0, 0.7])
    seen = [Prospects(rng.random((2, 3, 4)) + 9.0, np.full(2, 8.0)) for _ in range(5)]
    slower = [Prospects(one.sums * np.array([10.0, 100.0, 10.0, 100.0]), one.num_requests) for one in seen]
    at_once_s = rng.random((2, 5, 3))
    np.testing.assert_allclose(rewards(slower, 10.0 * at_once_s, weights), rewards(seen, at_once_s, weights))


def test_a_single_bad_future_is_bounded() -> None:
    ordinary = [prospects([[20.0, 20.0]]) for _ in range(200)]
    seen = [*ordinary, prospects([[20.0, 9000.0]])]
    every = rewards(seen, nothing_at_once(seen), MEAN_ONLY.weights([0.0]))
    assert every[0, -1, 0] - every[0, -1, 1] == pytest.approx(20.0)


def test_the_preference_moves_the_weights() -> None:
    ahead = LookAhead(requests_per_replica=1, latency=(1.0, 1.0), first_token_squared=(0.0, 2.0))
    mean, middle, tail = ahead.weights([0.0, 0.5, 1.0])
    assert mean.sum() == pytest.approx(1.0) and tail.sum() == pytest.approx(1.0)
    assert mean[3] == 0.0 < middle[3] < tail[3]
    assert mean[0] > middle[0] > tail[0]


def test_marginal_delay_counts_as_latency_does() -> None:
    ahead = LookAhead(requests_per_replica=1, first_token=(0.0, 0.0), marginal_delay=(1.0, 0.0))
    seen = [prospects([[18.0, 22.0]] * 2), prospects([[22.0, 18.0]] * 2)]
    at_once_s = np.array([[[10.0, 0.0], [0.0, 1.0]]] * 2)
    both, looking = rewards(seen, at_once_s, ahead.weights([0.0, 1.0]))
    # On the replicas: 18 + 10 against 22 + 0 seconds, then 22 + 0 against 18 + 1. The second cluster only looks ahead.
    np.testing.assert_allclose(np.diff(both).ravel(), np.array([6.0, 3.0]) / np.sqrt(np.mean([9.0, 2.25])))
    np.testing.assert_allclose(np.diff(looking).ravel(), [-2.0, 2.0])


def test_boldness_makes_differences_count_for_more() -> None:
    ahead = LookAhead(requests_per_replica=1, boldness=(4.0, 1.0))
    seen = [prospects([[18.0, 22.0]] * 3)]
    bold, middle, careful = (np.ptp(every) for every in ahead.rewards(seen, nothing_at_once(seen), [0.0, 0.5, 1.0]))
    assert (bold, middle) == (pytest.approx(4 * careful), pytest.approx(2 * careful))


def test_boldness_of_a_part_reaches_its_rewards(tmp_path: Path) -> None:
    def gains(boldness: float) -> float:
        parts = [{**part, "look_ahead": {"boldness": [boldness, boldness]}} for part in AHEAD["mixture"]]
        config = small(**{**AHEAD, "mixture": parts, "decisions": 128})
        train(config, tmp_path / str(boldness))
        header, row, *_ = (
            line.split(",") for line in (tmp_path / str(boldness) / "ppo_metrics.csv").read_text().splitlines()
        )
        return float(dict(zip(header, row, strict=True))["look_ahead"])

    assert gains(3.0) == pytest.approx(3.0 * gains(1.0))


def test_marginal_delay_comes_from_the_decisions_that_are_learned_from(tmp_path: Path) -> None:
    def trained(name: str, **ahead: Any) -> Any:
        config = small(**{**AHEAD, "look_ahead": {**AHEAD["look_ahead"], **ahead}, "decisions": 128})
        train(config, tmp_path / name)
        return learned(tmp_path / name)

    alone, both = trained("alone"), trained("both", marginal_delay=[1.0, 1.0])
    assert alone != both
    # With one decision after the other nothing lies between those that are learned from.
    assert trained("each", marginal_delay=[1.0, 1.0], every=1) != both


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
