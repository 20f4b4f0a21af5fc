"""Every heuristic on the same requests, near saturation: the table of baselines in the README.

    python benchmarks/baselines.py [--scenario arxiv|speeds|documents] [--seeds N] [--trace FILE] [--json]

Lengths are drawn from distributions shaped like the data they are named after, so nothing has to be downloaded;
`--trace` takes real ones instead (a CSV with the columns num_prefill_tokens and num_decode_tokens). Every scheduler
gets the same requests for a seed; the table shows the mean over seeds and the change against round_robin, paired by
seed, with its standard deviation.
"""

import argparse
import contextlib
import csv
import io
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.record.outcome import Outcome

SCHEDULERS = (
    "round_robin",
    "random",
    "lor",
    "power_of_two",
    "least_outstanding",
    "least_kv",
    "least_work",
    "least_tokens",
    "shortest_delay",
    "size_split",
)
METRICS: dict[str, Callable[[Outcome], float]] = {
    "ttft_mean": lambda run: run.ttft_s.mean,
    "ttft_p99": lambda run: run.ttft_s.p99,
    "e2e_mean": lambda run: run.e2e_s.mean,
    "e2e_p99": lambda run: run.e2e_s.p99,
}
BASELINE = "round_robin"


def arxiv_lengths(rng: random.Random) -> tuple[int, int]:
    """Summaries of papers: prompts of about 2,700 tokens up to 3,900, outputs of about 170 with a long tail."""
    prompt = min(3900, max(100, round(rng.gauss(2730, 950))))
    return prompt, min(4096 - prompt, max(5, round(rng.lognormvariate(5.12, 0.75))))


def document_lengths(rng: random.Random) -> tuple[int, int]:
    """Chat, and in 3 of 100 requests a document of 8,000 to 24,000 tokens."""
    if rng.random() < 0.03:
        return rng.randint(8000, 24000), max(5, round(rng.lognormvariate(5.0, 0.6)))
    return min(4000, max(10, round(rng.lognormvariate(5.5, 1.0)))), max(5, round(rng.lognormvariate(5.0, 0.6)))


@dataclass(frozen=True)
class Scenario:
    """A workload and what is special about its cluster."""

    lengths: Callable[[random.Random], tuple[int, int]]
    qps: float
    max_tokens: int = 4096
    flags: dict[str, Any] = field(default_factory=dict)


SCENARIOS = {
    "arxiv": Scenario(
        arxiv_lengths,
        qps=13.0,
        flags={"size_split_global_scheduler_config_threshold_tokens": 3500},
    ),
    "speeds": Scenario(
        arxiv_lengths,
        qps=9.5,
        flags={"roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 1.0, 0.5, 0.5]},
    ),
    "documents": Scenario(
        document_lengths,
        qps=28.0,
        max_tokens=32768,
        flags={"size_split_global_scheduler_config_threshold_tokens": 4096},
    ),
}


def run(
    scheduler: str, scenario: Scenario, lengths_file: Path, num_requests: int, seed: int, directory: Path
) -> Outcome:
    """One simulation in this process, its log dropped."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
    from vidur_ppo_plugin.sim.launch import run as launch

    flags = {
        "global_scheduler_config_type": scheduler,
        "execution_time_predictor_config_type": "roofline",
        "roofline_execution_time_predictor_config_cache_dir": str(directory / "cache"),
        "cluster_config_num_replicas": 4,
        "replica_config_device": "a100",
        "replica_config_network_device": "a100_dgx",
        "replica_config_tensor_parallel_size": 1,
        "replica_config_num_pipeline_stages": 1,
        "replica_scheduler_config_type": "sarathi",
        "seed": seed,
        "synthetic_request_generator_config_seed": seed,
        "synthetic_request_generator_config_num_requests": num_requests,
        "length_generator_config_type": "trace",
        "trace_request_length_generator_config_trace_file": str(lengths_file),
        "trace_request_length_generator_config_max_tokens": scenario.max_tokens,
        "trace_request_length_generator_config_seed": seed,
        "interval_generator_config_type": "poisson",
        "poisson_request_interval_generator_config_qps": scenario.qps,
        "metrics_config_output_dir": str(directory),
        "metrics_config_store_plots": False,
        "metrics_config_enable_chrome_trace": False,
        "metrics_config_write_metrics": False,
        **scenario.flags,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        return launch(to_arguments(flags, known_flags()))


def write_lengths(path: Path, scenario: Scenario, num_requests: int, seed: int) -> None:
    """A file of lengths as Vidur's trace generator wants them."""
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["num_prefill_tokens", "num_decode_tokens"])
        writer.writerows(scenario.lengths(rng) for _ in range(num_requests))


def measure(scenario: Scenario, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """scheduler -> one dictionary of metrics for each seed."""
    _autoload.install()
    results: dict[str, list[dict[str, float]]] = {scheduler: [] for scheduler in SCHEDULERS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            lengths_file = options.trace or directory / f"lengths_{seed}.csv"
            if options.trace is None:
                write_lengths(lengths_file, scenario, options.requests, seed)
            for scheduler in SCHEDULERS:
                outcome = run(scheduler, scenario, lengths_file, options.requests, seed, directory)
                results[scheduler].append({name: metric(outcome) for name, metric in METRICS.items()})
                print(f"seed {seed}: {scheduler} done", file=sys.stderr)
    return results


def change(results: dict[str, list[dict[str, float]]], scheduler: str, metric: str) -> tuple[float, float]:
    """Relative change against the baseline, paired by seed: mean and standard deviation."""
    changes = [
        ours[metric] / theirs[metric] - 1 for ours, theirs in zip(results[scheduler], results[BASELINE], strict=True)
    ]
    return statistics.mean(changes), statistics.stdev(changes) if len(changes) > 1 else 0.0


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    """Seconds (mean over seeds), and the change against round_robin with its spread over seeds."""
    print("| scheduler | TTFT mean | TTFT P99 | E2E mean | E2E P99 |")
    print("|---|---|---|---|---|")
    for scheduler, runs in results.items():
        cells = []
        for metric in METRICS:
            seconds = statistics.mean(run[metric] for run in runs)
            mean, spread = change(results, scheduler, metric)
            cells.append(
                f"{seconds:.2f} s" if scheduler == BASELINE else f"{seconds:.2f} s ({mean:+.0%} ± {spread:.0%})"
            )
        print(f"| {scheduler} | {' | '.join(cells)} |")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="arxiv")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (each its own requests)")
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--trace", type=Path, help="CSV with real lengths instead of drawn ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    for name in ("seeds", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(options, name)}")
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: no such file")
    results = measure(SCENARIOS[options.scenario], options)
    if options.json:
        changes = {s: {m: change(results, s, m) for m in METRICS} for s in SCHEDULERS if s != BASELINE}
        print(json.dumps({"scenario": options.scenario, "runs": results, "change_against_round_robin": changes}))
    else:
        print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
