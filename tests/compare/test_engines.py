"""The twin and Vidur give the same cell, to the last bit of every request, whatever the scheduler and the scenario."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from simulation import simulate

from vidur_ppo_plugin.cli import main
from vidur_ppo_plugin.compare.engines import EngineError, run_cell, vidur_arguments
from vidur_ppo_plugin.compare.metrics import METRICS
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.scenario import Capacity, Scenario, load_scenario

SEED = 1000
PREFIX = "p_p_o_global_scheduler_modular_config_"


def short(name: str, qps: float, **changes: Any) -> Scenario:
    capacity = Capacity(qps=qps, scheduler="least_tokens", num_requests=1, num_seeds=1)
    return load_scenario(name).at(capacity=capacity, load=1.0, num_requests=100, **changes)


SCENARIOS = {
    "mixed_long": short("mixed_long", 25.0),
    "kv_tight": short("kv_tight", 12.0, flags={"cache_config_num_blocks": 800}),
    "stale": short("stale", 25.0),
    "drain": short("drain", 45.0),
}
SCHEDULERS = [
    *(SchedulerSpec(name, name) for name in ("random", "round_robin", "lor", "power_of_two", "least_outstanding")),
    *(SchedulerSpec(name, name) for name in ("least_kv", "least_tokens", "least_work", "shortest_delay")),
    SchedulerSpec("size_split", "size_split").with_options(threshold_tokens=1500, num_long_replicas=1),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SchedulerSpec:
    directory = tmp_path_factory.mktemp("learned")
    simulate(
        directory,
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=60,
        **{f"{PREFIX}save_checkpoint": str(directory / "policy"), f"{PREFIX}rollout_len": 20, f"{PREFIX}lr": 0.01},
    )
    return parse_schedulers([f"ppo_modular:{directory / 'policy'}"])[0]


def assert_same(scenario: Scenario, scheduler: SchedulerSpec) -> pd.DataFrame:
    twin = run_cell(scenario, scheduler, SEED, engine="twin")
    vidur = run_cell(scenario, scheduler, SEED, engine="vidur")
    pd.testing.assert_frame_equal(twin.requests, vidur.requests, check_exact=True)
    expected = vidur.metrics(scenario) | {"decision_us": twin.decision_us}
    assert twin.metrics(scenario) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    return twin.requests


CELLS = {
    "mixed_long": [spec.label for spec in SCHEDULERS],
    "kv_tight": ["lor", "least_kv"],
    "stale": ["lor", "least_tokens"],
    "drain": ["random", "power_of_two", "size_split"],
}


@pytest.mark.parametrize(("name", "label"), [(name, label) for name, labels in CELLS.items() for label in labels])
def test_both_engines_give_the_same_cell(name: str, label: str) -> None:
    requests = assert_same(SCENARIOS[name], next(spec for spec in SCHEDULERS if spec.label == label))
    assert list(requests["is_warm_up"]) == [True] * 10 + [False] * 90
    if name == "kv_tight":
        assert requests["num_restarts"].sum() > 0


@pytest.mark.parametrize("name", ["mixed_long", "stale", "drain"])
def test_both_engines_give_the_same_cell_for_a_learned_policy(name: str, policy: SchedulerSpec) -> None:
    assert_same(SCENARIOS[name], policy)


def test_a_drained_replica_gets_nothing_meanwhile(policy: SchedulerSpec) -> None:
    scenario = SCENARIOS["drain"]
    (drain,) = scenario.drains(scenario.requests(SEED))
    for scheduler in [*SCHEDULERS, policy]:
        requests = run_cell(scenario, scheduler, SEED, engine="twin").requests
        is_closed = requests["arrived_at_s"].between(drain.from_s, drain.to_s, inclusive="left")
        assert is_closed.sum() > 5
        assert drain.replica not in set(requests["replica"][is_closed]), scheduler.label
        assert drain.replica in set(requests["replica"][~is_closed]), scheduler.label


def test_old_reports_make_a_difference() -> None:
    fresh = SCENARIOS["stale"].at(report_delay_s=0.0)
    spec = SchedulerSpec("least_tokens", "least_tokens")
    seen = [run_cell(scenario, spec, SEED, engine="twin").requests for scenario in (SCENARIOS["stale"], fresh)]
    assert not seen[0]["replica"].equals(seen[1]["replica"])


def test_the_oracle_is_far_ahead_where_prompts_differ() -> None:
    scenario = load_scenario("mixed_long").at(num_requests=1500)
    names = ("oracle", "least_tokens", "round_robin")
    runs = {name: run_cell(scenario, SchedulerSpec(name, name), SEED, engine="twin") for name in names}
    mean_s = {name: run.metrics(scenario)["e2e_mean"] for name, run in runs.items()}
    assert mean_s["oracle"] < 0.95 * mean_s["least_tokens"] < 0.95 * mean_s["round_robin"]
    again = run_cell(scenario, SchedulerSpec("oracle", "oracle"), SEED, engine="twin")
    pd.testing.assert_frame_equal(again.requests, runs["oracle"].requests, check_exact=True)


def test_the_oracle_leaves_drained_replicas_alone() -> None:
    scenario = SCENARIOS["drain"]
    (drain,) = scenario.drains(scenario.requests(SEED))
    requests = run_cell(scenario, SchedulerSpec("oracle", "oracle"), SEED, engine="twin").requests
    is_closed = requests["arrived_at_s"].between(drain.from_s, drain.to_s, inclusive="left")
    assert drain.replica not in set(requests["replica"][is_closed])


def test_learning_online_runs_in_vidur_whatever_the_engine() -> None:
    (spec,) = parse_schedulers(["ppo_modular"])
    run = run_cell(SCENARIOS["mixed_long"], spec.with_options(rollout_len=40), SEED, engine="twin")
    assert set(run.metrics(SCENARIOS["mixed_long"])) == set(METRICS)


def test_the_printed_command_simulates_the_same(tmp_path: Path) -> None:
    """A user's plain `python -m vidur.main` with the flags of a cell: the same placements and latencies."""
    scenario, scheduler = SCENARIOS["stale"], SchedulerSpec("least_tokens", "least_tokens")
    quiet = ["--no-metrics_config_store_plots", "--no-metrics_config_enable_chrome_trace"]
    command = [sys.executable, "-m", "vidur.main", *vidur_arguments(scenario, scheduler, SEED), *quiet]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (file,) = tmp_path.rglob("request_metrics.csv")
    metrics = pd.read_csv(file).sort_values("Request Id")
    requests = run_cell(scenario, scheduler, SEED, engine="twin").requests
    expected = (requests["completed_at_s"] - requests["arrived_at_s"]).to_numpy()
    assert metrics["request_e2e_time"].to_numpy() == pytest.approx(expected, rel=1e-12)


def test_what_plain_vidur_cannot_do_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "drain", "--scheduler", "lor"]) == 2
    assert "lor is Vidur's own and has no flags for old reports or drained replicas" in capsys.readouterr().err
    assert main(["scenario", "chat", "--scheduler", "oracle"]) == 2
    assert main(["scenario", "chat", "--scheduler", "lor", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith("python -m vidur.main ") and "--renewal_request_interval_generator_config_seed 5" in printed
    )
    assert main(["scenario"]) == 0
    assert "mixed_long" in capsys.readouterr().out


def test_what_the_twin_does_not_cover_is_named() -> None:
    scenario = SCENARIOS["mixed_long"].at(flags={"replica_scheduler_config_type": "mnemosyne_edf"})
    with pytest.raises(EngineError, match=r"--replica_scheduler_config_type .* got mnemosyne_edf; use --engine vidur"):
        run_cell(scenario, SCHEDULERS[0], SEED, engine="twin")
    with pytest.raises(EngineError, match=r"error: --replica_scheduler_config_type: unknown type 'lightllm'"):
        run_cell(scenario.at(flags={"replica_scheduler_config_type": "lightllm"}), SCHEDULERS[0], SEED, engine="twin")
    with pytest.raises(EngineError, match="it needs --engine twin"):
        run_cell(scenario, SchedulerSpec("oracle", "oracle"), SEED, engine="vidur")
