"""Whole training runs: the same result whoever does the work, wherever it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from training_runs import SMALL, clusters_of, learned, small, train

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.train.config import TrainConfig
from vidur_ppo_plugin.train.engines import LocalEngine, WorkerError
from vidur_ppo_plugin.train.episodes import FIRST_EVALUATION_SEED
from vidur_ppo_plugin.train.schema import ConfigError
from vidur_ppo_plugin.train.worker import CollectJob, EvaluateJob, GradientJob, PrepareJob


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference")
    train(small(), out)
    return out


def test_a_run_records_evaluates_and_saves(reference: Path) -> None:
    lines = (reference / "ppo_metrics.csv").read_text().splitlines()
    assert lines[0].split(",") == header(4, with_evaluation=True)
    assert len(lines) == 1 + 4 + 1  # header, updates, evaluation at the end
    row = dict(zip(lines[0].split(","), lines[2].split(","), strict=True))
    for name in ("entropy", "approx_kl", "latency_p99", "marginal_delay", "decisions_per_s", "gain_over_prior"):
        assert np.isfinite(float(row[name])), name
    assert row["value_loss"] == ""  # there is no critic
    metadata = checkpoint.verify(reference / "checkpoints" / "best")
    assert metadata["num_decisions"] == 512
    assert set(metadata["evaluation"]["changes"]) == {"mixed_long"}


def test_a_policy_is_evaluated_at_every_tail_preference(tmp_path: Path) -> None:
    evaluation = {**SMALL["evaluation"], "tail_preferences": [0.0, 1.0]}
    policy = {"rollout_len": 32, "minibatch_size": 64, "lr": 0.03}
    mixture = [{"scenario": "mixed_long", "tail_preference": [0.0, 1.0]}]
    outcome = train(small(evaluation=evaluation, policy=policy, mixture=mixture), tmp_path)
    assert outcome.best is not None and set(outcome.best.changes) == {"mixed_long@0", "mixed_long@1"}
    mean, tail = outcome.best.changes.values()
    assert mean != tail  # the policy sees what it is asked for
    assert outcome.best.score == pytest.approx((mean["e2e_mean"] + tail["e2e_mean"]) / 2)


def train_and_kill(config: TrainConfig, out: Path, when: type) -> None:
    """With two worker processes, one of which is killed before it gets its third job of a kind."""
    engine = LocalEngine(config, clusters_of(config), workers=2)
    run, seen = engine.run, []

    def run_and_kill(jobs: Any, weights: Any) -> list[Any]:
        seen.append(type(jobs[0]))
        if seen.count(when) == 3 and seen[-1] is when:
            os.kill(engine.process_ids[1], signal.SIGKILL)
        return run(jobs, weights)

    engine.run = run_and_kill  # type: ignore[method-assign]
    try:
        train(config, out, engine=engine, num_jobs=2)
        assert engine.num_replaced == 1
    finally:
        engine.close()


@pytest.mark.parametrize("when", [CollectJob, PrepareJob, GradientJob])
def test_the_result_is_the_same_whoever_works_and_a_killed_worker_is_replaced(
    reference: Path, tmp_path: Path, when: type
) -> None:
    train(small(), tmp_path / "here", num_jobs=2)
    train_and_kill(small(), tmp_path / "processes", when)
    assert learned(tmp_path / "here") == learned(tmp_path / "processes")
    # Sums in another order: nearly what one process learns, not to the last bit.
    names = ("agent", "ppo", "network", "projection.1.weight")
    one, two = (np.array(_at(learned(out), names)) for out in (reference, tmp_path / "here"))
    assert not np.array_equal(one, two)
    # (0.008 here; 0.06 if only the mixture is another.)
    assert np.linalg.norm(one - two) < 0.02 * np.linalg.norm(one)


def _at(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


def test_resuming_continues_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    train(small(decisions=256), tmp_path)
    assert learned(tmp_path) != learned(reference)
    train(small(), tmp_path, resume=True)
    assert learned(tmp_path) == learned(reference)


def test_resuming_another_configuration_is_refused(reference: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .* other values: policy \(was .*'minibatch_size': 64.*128"):
        train(small(policy={"rollout_len": 32, "minibatch_size": 128}), reference, resume=True)


def test_another_seed_learns_something_else(reference: Path, tmp_path: Path) -> None:
    train(small(seed=4), tmp_path)
    assert learned(tmp_path) != learned(reference)


def test_the_critic_trains_too(tmp_path: Path) -> None:
    policy = {"rollout_len": 32, "minibatch_size": 64, "gamma": 0.5}
    config = small(decisions=256, policy=policy, enable_critic=True)
    train(config, tmp_path / "whole")
    lines = (tmp_path / "whole" / "ppo_metrics.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[2].split(","), strict=True))
    assert float(row["value_loss"]) > 0
    # The critic's memory of every stream survives, too.
    train(small(decisions=128, policy=policy, enable_critic=True), tmp_path / "half")
    train(config, tmp_path / "half", resume=True)
    assert learned(tmp_path / "half") == learned(tmp_path / "whole")


def test_training_ends_when_evaluations_get_no_better(tmp_path: Path) -> None:
    # A step so small changes no decision: no evaluation is better than the first.
    policy = {"rollout_len": 32, "minibatch_size": 64, "lr": 1e-12}
    evaluation = {**SMALL["evaluation"], "every_decisions": 128, "patience": 2}
    outcome = train(small(decisions=10_000, policy=policy, evaluation=evaluation), tmp_path)
    assert outcome.reason == "no better evaluation"
    assert outcome.decisions == 3 * 128
    assert checkpoint.verify(tmp_path / "checkpoints" / "best")["num_decisions"] == 128


def test_a_failing_job_ends_the_run_with_its_traceback() -> None:
    config = small()
    engine = LocalEngine(config, {}, workers=1)  # knows no cluster
    try:
        with pytest.raises(WorkerError, match="KeyError: 'mixed_long'"):
            engine.run([EvaluateJob("mixed_long", "least_tokens", FIRST_EVALUATION_SEED, 20)], None)
    finally:
        engine.close()


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path) -> None:
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**SMALL, "decisions": 1_000_000}))
    command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "train", str(path), "--out", str(out), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    metrics = out / "ppo_metrics.csv"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "ended by: interrupted" in stdout
    done = checkpoint.verify(out / "checkpoints")["num_decisions"]
    path.write_text(yaml.safe_dump({**SMALL, "decisions": done + 128}))
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    train(small(decisions=done + 128), tmp_path / "whole")
    assert learned(out) == learned(tmp_path / "whole")
