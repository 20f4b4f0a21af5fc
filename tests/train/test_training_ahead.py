"""Training that looks ahead: runs that come out the same however they are made."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from training_runs import SMALL, clusters_of, learned, small, train

from vidur_ppo_plugin.train.engines import LocalEngine

AHEAD: dict[str, Any] = {
    "look_ahead": {"requests_per_replica": 4, "every": 8},
    "mixture": [{**part, "tail_preference": [0.0, 1.0]} for part in SMALL["mixture"]],
}


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
