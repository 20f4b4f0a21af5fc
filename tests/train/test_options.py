"""What a configuration can ask for beside the usual: each option does what it says, in whole training runs."""

import contextlib
import csv
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from training_runs import SMALL, clusters_of, learned, small, train
from wandb_log import history, records

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.learn.demonstrations import PRIORS, DemonstrationBuffer, save
from vidur_ppo_plugin.learn.features import build_features
from vidur_ppo_plugin.routing.features import Observation
from vidur_ppo_plugin.scenario import load_scenario
from vidur_ppo_plugin.train.clusters import build_clusters
from vidur_ppo_plugin.train.command import train_command
from vidur_ppo_plugin.train.engines import InProcessEngine
from vidur_ppo_plugin.train.schema import ConfigError
from vidur_ppo_plugin.train.trainer import Trainer

MIXED = [{"scenario": "mixed_long", "load": [0.6, 1.0]}]
#: A replica scheduler that the twin does not have.
UNCOVERED = "mnemosyne_lrs"


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "ppo_metrics.csv").open() as file:
        return list(csv.DictReader(file))


def command(path: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "vidur_ppo_plugin.cli", "train", str(path), "--out", str(out), "--workers", "1"]
    done = subprocess.run(
        arguments, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_metrics_go_to_wandb_and_tensorboard_too(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = {"wandb_project": "p", "wandb_group": "g", "wandb_run_name": "n", "tensorboard": True}
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**SMALL, "mixture": MIXED, "decisions": 256, "record": record}))
    done = command(path, out, WANDB_MODE="offline", WANDB_SILENT="true")
    # Progress and the summary say how fast it is and how good.
    assert "decisions/s" in done.stdout and "Best evaluation after 256 decisions" in done.stdout
    assert "evaluation after 256 decisions" in done.stderr

    recorded = [float(row["entropy"]) for row in rows_of(out) if row["entropy"]]
    assert len(recorded) == 2
    (file,) = out.glob("wandb/offline-run-*/*.wandb")
    found = records(file)
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.display_name) == ("p", "g", "n")
    logged = [value for row in history(found) for key, value in row.items() if key.endswith("/entropy")]
    assert logged == pytest.approx(recorded, rel=1e-6)
    assert any(key.endswith("evaluation_score") for row in history(found) for key in row)

    events = accumulators.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("ppo/entropy")] == pytest.approx(recorded, rel=1e-6)


def test_the_terminal_shows_speed_remaining_time_and_the_best_evaluation(tmp_path: Path) -> None:
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    evaluation = {**SMALL["evaluation"], "every_decisions": 128}
    path.write_text(yaml.safe_dump({**SMALL, "mixture": MIXED, "decisions": 1024, "evaluation": evaluation}))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    arguments = [sys.executable, "-m", "vidur_ppo_plugin.cli", "train", str(path), "--out", str(out), "--workers", "1"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    assert re.search(rb"[0-9,]+/1,024 decisions.*ETA [0-9:]+.*/s.*best [-+][0-9.]+%", shown), shown.decode()


def test_a_curriculum_raises_the_load_and_survives_resuming(tmp_path: Path) -> None:
    changes = {"mixture": MIXED, "curriculum": "load=0.3,decisions=256;load=1.0", "episode_rollouts": 1}
    config = small(decisions=512, **changes)
    clusters = clusters_of(config)
    trainer = Trainer(config, clusters, InProcessEngine(config, clusters), tmp_path / "whole", num_jobs=1)
    loads, collect = [], trainer.collect

    def collect_and_look() -> Any:
        collected = collect()
        loads.append([load for episode in trainer.state.slots.episodes for load in episode.loads])
        return collected

    trainer.collect = collect_and_look  # type: ignore[method-assign]
    trainer.train()
    assert all(0.3 * 0.6 <= load <= 0.3 for part in loads[:2] for load in part)
    assert all(0.6 <= load <= 1.0 for part in loads[2:] for load in part)
    assert [float(row["curriculum_stage"]) for row in rows_of(tmp_path / "whole")[:4]] == [0, 0, 1, 1]
    train(small(decisions=128, **changes), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")


def demonstrations(path: Path) -> None:
    """The teacher always takes replica 3, or the last one."""
    config, rng = small(), np.random.default_rng(0)
    table = build_features(config.flags)
    buffer = DemonstrationBuffer(feature_hash=table.hash, teachers={"random": 1.0})
    for _ in range(300):
        replicas = rng.random((4, table.num_replica_features), dtype=np.float32)
        replicas[3, 0] += 3.0
        request = rng.random(table.num_request_features, dtype=np.float32)
        buffer.add(Observation(replicas, request), np.zeros((4, len(PRIORS))), 3)
    save(buffer.collect(), path)


def test_a_warm_start_clones_and_is_learned_from_until_it_fades(tmp_path: Path) -> None:
    path = tmp_path / "teacher.npz"
    demonstrations(path)
    policy = {**SMALL["policy"], "warm_start_file": str(path), "bc_coef": 0.5, "bc_fade_steps": 320}
    config = small(mixture=MIXED, decisions=384, policy=policy)
    train(config, tmp_path / "whole")
    losses = [row["bc_loss"] for row in rows_of(tmp_path / "whole")][:3]
    assert float(losses[0]) < 0.5  # it was cloned before: chance is log 4
    assert float(losses[1]) > 0 and losses[2] == ""  # faded
    train(small(mixture=MIXED, decisions=128, policy=policy), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")


def test_training_starts_from_a_policy(tmp_path: Path) -> None:
    policy = {**SMALL["policy"], "lr": 0.01}
    train(small(mixture=MIXED, decisions=256, policy=policy), tmp_path / "first")
    start = str(tmp_path / "first" / "checkpoints")
    # No step is made: what is evaluated is what was loaded.
    still = {**SMALL["policy"], "lr": 1e-12, "kl_ref_coef": 0.1}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**SMALL, "mixture": MIXED, "decisions": 128, "policy": still, "start_from": start}))
    assert train_command(path, out=tmp_path / "second", workers=1) == 0
    first, second = (checkpoint.load(tmp_path / name / "checkpoints") for name in ("first", "second"))
    weights = [loaded.state["agent"]["ppo"]["network"] for loaded in (first, second)]
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name].numpy(), values.numpy(), atol=1e-6, err_msg=name)
    assert second.metadata["evaluation"]["score"] == first.metadata["evaluation"]["score"]
    assert float(rows_of(tmp_path / "second")[0]["kl_reference"]) == pytest.approx(0.0, abs=1e-6)  # itself
    # What starts anew is everything but the network.
    assert second.metadata["num_decisions"] == 128
    path.write_text(json.dumps({**SMALL, "policy": {**still, "hidden_size": 32}, "start_from": start}))
    with pytest.raises(checkpoint.CheckpointError, match="hidden_size"):
        train_command(path, out=tmp_path / "third", workers=1)


def test_queue_delay_learns_with_a_critic(tmp_path: Path) -> None:
    policy = {**SMALL["policy"], "reward_mode": "queue_delay", "gamma": 0.9}
    config = small(decisions=384, policy=policy, enable_critic=True)
    train(config, tmp_path / "whole")
    row = rows_of(tmp_path / "whole")[1]
    assert float(row["queue_delay"]) < 0 and float(row["value_loss"]) > 0 and row["gain_over_prior"] == ""
    train(small(decisions=128, policy=policy, enable_critic=True), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")


@pytest.fixture
def uncovered(tmp_path: Path) -> Path:
    """A scenario that the twin does not cover."""
    source = load_scenario("mixed_long")
    flags = {**source.flags, "replica_scheduler_config_type": UNCOVERED}
    path = tmp_path / "uncovered.yaml"
    data = yaml.safe_load((Path(__file__).resolve().parents[2] / "configs/scenarios/mixed_long.yaml").read_text())
    path.write_text(yaml.safe_dump({**data, "flags": {**data.get("flags", {}), **flags}}))
    return path


def test_what_the_twin_does_not_cover_trains_in_vidur(tmp_path: Path, uncovered: Path) -> None:
    changes = {
        "mixture": [{"scenario": str(uncovered), "load": [0.5, 0.6]}],
        "evaluation": {"every_decisions": 0, "seeds": 1, "num_requests": 30, "baselines": ["least_tokens"]},
        "decisions": 64,
        "environments": 2,
    }
    with pytest.raises(ConfigError, match=f"replica_scheduler.*{UNCOVERED}.*; train with backend: vidur"):
        build_clusters(small(**changes).scenarios)
    outcome = train(small(**changes, backend="vidur"), tmp_path / "out")
    assert outcome.decisions == 64 and outcome.best is not None
    row = rows_of(tmp_path / "out")[0]
    assert float(row["marginal_delay"]) < 0 and float(row["approx_kl"]) >= 0


def test_the_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    path, config = (
        tmp_path / "config.yaml",
        {**SMALL, "decisions": 256, "policy": {**SMALL["policy"], "hidden_size": 96}},
    )
    path.write_text(yaml.safe_dump(config))
    for threads in ("1", "4"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        command(path, tmp_path / threads, **dict.fromkeys(names, threads))
    assert learned(tmp_path / "1") == learned(tmp_path / "4")
    train(small(**{key: config[key] for key in ("decisions", "policy")}), tmp_path / "here")  # in this process
    assert learned(tmp_path / "here") == learned(tmp_path / "1")
