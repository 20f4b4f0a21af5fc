"""Every baseline through the real command line, on every kind of replica scheduler, and how good they are."""

import csv
from pathlib import Path
from typing import Any

import pytest
from simulation import arguments, simulate, vidur_main

from vidur_ppo_plugin.record.outcome import RunOutcome

OURS = [
    "least_outstanding",
    "power_of_two",
    "least_kv",
    "least_tokens",
    "least_work",
    "shortest_delay",
    "size_split",
    "ppo_modular",
]


def run_command_line(tmp_path: Path, **flags: Any) -> tuple[str, list[dict[str, str]]]:
    """The log and the request table of a `python -m vidur.main` run."""
    done = vidur_main(arguments(tmp_path, **flags), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (table,) = tmp_path.glob("*/request_metrics.csv")
    return done.stdout, list(csv.DictReader(table.read_text().splitlines()))


@pytest.mark.parametrize("scheduler", OURS)
def test_baseline_through_the_command_line(tmp_path: Path, scheduler: str) -> None:
    log, table = run_command_line(tmp_path, global_scheduler_config_type=scheduler)
    assert len(table) == 100
    assert all(float(row["request_e2e_time"]) > 0 for row in table)
    assert f"global scheduler {scheduler} is active on 4 replicas" in log


@pytest.mark.parametrize("replica_scheduler", ["sarathi", "vllm", "orca", "mnemosyne_fcfs_fixed_chunk"])
def test_replica_scheduler_through_the_command_line(tmp_path: Path, replica_scheduler: str) -> None:
    log, table = run_command_line(
        tmp_path, global_scheduler_config_type="round_robin", replica_scheduler_config_type=replica_scheduler
    )
    assert len(table) == 100
    # Alone on an A100, the smallest of these prompts takes tens of milliseconds, and no request minutes.
    assert all(0.02 < float(row["prefill_e2e_time"]) < 60 for row in table)
    assert "vidur-ppo-plugin" not in log  # a stock scheduler is a stock scheduler


def test_plots_are_drawn_without_a_browser(tmp_path: Path) -> None:
    """Vidur's default flags end in plots; the versions we require draw them offline."""
    run_command_line(tmp_path, global_scheduler_config_type="least_tokens", metrics_config_store_plots=True)
    assert len(list(tmp_path.glob("*/plots/*.png"))) >= 20


@pytest.mark.parametrize("replicas", [1, 3])
def test_few_replicas(tmp_path: Path, replicas: int) -> None:
    for scheduler in OURS:
        if scheduler == "size_split" and replicas == 1:
            continue
        outcome = simulate(
            tmp_path,
            global_scheduler_config_type=scheduler,
            cluster_config_num_replicas=replicas,
            synthetic_request_generator_config_num_requests=20,
        )
        assert len(outcome.completed) == 20


def test_ties_are_broken_fairly_and_by_seed(tmp_path: Path) -> None:
    """At light load every replica is empty at every arrival: stock lor would send all to the first."""

    def placements(seed: int) -> list[int | None]:
        outcome = simulate(
            tmp_path,
            global_scheduler_config_type="least_outstanding",
            least_outstanding_global_scheduler_config_seed=seed,
            poisson_request_interval_generator_config_qps=0.05,
            synthetic_request_generator_config_num_requests=200,
        )
        return [request.replica for request in outcome.requests]

    first = placements(1)
    assert first == placements(1)
    assert first != placements(2)
    shares = [first.count(index) / len(first) for index in range(4)]
    assert all(0.15 < share < 0.35 for share in shares)


def test_size_split_keeps_long_prompts_apart(tmp_path: Path) -> None:
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="size_split",
        size_split_global_scheduler_config_threshold_tokens=2500,
        size_split_global_scheduler_config_num_long_replicas=2,
    )
    for request in outcome.requests:
        assert (request.replica in (2, 3)) == (request.prompt_tokens > 2500)
    assert {request.replica for request in outcome.requests} == {0, 1, 2, 3}


def test_every_flag_of_least_tokens_matters(tmp_path: Path) -> None:
    def placements(**flags: float) -> list[int | None]:
        prefixed = {f"least_tokens_global_scheduler_config_{name}": value for name, value in flags.items()}
        outcome = simulate(tmp_path, global_scheduler_config_type="least_tokens", **prefixed)
        return [request.replica for request in outcome.requests]

    default = placements()
    assert placements(context_weight=1.0) != default
    assert placements(request_weight=2000.0) != default
    assert placements(context_weight=0.05, request_weight=20.0) == default


# --- how good they are -------------------------------------------------------------------------------------

# Close to what four replicas can carry (about 15 requests/s of this mix by our roofline).
NEAR_SATURATION = {
    "synthetic_request_generator_config_num_requests": 600,
    "poisson_request_interval_generator_config_qps": 13.5,
    "uniform_request_length_generator_config_min_tokens": 512,
}


@pytest.fixture(scope="module")
def near_saturation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunOutcome]:
    """The same 600 requests under four schedulers."""
    runs = {}
    for scheduler in ("round_robin", "lor", "least_tokens", "least_outstanding"):
        output_dir = tmp_path_factory.mktemp(scheduler)
        runs[scheduler] = simulate(output_dir, global_scheduler_config_type=scheduler, **NEAR_SATURATION)
    return runs


def test_all_schedulers_saw_the_same_requests(near_saturation: dict[str, RunOutcome]) -> None:
    workloads = {
        tuple((r.arrived_at_s, r.prompt_tokens, r.decode_tokens) for r in run.requests)
        for run in near_saturation.values()
    }
    assert len(workloads) == 1


def test_least_tokens_beats_round_robin_in_time_to_first_token(near_saturation: dict[str, RunOutcome]) -> None:
    ours, theirs = near_saturation["least_tokens"].ttft_s, near_saturation["round_robin"].ttft_s
    assert ours.mean < 0.97 * theirs.mean
    assert ours.p99 < 0.97 * theirs.p99


def test_least_tokens_beats_stock_lor_in_latency(near_saturation: dict[str, RunOutcome]) -> None:
    assert near_saturation["least_tokens"].e2e_s.mean < 0.97 * near_saturation["lor"].e2e_s.mean


def test_least_outstanding_is_what_lor_should_be(near_saturation: dict[str, RunOutcome]) -> None:
    assert near_saturation["least_outstanding"].e2e_s.mean < 0.97 * near_saturation["lor"].e2e_s.mean


def test_shortest_delay_knows_slow_replicas(tmp_path: Path) -> None:
    flags = {
        "roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 0.25],
        "poisson_request_interval_generator_config_qps": 6.0,
        "synthetic_request_generator_config_num_requests": 300,
    }
    aware = simulate(tmp_path, global_scheduler_config_type="shortest_delay", **flags)
    blind = simulate(tmp_path, global_scheduler_config_type="least_outstanding", **flags)
    slow = aware.replica_shares[1] + aware.replica_shares[3]
    assert slow < 0.3
    assert aware.e2e_s.mean < 0.9 * blind.e2e_s.mean
