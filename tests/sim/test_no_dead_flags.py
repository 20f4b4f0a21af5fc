"""No flag of `ppo_modular` is dead: each is changed in a real, short simulation, and the change must show."""

import csv
import dataclasses
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import ROOT, run_python
from simulation import simulate

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.policy_checkpoint import save_policy

PREFIX = "p_p_o_global_scheduler_modular_config_"

# Seven updates in a hundred requests with short outputs, several gradient steps each, and no output of Vidur's own.
SHORT: dict[str, Any] = {"rollout_len": 14, "minibatch_size": 7, "epochs": 2, "hidden_size": 32}
VIDUR: dict[str, Any] = {
    "metrics_config_write_metrics": False,
    "uniform_request_length_generator_config_prefill_to_decode_ratio": 60.0,
}

# The circumstances in which flags matter: flags of ours, and of the simulation.
CONTEXTS: dict[str, dict[str, Any]] = {
    "default": {},
    "hybrid": {"reward_mode": "hybrid", "gamma": 0.9},
    "hybrid, late": {"reward_mode": "hybrid", "gamma": 0.9, "latency_threshold": 0.5},
    "queue delay": {"reward_mode": "queue_delay", "gamma": 0.9},
    "end values": {"lr_end": 1e-4},
    "entropy floor": {"entropy_min": 1.3},
    "pull to the prior": {"kl_ref_coef": 1.0},
    "dynamic": {"enable_dynamic_temperature": True, "latency_threshold": 1000.0},
    "pulses": {"enable_dynamic_temperature": True, "pulse_interval": 3},
    "short memory": {"enable_dynamic_temperature": True, "stagnation_memory": 2, "stagnation_threshold": 0.0},
    "stagnant": {"enable_dynamic_temperature": True, "stagnation_threshold": 100.0},
    # Nothing but entropy counts: the prior does better, in a run in which that shows after one of seven updates.
    "worse than the prior": {
        "tail_preference": 0.3,
        "enable_dynamic_temperature": True,
        "lr": 0.3,
        "max_grad_norm": 100.0,
        "entropy_coef": 100.0,
        "prior_weight": 0.3,
        "stagnation_threshold": 0.0,
        "reference_patience": 0,
    },
    "random": {"epsilon": 0.5},
    "demonstrating": {"demonstrate_with": "round_robin"},
    "warm start": {"warm_start_file": "{demonstrations}", "bc_epochs": 5},
    "one fast replica": {
        "prior": "shortest_delay",
        "roofline_execution_time_predictor_config_replica_speed_factors": [8.0, 1.0, 1.0, 1.0],
        "poisson_request_interval_generator_config_qps": 2.0,
    },
    "from a policy": {"load_checkpoint": "{policy}", "guard_interval": 1, "lr": 0.03},
    "limit": {"latency_limit_s": 0.05, "poisson_request_interval_generator_config_qps": 50.0},
}


@dataclass(frozen=True)
class Change:
    """A flag's other value, where it matters, and what must then differ.

    `shows`: "placements", "files", or columns of ppo_metrics.csv, each of which must differ. In a text, {own} is the
    directory of the changed run, {baseline} the output of the run without the change, {demonstrations} a file of such.
    """

    value: Any
    shows: tuple[str, ...]
    context: str = "default"


def change(value: Any, *shows: str, context: str = "default") -> Change:
    return Change(value, shows, context)


CHANGES: dict[str, Change] = {
    # Visibility
    "report_delay_s": change(2.0, "placements"),
    "drained": change("1:0:1000", "placements"),
    # Reward
    "reward_mode": change("queue_delay", "queue_delay", "marginal_delay", "reward_mean"),
    "latency_power": change(2.0, "marginal_delay", "policy_loss"),
    "tail_preference": change(1.0, "policy_loss"),
    "backlog_weight": change(0.0, "marginal_delay", "policy_loss"),
    "credit": change("analytic", "marginal_delay", "policy_loss"),
    "hybrid_credit": change("window", "policy_loss", context="hybrid"),
    "throughput_target": change(5.0, "absolute_score", "reward_mean", context="hybrid"),
    "absolute_weight": change(0.1, "reward_mean", "total_reward", context="hybrid"),
    "delta_weight": change(2.0, "reward_mean", "total_reward", context="hybrid"),
    "alpha": change(1.0, "absolute_score", "reward_mean", context="hybrid"),
    "kappa": change(1.0, "logistic_penalty", "reward_mean", context="hybrid"),
    "sigma": change(0.2, "logistic_penalty", "reward_mean", context="hybrid"),
    "latency_threshold": change(1.0, "absolute_score", "latency_penalty", "reward_mean", context="hybrid"),
    "latency_penalty_scale": change(5.0, "latency_penalty", "reward_mean", context="hybrid, late"),
    "load_balance_penalty": change(1.0, "balance_penalty", "reward_mean", context="hybrid"),
    "balance_penalty_weight": change(1.0, "queue_penalty", "reward_mean", context="hybrid"),
    "latency_bonus_weight": change(2.0, "latency_bonus", "reward_mean", context="hybrid"),
    "reference_weight": change(2.0, "reference_gain", "reward_mean", context="hybrid"),
    "reward_clip_low": change(0.5, "reward_min", "policy_loss", context="hybrid"),
    "reward_clip_high": change(0.1, "reward_max", "policy_loss", context="hybrid"),
    "reward_window_s": change(1.0, "absolute_score", "reward_mean", context="hybrid"),
    "normalize_rewards": change(False, "explained_variance", "value_loss"),
    # Learning
    "lr": change(1e-2, "learning_rate", "approx_kl", "placements"),
    "lr_end": change(1e-4, "learning_rate", "approx_kl"),
    "gamma": change(0.5, "explained_variance", "policy_loss", context="queue delay"),
    "gae_lambda": change(0.2, "explained_variance", "policy_loss", context="queue delay"),
    "clip_ratio": change(0.001, "clipfrac", "approx_kl"),
    "value_clip": change(0.0, "value_loss"),
    "entropy_coef": change(1.0, "entropy_coef", "entropy"),
    "entropy_coef_end": change(5.0, "entropy_coef", "entropy"),
    "value_coef": change(5.0, "value_loss", "grad_norm"),
    "epochs": change(5, "approx_kl", "value_loss"),
    "rollout_len": change(30, "decisions"),
    "minibatch_size": change(14, "approx_kl", "grad_norm"),
    "max_grad_norm": change(0.001, "approx_kl"),
    "normalize_advantages": change(False, "policy_loss", "approx_kl"),
    "all_action_baseline": change(False, "policy_loss", "approx_kl"),
    "expected_gradient": change(False, "policy_loss", "approx_kl"),
    "schedule_steps": change(50, "learning_rate", "approx_kl", context="end values"),
    "target_kl": change(1e-7, "kl_coef", "approx_kl"),
    "kl_coef": change(5.0, "kl_coef", "approx_kl"),
    "enable_adaptive_kl": change(False, "kl_coef", "approx_kl"),
    "enable_adaptive_lr": change(True, "learning_rate", "approx_kl"),
    "early_stop_kl_factor": change(1e-6, "approx_kl", "grad_norm"),
    "entropy_min": change(1.3, "entropy"),
    "entropy_floor_coef": change(50.0, "entropy", context="entropy floor"),
    "kl_ref_coef": change(10.0, "kl_reference", "approx_kl"),
    "kl_ref_steps": change(20, "kl_reference", "approx_kl", context="pull to the prior"),
    # Exploration
    "enable_dynamic_temperature": change(True, "temperature", "entropy"),
    "base_temperature": change(4.0, "temperature", "entropy", "placements"),
    "min_temperature": change(1.0, "temperature", "entropy", context="dynamic"),
    "max_temperature": change(1.1, "temperature", "entropy", context="pulses"),
    "pulse_interval": change(2, "temp_is_pulsing", "temperature", context="dynamic"),
    "pulse_magnitude": change(4.0, "temperature", "entropy", context="pulses"),
    "pulse_length": change(1, "temp_is_pulsing", "temperature", context="pulses"),
    "stagnation_threshold": change(100.0, "temp_is_pulsing", "temperature", context="short memory"),
    "stagnation_memory": change(2, "temp_is_pulsing", "temperature", context="stagnant"),
    "reference_patience": change(1, "temp_is_pulsing", "temperature", context="worse than the prior"),
    "target_entropy": change(1.3, "temperature", "entropy", context="dynamic"),
    "epsilon": change(0.5, "epsilon", "entropy", "placements"),
    "epsilon_steps": change(20, "epsilon", "placements", context="random"),
    # Warm start
    "demonstrate_with": change("round_robin", "files", "placements"),
    "demonstrations_file": change("{own}/elsewhere.npz", "files", context="demonstrating"),
    "warm_start_file": change("{demonstrations}", "bc_loss", "placements"),
    "bc_epochs": change(1, "bc_loss", "approx_kl", context="warm start"),
    "bc_lr": change(1e-5, "bc_loss", "approx_kl", context="warm start"),
    "bc_coef": change(5.0, "bc_loss", "approx_kl", context="warm start"),
    "bc_fade_steps": change(20, "bc_loss", "approx_kl", context="warm start"),
    # Curriculum
    "curriculum": change("load=0.5,decisions=40;load=1.0", "curriculum_stage", "simulated_time", "placements"),
    # Network
    "enable_decoupled_ac": change(False, "value_loss", "approx_kl"),
    "enable_flat_network": change(True, "value_loss", "approx_kl"),
    "feature_projection_dim": change(16, "value_loss", "approx_kl"),
    "hidden_size": change(16, "value_loss", "approx_kl"),
    "critic_gru_layers": change(0, "value_loss", "explained_variance"),
    "attention_heads": change(2, "value_loss", "approx_kl", "attention_self"),
    "prior": change("none", "entropy", "placements"),
    "prior_weight": change(0.1, "entropy", "placements"),
    "max_candidates": change(2, "entropy", "placements"),
    "max_queue_requests_per_replica": change(0, "value_loss", "approx_kl"),
    "trend_window": change(2, "value_loss", "approx_kl"),
    "request_scale": change(1.0, "value_loss", "approx_kl"),
    "token_scale": change(100.0, "value_loss", "approx_kl"),
    "time_scale_s": change(0.1, "value_loss", "approx_kl"),
    # Running
    "inference_only": change(True, "files", "placements"),
    "load_checkpoint": change("{baseline}/checkpoints", "update", "placements"),
    "save_checkpoint": change("{own}/elsewhere", "files"),
    "guard_interval": change(6, "guard_change", context="from a policy"),
    "guard_requests": change(64, "guard_change", context="from a policy"),
    "guard_serves_best": change(False, "action_replica_0", context="from a policy"),
    "guard_tolerance": change(10.0, "guard_reverts", context="from a policy"),
    "checkpoint_interval": change(2, "files"),
    "metrics_dir": change("{own}/elsewhere", "files"),
    "enable_tensorboard": change(True, "files"),
    "collapse_share": change(0.3, "collapse_alarm", context="one fast replica"),
    "latency_limit_s": change(1.0, "safety_events"),
    "mask_over_limit": change(True, "placements", context="limit"),
    "seed": change(7, "placements", "policy_loss"),
}


@dataclass(frozen=True)
class Run:
    """What a simulation left behind."""

    output_dir: Path
    placements: list[int | None]
    files: list[str]
    columns: dict[str, list[str]] = field(default_factory=dict)

    def shown(self, what: str) -> Any:
        return self.columns.get(what) if what not in ("placements", "files") else getattr(self, what)


def run(directory: Path, flags: dict[str, Any]) -> Run:
    """Simulate with these flags on top of SHORT; those that are no flag of ours are the simulation's."""
    own = {item.name for item in dataclasses.fields(PPOModularFlags)}
    merged = {f"{PREFIX}{name}" if name in own else name: value for name, value in {**SHORT, **flags}.items()}
    outcome = simulate(directory, global_scheduler_config_type="ppo_modular", **{**VIDUR, **merged})
    assert len(outcome.completed) == 100
    output_dir = Path(outcome.output_dir)
    files = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    columns: dict[str, list[str]] = {}
    for table in directory.rglob("ppo_metrics.csv"):
        with table.open() as file:
            rows = list(csv.DictReader(file))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Run(
        output_dir=output_dir,
        placements=[request.replica for request in outcome.requests],
        files=sorted(re.sub(r"events\.out\..*", "events", name.replace(output_dir.name, "run")) for name in files),
        columns=columns,
    )


class Baselines:
    """The runs without a change, once for each context."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._tmp_path_factory = tmp_path_factory
        self._runs: dict[str, Run] = {}

    def __getitem__(self, context: str) -> Run:
        if context not in self._runs:
            flags = {name: self.filled_in(value) for name, value in CONTEXTS[context].items()}
            self._runs[context] = run(self._tmp_path_factory.mktemp("baseline"), flags)
        return self._runs[context]

    def filled_in(self, value: Any, **directories: Path) -> Any:
        """A flag's value with its directories and files in place of their names."""
        if not isinstance(value, str) or "{" not in value:
            return value
        if "{policy}" in value:
            file = self["default"].output_dir / "policy.ckpt"
            save_policy(checkpoint.load(self["default"].output_dir / "checkpoints"), file, metadata={})
            return str(file)
        if "{demonstrations}" in value:
            return str(self["demonstrating"].output_dir / "demonstrations.npz")
        return value.format(**directories)


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Baselines:
    return Baselines(tmp_path_factory)


def test_every_flag_has_a_change() -> None:
    assert sorted(CHANGES) == sorted(item.name for item in dataclasses.fields(PPOModularFlags))


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_shows(name: str, tmp_path: Path, baselines: Baselines) -> None:
    changed = CHANGES[name]
    before = baselines[changed.context]
    context = {flag: baselines.filled_in(value) for flag, value in CONTEXTS[changed.context].items()}
    value = baselines.filled_in(changed.value, own=tmp_path, baseline=before.output_dir)
    default = {**dataclasses.asdict(PPOModularFlags()), **SHORT, **context}[name]
    assert value != default
    after = run(tmp_path, {**context, name: value})
    same = [what for what in changed.shows if before.shown(what) == after.shown(what)]
    assert not same, f"{name}={value!r} instead of {default!r} changes nothing in {', '.join(same)}"


@pytest.mark.parametrize("context", ["default", "hybrid", "pulses"])
def test_without_a_change_nothing_differs(context: str, tmp_path: Path, baselines: Baselines) -> None:
    """Otherwise the test above would pass for any flag."""
    before, again = baselines[context], run(tmp_path, CONTEXTS[context])
    assert again.placements == before.placements and again.files == before.files
    timeless = [name for name in before.columns if not name.startswith("time_")]
    assert len(timeless) > 40
    assert {name: again.columns[name] for name in timeless} == {name: before.columns[name] for name in timeless}


def test_the_plan_of_2025_09_18_learns_within_its_requests(tmp_path: Path) -> None:
    """Its YAML through the real command line: several updates, finite, with a pulse and a change score."""
    plan = ROOT / "configs" / "plan_2025_09_18.yaml"
    command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "run", plan]
    done = run_python(*command, "--metrics_config_output_dir", tmp_path / "output", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "scheduler ppo_modular, 400 of 400 requests completed on 4 replicas" in done.stdout
    (table,) = tmp_path.glob("output/*/ppo_metrics.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 5
    for row in rows:
        values = {name: float(text) for name, text in row.items() if text}
        assert all(math.isfinite(value) for value in values.values()), values
        assert {"total_reward", "absolute_score", "entropy", "approx_kl", "policy_loss"} <= set(values)
    assert any(float(row["temp_is_pulsing"]) == 1 for row in rows)
    assert any(float(row["delta_score"]) != 0 for row in rows)
