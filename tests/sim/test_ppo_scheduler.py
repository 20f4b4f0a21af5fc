"""`ppo_modular` in real simulations: it decides, earns, learns, records, checkpoints, and repeats itself exactly."""

import csv
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE, arguments, simulate, vidur_main

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.record.outcome import RunOutcome

PREFIX = "p_p_o_global_scheduler_modular_config_"


def ppo(tmp_path: Path, flags: dict[str, Any] | None = None, **vidur: Any) -> RunOutcome:
    """A run of ppo_modular; `flags` are its own, `vidur` those of the simulation."""
    own = {f"{PREFIX}{name}": value for name, value in {"rollout_len": 32, **(flags or {})}.items()}
    return simulate(tmp_path, global_scheduler_config_type="ppo_modular", **own, **vidur)


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (table,) = tmp_path.glob("*/ppo_metrics.csv")
    with table.open() as file:
        reader = csv.DictReader(file)
        assert list(reader.fieldnames or []) == header(4)
        return list(reader)


@pytest.mark.parametrize("mode", ["marginal_delay", "queue_delay", "hybrid", "hybrid, window"])
def test_it_learns_and_records_every_update(tmp_path: Path, mode: str) -> None:
    mode, _, credit = mode.partition(", ")
    gamma = 0.9 if mode == "queue_delay" or credit else 0.0
    outcome = ppo(tmp_path, {"reward_mode": mode, "hybrid_credit": credit or "placement", "gamma": gamma, "epochs": 2})
    assert len(outcome.completed) == 100
    table = rows(tmp_path)
    # Three full rollouts of 32 of 100 decisions; the four left over are less than a minibatch.
    assert [int(float(row["update"])) for row in table] == [1, 2, 3]
    for row in table:
        assert math.isfinite(float(row["entropy"])) and float(row["approx_kl"]) >= 0
        shares = [float(row[f"action_replica_{index}"]) for index in range(4)]
        assert sum(shares) == pytest.approx(1.0)
        times = [float(row[f"time_{part}_share"]) for part in ("simulating", "deciding", "learning")]
        assert sum(times) == pytest.approx(1.0)
    component = {"hybrid": "absolute_score"}.get(mode, mode)
    assert all(row[component] != "" for row in table)
    assert all((row["credit_total_reward"] != "") == (mode == "hybrid" and not credit) for row in table)
    assert float(table[-1]["latency_p99"]) >= float(table[-1]["latency_p50"]) > 0


def test_untrained_and_greedy_it_is_exactly_its_prior(tmp_path: Path) -> None:
    for prior in ("least_tokens", "least_outstanding", "least_kv", "shortest_delay"):
        untrained = ppo(tmp_path, {"inference_only": True, "prior": prior})
        heuristic = simulate(tmp_path, global_scheduler_config_type=prior)
        assert [r.replica for r in untrained.requests] == [r.replica for r in heuristic.requests]
    assert not list(tmp_path.glob("*/ppo_metrics.csv"))
    assert not list(tmp_path.glob("*/checkpoints"))


def test_queue_delay_adds_up_to_the_total_latency(tmp_path: Path) -> None:
    """Little's law on a real, fully drained run."""
    from vidur_ppo_plugin.learn.agent import Agent

    settled: list[float] = []
    settle = Agent.settle

    def spy(self: Agent, reward: float, action_rewards: Any = None) -> None:
        settled.append(reward)
        settle(self, reward, action_rewards)

    for power in (1.0, 2.0):
        settled.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Agent, "settle", spy)
            outcome = ppo(tmp_path, {"reward_mode": "queue_delay", "latency_power": power}, **KV_PRESSURE)
        latencies = [r.completed_at_s - r.arrived_at_s for r in outcome.requests if r.completed_at_s is not None]
        assert len(settled) == len(latencies) == 100
        assert sum(settled) == pytest.approx(-sum(latency**power for latency in latencies), rel=1e-9)


def test_same_seed_same_bits_in_another_process(tmp_path: Path) -> None:
    flags = {"global_scheduler_config_type": "ppo_modular", f"{PREFIX}rollout_len": 32}
    tables = []
    for run in range(2):
        done = vidur_main(arguments(tmp_path / str(run), **flags))
        assert done.returncode == 0, done.stderr[-2000:]
        assert "ppo_modular is active on 4 replicas (learning; reward marginal_delay" in done.stdout
        assert "updates, decisions    3, 100" in done.stdout
        (requests,) = (tmp_path / str(run)).glob("*/request_metrics.csv")
        learned = [{k: v for k, v in row.items() if "time_" not in k} for row in rows(tmp_path / str(run))]
        tables.append((requests.read_bytes(), learned))
    assert tables[0] == tables[1]
    assert ppo(tmp_path, {"seed": 7}).requests != ppo(tmp_path, {"seed": 8}).requests


def test_two_runs_with_one_learner_equal_a_save_and_a_load_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: weights, optimiser, statistics, controllers and random states all carry over."""
    from vidur_ppo_plugin.sim import ppo_scheduler

    flags = {"gamma": 0.9, "reward_mode": "queue_delay", "epsilon": 0.1, "enable_dynamic_temperature": True}
    agents: list[Any] = []
    build = ppo_scheduler.build_agent

    def keep(*args: Any, **kwargs: Any) -> Any:
        agents.append(build(*args, **kwargs))
        return agents[-1]

    monkeypatch.setattr(ppo_scheduler, "build_agent", keep)
    ppo(tmp_path / "first", {**flags, "save_checkpoint": str(tmp_path / "saved")})

    def reuse(*args: Any, **kwargs: Any) -> Any:
        agents[0].start_run()
        return agents[0]

    second = {"synthetic_request_generator_config_seed": 5}
    loaded = ppo(tmp_path / "loaded", {**flags, "load_checkpoint": str(tmp_path / "saved")}, **second)
    monkeypatch.setattr(ppo_scheduler, "build_agent", reuse)
    continued = ppo(tmp_path / "continued", flags, **second)
    assert loaded.requests == continued.requests

    def learned(path: Path) -> list[dict[str, str]]:
        return [{name: value for name, value in row.items() if "time_" not in name} for row in rows(path)]

    for mine, theirs in zip(learned(tmp_path / "loaded"), learned(tmp_path / "continued"), strict=True):
        assert mine == theirs
    assert learned(tmp_path / "loaded")[0]["update"] == "4"


def test_inference_acts_on_what_was_learned_and_changes_nothing(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ppo(tmp_path / "train", {"save_checkpoint": str(saved), "lr": 0.01, "epochs": 8, "prior_weight": 0.1})
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    greedy = [
        ppo(tmp_path / "use", {"load_checkpoint": str(saved), "inference_only": True, "prior_weight": 0.1}).requests
        for _ in range(2)
    ]
    assert greedy[0] == greedy[1]
    untrained = ppo(tmp_path / "prior", {"inference_only": True, "prior_weight": 0.1})
    assert [r.replica for r in greedy[0]] != [r.replica for r in untrained.requests]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize(
    ("flags", "difference"),
    [({"hidden_size": 32}, "hidden_size"), ({"trend_window": 7}, "trend_window"), ({"prior": "least_kv"}, "prior")],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, flags: dict[str, Any], difference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    ppo(tmp_path, {"save_checkpoint": str(saved)})
    with pytest.raises(SystemExit):
        ppo(tmp_path, {"load_checkpoint": str(saved), **flags})
    assert f"{PREFIX}{difference} is" in capsys.readouterr().err


def test_nan_in_a_feature_is_caught_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vidur_ppo_plugin.routing.features import FeatureTable

    observe = FeatureTable.observe

    def spoiled(self: FeatureTable, *args: Any, **kwargs: Any) -> Any:
        observation = observe(self, *args, **kwargs)
        if self._last is not None and spoiled.calls == 50:  # type: ignore[attr-defined]
            observation.replicas[1, 2] = np.nan
        spoiled.calls += 1  # type: ignore[attr-defined]
        return observation

    spoiled.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(FeatureTable, "observe", spoiled)
    with pytest.raises(FloatingPointError, match="prefill of replica 1"):
        ppo(tmp_path, {"save_checkpoint": str(tmp_path / "saved")})


def test_nan_in_a_gradient_skips_the_update_and_reaches_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vidur_ppo_plugin.learn.ppo import PPO

    step = PPO._step

    def spoiled(self: PPO, *args: Any) -> Any:
        if self.num_updates == 1:
            next(self.network.parameters()).register_hook(lambda gradient: gradient.fill_(math.nan))
        return step(self, *args)

    monkeypatch.setattr(PPO, "_step", spoiled)
    outcome = ppo(tmp_path, {"save_checkpoint": str(tmp_path / "saved")})
    assert len(outcome.completed) == 100
    assert [row["update"] for row in rows(tmp_path)] == ["1"]
    state = checkpoint.load(tmp_path / "saved").state
    assert state["agent"]["ppo"]["num_updates"] == 1


def test_many_replicas_and_a_few_candidates(tmp_path: Path) -> None:
    outcome = ppo(
        tmp_path,
        {"max_candidates": 4},
        cluster_config_num_replicas=100,
        poisson_request_interval_generator_config_qps=200.0,
    )
    assert len(outcome.completed) == 100
    (table,) = tmp_path.glob("*/ppo_metrics.csv")
    assert "action_share_max" in table.read_text().splitlines()[0]


def test_requests_of_one_instant_and_empty_calls(tmp_path: Path) -> None:
    outcome = ppo(tmp_path, interval_generator_config_type="static")
    assert len(outcome.completed) == 100
    assert max(outcome.replica_shares) < 0.35


@pytest.mark.parametrize("mode", ["marginal_delay", "hybrid"])
def test_it_finds_the_fast_replica_from_scratch(tmp_path: Path, mode: str) -> None:
    """One replica four times as fast, 30 % load, no prior to lean on."""
    flags = {
        "roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 4.0, 1.0, 1.0],
        "poisson_request_interval_generator_config_qps": 6.0,
        "synthetic_request_generator_config_num_requests": 1500,
        "uniform_request_length_generator_config_max_tokens": 2048,
        "metrics_config_write_metrics": False,
    }
    learned = ppo(tmp_path, {"prior": "none", "rollout_len": 64, "lr": 0.003, "reward_mode": mode}, **flags)
    blind = simulate(tmp_path, global_scheduler_config_type="round_robin", **flags)
    last_quarter, first_quarter = learned.requests[-375:], learned.requests[:375]

    def mean_latency(requests: list[Any]) -> float:
        return float(np.mean([r.completed_at_s - r.arrived_at_s for r in requests]))

    assert np.mean([r.replica == 1 for r in last_quarter]) > 0.6
    assert mean_latency(last_quarter) < mean_latency(blind.requests[-375:])
    assert mean_latency(last_quarter) < mean_latency(first_quarter)


@pytest.mark.parametrize("delay_s", [0.0, 0.35])
def test_a_killed_run_leaves_a_loadable_checkpoint(tmp_path: Path, delay_s: float) -> None:
    """SIGKILL, while a checkpoint is written after every update."""
    saved = tmp_path / "saved"
    flags = {"rollout_len": 8, "epochs": 1, "checkpoint_interval": 1, "save_checkpoint": str(saved)}
    command_line = arguments(
        tmp_path,
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=5000,
        **{f"{PREFIX}{name}": value for name, value in flags.items()},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vidur.main", *command_line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline_s = time.monotonic() + 60
    while not list(saved.glob("*.ckpt")) and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(delay_s)
    process.kill()
    assert process.wait() == -9
    loaded = checkpoint.load(saved)
    assert loaded.metadata["num_updates"] >= 1
    outcome = ppo(tmp_path / "after", {"load_checkpoint": str(saved), "inference_only": True})
    assert len(outcome.completed) == 100


def test_a_checkpoint_that_is_no_good_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ppo(tmp_path / "train", {"save_checkpoint": str(saved)})
    good, *_ = sorted(saved.glob("last*"))
    (saved / "cut.ckpt").write_bytes(good.read_bytes()[:-10])
    for bad, reason in ((saved / "cut.ckpt", "truncated"), (tmp_path / "nowhere", "missing")):
        output = tmp_path / "output"
        own = {f"{PREFIX}load_checkpoint": str(bad)}
        command_line = arguments(output, global_scheduler_config_type="ppo_modular", **own)
        done = vidur_main(command_line)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert f"--{PREFIX}load_checkpoint: checkpoint {bad}" in done.stderr and reason in done.stderr
        assert not output.exists()


def test_exact_credit_sums_to_all_latencies(tmp_path: Path) -> None:
    """The identity of marginal delay, in a live simulation with preemptions: rewards sum to minus the total latency."""
    from vidur_ppo_plugin.learn.agent import Agent

    rewards: list[float] = []
    settle = Agent.settle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "settle", lambda self, r, every: (rewards.append(r), settle(self, r, every))[1])
        outcome = ppo(tmp_path, {"credit": "exact", "backlog_weight": 0.0}, **KV_PRESSURE)
    assert sum(request.num_restarts for request in outcome.requests) > 0
    total_s = sum((r.completed_at_s or math.inf) - r.arrived_at_s for r in outcome.requests)
    assert -sum(rewards) == pytest.approx(total_s, rel=1e-8)


def test_credit_that_the_twin_cannot_give_is_refused_by_name(tmp_path: Path) -> None:
    edf = {"replica_scheduler_config_type": "mnemosyne_edf"}
    with pytest.raises(ValueError, match=r"credit must be auto or analytic .*mnemosyne_edf"):
        ppo(tmp_path, {"credit": "exact"}, **edf)
