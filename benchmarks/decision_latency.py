"""What one decision of `ppo_modular` costs: observe, features, prior, policy, sample.

    python benchmarks/decision_latency.py [--json] [--decisions 1200]

Real decisions in real simulations, at the default flags: the scheduler's own `_place` runs as always, with rewards and
learning; only the calls that make up deciding are timed, each on its own. Between two decisions the simulator does its
work and fills the processor's caches, as it does in use; a loop over one decision would flatter. First the cluster is
loaded (quickstart's 2.5 requests per second and replica), then decisions are timed in blocks. Reported is the median
of the best block, because other work on the machine only ever adds time; also the median of all of them.

Limits: 60 us at 4 replicas, 150 us at 64, 250 us at 1,024 with max_candidates 16. Exit status 1 if one is missed.
For information: the same in inference (greedy), and 1,024 replicas without max_candidates.
"""

import argparse
import contextlib
import heapq
import io
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import _autoload

PREFIX = "p_p_o_global_scheduler_modular_config_"
QPS_PER_REPLICA = 2.5
BLOCK = 100
LIMITS_US = {"4": 60.0, "64": 150.0, "1024": 250.0}
PARTS = ("request", "snapshot", "features", "policy")


@dataclass(frozen=True)
class Case:
    """A cluster to measure: its name, size, and flags other than the defaults."""

    name: str
    num_replicas: int
    flags: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("4", 4),
    Case("64", 64),
    Case("1024", 1024, {"max_candidates": 16}),
    Case("4 inference", 4, {"inference_only": True}),
    Case("64 inference", 64, {"inference_only": True}),
    Case("1024 inference", 1024, {"inference_only": True, "max_candidates": 16}),
    Case("1024 inference, all candidates", 1024, {"inference_only": True}),
)


class Stopwatch:
    """Seconds that each part of deciding takes, of every decision."""

    def __init__(self, scheduler: Any) -> None:
        self._now: dict[str, float] = {}
        self.decisions: list[dict[str, float]] = []
        source, agent = scheduler._source, scheduler.agent
        source.request_info = self._timed("request", source.request_info)
        source.snapshot = self._timed("snapshot", source.snapshot)
        agent.observe = self._timed("features", agent.observe)
        agent.decide = self._timed("policy", agent.decide)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed_s = time.perf_counter() - started_s
            # The first call of a decision counts: recording an update takes another snapshot.
            self._now.setdefault(name, elapsed_s)
            if name == PARTS[-1]:
                self.decisions.append(self._now)
                self._now = {}
            return result

        return timed


def build(case: Case, num_requests: int, directory: Path) -> Any:
    """A simulator that has not started."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    from vidur_ppo_plugin.cli import load_flags
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
    from vidur_ppo_plugin.sim.launch import _argv

    flags = {
        **load_flags(None),
        "global_scheduler_config_type": "ppo_modular",
        "cluster_config_num_replicas": case.num_replicas,
        "synthetic_request_generator_config_num_requests": num_requests,
        "poisson_request_interval_generator_config_qps": QPS_PER_REPLICA * case.num_replicas,
        "metrics_config_output_dir": str(directory),
        "metrics_config_write_metrics": False,
        "roofline_execution_time_predictor_config_cache_dir": str(directory / "cache"),
        **{f"{PREFIX}{name}": value for name, value in case.flags.items()},
    }
    with _argv(["vidur.main", *to_arguments(flags, known_flags())]):
        config = SimulationConfig.create_from_cli_args()
    set_seeds(config.seed)
    return Simulator(config)


def measure(case: Case, num_decisions: int, directory: Path) -> dict[str, Any]:
    """Load the cluster, then time `num_decisions` decisions."""
    warm_up = max(400, 3 * case.num_replicas)
    with contextlib.redirect_stdout(io.StringIO()):
        simulator = build(case, warm_up + num_decisions, directory)
    watch = Stopwatch(simulator.scheduler)
    # The loop of Simulator.run, without draining the cluster at the end.
    while len(watch.decisions) < warm_up + num_decisions:
        _, event = heapq.heappop(simulator._event_queue)
        simulator._set_time(event._time)
        simulator._add_events(event.handle_event(simulator._scheduler, simulator._metric_store))
    snapshot = simulator.scheduler._source.snapshot(simulator._time)
    simulator.scheduler._abandon()  # no report and no checkpoint of a run that was cut off
    decisions_us = [{part: 1e6 * s for part, s in parts.items()} for parts in watch.decisions[warm_up:]]
    blocks = [decisions_us[start : start + BLOCK] for start in range(0, len(decisions_us), BLOCK)]
    best = min(blocks, key=median_us)
    return {
        "median_us": round(median_us(best), 1),
        "median_of_all_us": round(median_us(decisions_us), 1),
        "parts_us": {part: round(statistics.median(d[part] for d in best), 1) for part in PARTS},
        "updates": simulator.scheduler.agent.ppo.num_updates,
        "outstanding_per_replica": round(float(snapshot.outstanding_requests.mean()), 1),
    }


def median_us(decisions: list[dict[str, float]]) -> float:
    """Median of the sum of the parts."""
    return statistics.median(sum(parts.values()) for parts in decisions)


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--decisions", type=int, default=1200, help="timed decisions of each case")
    options = parser.parse_args()
    if options.decisions < BLOCK:
        parser.error(f"--decisions must be >= {BLOCK}, got {options.decisions}")
    _autoload.install()
    import vidur.main  # noqa: F401  (sets up Vidur's logging, which is then quietened)

    logging.disable(logging.WARNING)
    results = {}
    for case in CASES:
        print(f"{case.name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as directory:
            results[case.name] = measure(case, options.decisions, Path(directory))
    missed = [name for name, limit_us in LIMITS_US.items() if results[name]["median_us"] > limit_us]
    if options.json:
        medians = {name: results[name]["median_us"] for name in LIMITS_US}
        print(json.dumps({"median_us": medians, "limits_us": LIMITS_US, "missed": missed, "cases": results}))
    else:
        print_table(results)
    return 1 if missed else 0


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """The result for people, in microseconds."""
    print(f"{'replicas':<32}{'median':>9}{'limit':>7}{'of all':>9}   " + "".join(f"{part:>10}" for part in PARTS))
    for name, result in results.items():
        limit = f"{LIMITS_US[name]:.0f}" if name in LIMITS_US else ""
        parts = "".join(f"{result['parts_us'][part]:>10.1f}" for part in PARTS)
        print(f"{name:<32}{result['median_us']:>6.1f} us{limit:>7}{result['median_of_all_us']:>9.1f}   {parts}")


if __name__ == "__main__":
    sys.exit(main())
