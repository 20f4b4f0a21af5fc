"""Demonstrations in real simulations: teachers place as their schedulers do, and what they show can be learned."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE, arguments, simulate, vidur_main

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.flags import check_scheduler
from vidur_ppo_plugin.learn.demonstrations import PRIORS, Demonstrations, load
from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.heuristics import TEACHERS

PREFIX = "p_p_o_global_scheduler_modular_config_"
HASH = FeatureTable().hash


def ppo(tmp_path: Path, flags: dict[str, Any], **vidur: Any) -> RunOutcome:
    """A run of ppo_modular; `flags` are its own, `vidur` those of the simulation."""
    own = {f"{PREFIX}{name}": value for name, value in flags.items()}
    return simulate(tmp_path, global_scheduler_config_type="ppo_modular", **own, **vidur)


def record(tmp_path: Path, teachers: str, flags: dict[str, Any] | None = None, **vidur: Any) -> tuple[Any, RunOutcome]:
    """What a run with teachers wrote, and how it went."""
    path = tmp_path / "demonstrations.npz"
    outcome = ppo(tmp_path, {"demonstrate_with": teachers, "demonstrations_file": str(path), **(flags or {})}, **vidur)
    return load(path, feature_hash=HASH, flag="--flag"), outcome


def placements(outcome: RunOutcome) -> list[int | None]:
    return [request.replica for request in outcome.requests]


# --- recording ---


@pytest.mark.parametrize("teacher", [name for name in TEACHERS if name != "random"])
def test_a_teacher_places_as_its_scheduler_does(tmp_path: Path, teacher: str) -> None:
    """Vidur's own and ours, ties included; lor with many requests waiting, where its count matters."""
    vidur = {**(KV_PRESSURE if teacher == "lor" else {}), "metrics_config_write_metrics": False}
    recorded, outcome = record(tmp_path, teacher, **vidur)
    alone = simulate(tmp_path, global_scheduler_config_type=teacher, **vidur)
    assert outcome.requests == alone.requests
    assert recorded.actions.tolist() == placements(alone)
    assert recorded.teachers == {teacher: 1.0}


def test_what_is_recorded(tmp_path: Path) -> None:
    """In the run's own directory by default; the prior's best is the teacher's choice where they are the same."""
    outcome = ppo(tmp_path, {"demonstrate_with": "least_tokens", "reward_mode": "queue_delay"}, **KV_PRESSURE)
    assert len(outcome.completed) == 100
    (path,) = tmp_path.glob("*/demonstrations.npz")
    assert path.parent == Path(outcome.output_dir)
    recorded = load(path, feature_hash=HASH, flag="--flag")
    assert len(recorded) == 100 and set(recorded.num_replicas.tolist()) == {4}
    costs = recorded.prior_costs[:, PRIORS.index("least_tokens")].reshape(100, 4)
    chosen = costs[np.arange(100), recorded.actions]
    assert (chosen == costs.min(axis=1)).all()
    # Nothing was learned.
    assert not list(tmp_path.glob("*/ppo_metrics.csv"))
    assert not list(tmp_path.glob("*/checkpoints"))


def test_a_mixture_is_drawn_by_weight_and_by_seed(tmp_path: Path) -> None:
    vidur = {"synthetic_request_generator_config_num_requests": 250, "metrics_config_write_metrics": False}
    mixture = "least_tokens:0.7,round_robin:0.3"

    def of_the_first(recorded: Demonstrations) -> float:
        costs = recorded.prior_costs[:, PRIORS.index("least_tokens")].reshape(-1, 4)
        return float((costs.argmin(axis=1) == recorded.actions).mean())

    recorded, outcome = record(tmp_path, mixture, **vidur)
    assert recorded.teachers == pytest.approx({"least_tokens": 0.7, "round_robin": 0.3})
    # A quarter of round_robin's choices are the best one by chance.
    assert of_the_first(recorded) == pytest.approx(0.7 + 0.3 / 4, abs=0.08)
    again, _ = record(tmp_path, mixture, **vidur)
    assert again.digest == recorded.digest
    assert placements(record(tmp_path, mixture, {"seed": 5}, **vidur)[1]) != placements(outcome)
    assert of_the_first(record(tmp_path, "random", **vidur)[0]) < 0.4


def test_teachers_see_all_replicas_whatever_max_candidates(tmp_path: Path) -> None:
    recorded, _ = record(
        tmp_path, "least_kv", {"max_candidates": 4}, cluster_config_num_replicas=20, metrics_config_write_metrics=False
    )
    assert set(recorded.num_replicas.tolist()) == {20}


# --- learning from it ---

BUSY = {"poisson_request_interval_generator_config_qps": 13.0, "metrics_config_write_metrics": False}


def test_a_clone_of_least_tokens_does_as_it_does_on_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prior to lean on: agreement on the states that the clone itself gets into, and what it is worth."""
    from vidur_ppo_plugin.learn.agent import Agent

    record(tmp_path, "least_tokens", synthetic_request_generator_config_num_requests=1000, **BUSY)
    agreements: list[bool] = []
    costs: list[Any] = []
    observe, decide = Agent.observe, Agent.decide

    def spy_observe(self: Agent, snapshot: Any, *args: Any) -> Any:
        costs.append(snapshot.token_load)
        return observe(self, snapshot, *args)

    def spy_decide(self: Agent, *args: Any) -> int:
        index = decide(self, *args)
        agreements.append(costs[-1][index] == costs[-1].min())
        return index

    monkeypatch.setattr(Agent, "observe", spy_observe)
    monkeypatch.setattr(Agent, "decide", spy_decide)
    other = {
        **BUSY,
        "synthetic_request_generator_config_num_requests": 600,
        "synthetic_request_generator_config_seed": 7,
    }
    flags = {"warm_start_file": str(tmp_path / "demonstrations.npz"), "prior": "none", "inference_only": True}
    cloned = ppo(tmp_path, flags, **other)
    assert len(agreements) == 600
    assert np.mean(agreements) > 0.85
    teacher, blind = (
        simulate(tmp_path, global_scheduler_config_type=name, **other) for name in ("least_tokens", "random")
    )
    assert cloned.ttft_s.mean < 0.6 * blind.ttft_s.mean
    assert cloned.ttft_s.mean < 1.1 * teacher.ttft_s.mean


def rows(directory: Path) -> list[dict[str, str]]:
    (table,) = directory.glob("*/ppo_metrics.csv")
    return [
        {name: value for name, value in row.items() if "time_" not in name}
        for row in csv.DictReader(table.read_text().splitlines())
    ]


def test_learning_goes_on_after_a_warm_start_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two simulations with one learner equal the same two with a save and a load between them, bit for bit."""
    from vidur_ppo_plugin.sim import ppo_scheduler

    agents: list[Any] = []
    build = ppo_scheduler.build_agent

    def keep(*args: Any, **kwargs: Any) -> Any:
        agents.append(build(*args, **kwargs))
        return agents[-1]

    def reuse(*args: Any, **kwargs: Any) -> Any:
        agents[0].start_run()
        return agents[0]

    record(tmp_path, "least_tokens:0.8,random:0.2", **BUSY)
    flags = {
        "warm_start_file": str(tmp_path / "demonstrations.npz"),
        "bc_epochs": 3,
        "bc_fade_steps": 150,
        "kl_ref_coef": 0.1,
        "rollout_len": 32,
    }
    monkeypatch.setattr(ppo_scheduler, "build_agent", keep)
    ppo(tmp_path / "first", {**flags, "save_checkpoint": str(tmp_path / "saved")}, **BUSY)
    first = rows(tmp_path / "first")
    assert len(first) == 3
    assert all(float(row["bc_loss"]) > 0 and float(row["kl_reference"]) >= 0 for row in first)

    second = {**BUSY, "synthetic_request_generator_config_seed": 5}
    resume = {**flags, "load_checkpoint": str(tmp_path / "saved")}
    loaded = ppo(tmp_path / "loaded", resume, **second)
    with pytest.raises(ValueError, match=f"--{PREFIX}warm_start_file must be given: the checkpoint was warm-started"):
        ppo(tmp_path / "refused", {**resume, "warm_start_file": ""}, **second)
    monkeypatch.setattr(ppo_scheduler, "build_agent", reuse)
    continued = ppo(tmp_path / "continued", flags, **second)
    assert loaded.requests == continued.requests
    assert rows(tmp_path / "loaded") == rows(tmp_path / "continued")
    # 132 decisions after the start the demonstrations still count, after 164 no longer.
    assert [bool(row["bc_loss"]) for row in rows(tmp_path / "loaded")] == [True, False, False]


def test_every_flag_of_cloning_matters(tmp_path: Path) -> None:
    record(tmp_path, "least_tokens", **BUSY)
    flags = {"warm_start_file": str(tmp_path / "demonstrations.npz"), "rollout_len": 32, "prior": "none"}
    ppo(tmp_path / "default", flags, **BUSY)
    default = rows(tmp_path / "default")
    for name, value in {"bc_epochs": 1, "bc_lr": 1e-4, "bc_coef": 2.0, "bc_fade_steps": 33}.items():
        ppo(tmp_path / name, {**flags, name: value}, **BUSY)
        changed = rows(tmp_path / name)
        for column in ("bc_loss", "approx_kl"):
            assert [row[column] for row in default] != [row[column] for row in changed], name


# --- what is refused ---


def test_a_file_of_other_features_is_refused_on_the_command_line(tmp_path: Path) -> None:
    record(tmp_path, "lor", **BUSY)
    flags = {f"{PREFIX}warm_start_file": str(tmp_path / "demonstrations.npz"), f"{PREFIX}trend_window": 7}
    done = vidur_main(arguments(tmp_path, global_scheduler_config_type="ppo_modular", **flags))
    other = FeatureTable(trend_window=7).hash
    assert done.returncode != 0
    assert f"ValueError: --{PREFIX}warm_start_file={tmp_path / 'demonstrations.npz'}: it was recorded" in done.stderr
    assert f"with the features {HASH}, this run has {other}" in done.stderr
    assert "Starting simulation" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"demonstrate_with": "lor", "inference_only": True}, "inference_only must be unset with demonstrate_with"),
        ({"demonstrate_with": "lor", "warm_start_file": "a"}, "warm_start_file must be unset with demonstrate_with"),
        ({"demonstrate_with": "lor", "load_checkpoint": "a"}, "load_checkpoint must be unset with demonstrate_with"),
        ({"demonstrate_with": "lor", "save_checkpoint": "a"}, "save_checkpoint must be unset with demonstrate_with"),
        ({"demonstrate_with": "lor", "curriculum": "load=1"}, "curriculum must be unset with demonstrate_with"),
        ({"demonstrations_file": "a"}, "demonstrations_file must be unset without demonstrate_with"),
    ],
)
def test_flags_that_do_not_go_together(flags: dict[str, Any], reason: str) -> None:
    _autoload.install()
    from vidur_ppo_plugin.sim.config_types import PPOGlobalSchedulerModularConfig

    with pytest.raises(ValueError, match=f"--{PREFIX}{reason}"):
        check_scheduler(PPOGlobalSchedulerModularConfig(**flags), 4)


@pytest.mark.parametrize(
    ("teachers", "reason"),
    [
        ("least_token", "unknown teacher 'least_token' (did you mean least_tokens?)"),
        ("lor:-1", "the weight of lor must be finite and > 0"),
    ],
)
def test_teachers_that_cannot_be_are_refused_on_the_command_line(tmp_path: Path, teachers: str, reason: str) -> None:
    flags = {f"{PREFIX}demonstrate_with": teachers}
    done = vidur_main(arguments(tmp_path, global_scheduler_config_type="ppo_modular", **flags))
    assert done.returncode == 2
    assert f"--{PREFIX}demonstrate_with={teachers!r}: {reason}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--{PREFIX}demonstrations_file must be a file, got the directory"):
        ppo(tmp_path, {"demonstrate_with": "lor", "demonstrations_file": str(tmp_path)})
    with pytest.raises(ValueError, match=f"--{PREFIX}warm_start_file=.*there is no such file"):
        ppo(tmp_path, {"warm_start_file": str(tmp_path / "nothing.npz")})
