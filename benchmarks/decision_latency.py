"""What one decision of `ppo_modular` costs: observe, features, prior, policy, sample.

    python benchmarks/decision_latency.py [--json] [--quick] [--decisions 1200]

In real simulations of `configs/learning.yaml`, learning from nothing: the cluster is loaded (2.5 requests per second
and replica), then decisions are timed in two ways, each of the four calls that make up deciding on its own.

- In a pause: the simulation stands still, and the requests that arrive next are placed one after the other, as
  `_place` does but for rewards and learning. As many replicas count as changed as change between two decisions. These
  are the figures that are judged: what deciding itself costs.
- In the run: every decision as the scheduler makes it, rewards and learning in between. Here the simulator, which
  works for a millisecond or more between two decisions, has emptied the processor's caches, so that they take longer.

Reported is the median of the best block of 100, because other work on the machine only ever adds time.

Limits: 60 us at 4 replicas, 150 us at 64, 250 us at 1,024 with max_candidates 16. Exit status 1 if one is missed.
For information: the policy that comes with the package in inference, also on 1,024 replicas without max_candidates.
"""

import heapq
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin import _autoload

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "learning.yaml"
PREFIX = "p_p_o_global_scheduler_modular_config_"
QPS_PER_REPLICA = 2.5
BLOCK = 100
LIMITS_US = {"4": 60.0, "64": 150.0, "1024": 250.0}
PARTS = ("request", "snapshot", "features", "policy")


@dataclass(frozen=True)
class Case:
    """A cluster to measure: its name, size, and flags of `ppo_modular` other than those of CONFIG."""

    name: str
    num_replicas: int
    flags: dict[str, Any] = field(default_factory=dict)


SHIPPED = {"load_checkpoint": "pretrained", "inference_only": True}
CASES = (
    Case("4", 4),
    Case("64", 64),
    Case("1024", 1024, {"max_candidates": 16}),
    Case("4 inference", 4, SHIPPED),
    Case("64 inference", 64, SHIPPED),
    Case("1024 inference", 1024, {**SHIPPED, "max_candidates": 16}),
    Case("1024 inference, all candidates", 1024, SHIPPED),
)


class Stopwatch:
    """Seconds that each part of deciding takes, of every decision."""

    def __init__(self, scheduler: Any) -> None:
        self._now: dict[str, float] = {}
        self.decisions: list[dict[str, float]] = []
        #: Replicas that had changed since the decision before, for each decision.
        self.num_moved: list[int] = []
        source, agent = scheduler.cluster.source, scheduler.agent
        self._moved = source._moved
        source.request_info = self._timed("request", source.request_info)
        source.snapshot = self._timed("snapshot", source.snapshot)
        agent.observe = self._timed("features", agent.observe)
        agent.decide = self._timed("policy", agent.decide)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == PARTS[0]:
                self.num_moved.append(len(self._moved))
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
        **load_flags(str(CONFIG)),
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


def measure_case(case: Case, num_decisions: int, directory: Path) -> dict[str, Any]:
    """Load the cluster, then time decisions in the run and in a pause."""
    warm_up = max(400, 3 * case.num_replicas)
    num_placed = warm_up + num_decisions
    simulator = build(case, num_placed + num_decisions, directory)
    watch = Stopwatch(simulator.scheduler)
    # The loop of Simulator.run, up to here.
    while len(watch.decisions) < num_placed:
        _, event = heapq.heappop(simulator._event_queue)
        simulator._set_time(event._time)
        simulator._add_events(event.handle_event(simulator._scheduler, simulator._metric_store))
    outstanding = simulator.scheduler.cluster.source.snapshot(simulator._time).outstanding_requests
    num_moved = statistics.median(watch.num_moved[warm_up:])
    place_in_pause(simulator, round(num_moved))
    simulator.scheduler._abandon()  # no report and no checkpoint of a run that was cut off
    updates = simulator.scheduler.agent.ppo.num_updates
    if (updates > 0) == bool(case.flags.get("inference_only")):
        raise RuntimeError(f"{case.name}: {updates} updates, which is not what this case is there to measure")
    in_run, in_pause = watch.decisions[warm_up:num_placed], watch.decisions[num_placed:]
    best = best_block(in_pause)
    return {
        "median_us": round(median_us(best), 1),
        "parts_us": {part: round(1e6 * statistics.median(decision[part] for decision in best), 1) for part in PARTS},
        "in_run_median_us": round(median_us(best_block(in_run)), 1),
        "updates": updates,
        "decisions": len(in_pause),
        "outstanding_per_replica": round(float(outstanding.mean()), 1),
        "replicas_changed_between_decisions": num_moved,
    }


def place_in_pause(simulator: Any, num_moved: int) -> None:
    """What a decision takes, without rewards and learning, with the simulation standing still."""
    scheduler = simulator.scheduler
    source, agent = scheduler.cluster.source, scheduler.agent
    requests = [event._request for _, event in sorted(simulator._event_queue) if hasattr(event, "_request")]
    rng = random.Random(0)
    for request in requests:
        source._moved.update(rng.sample(range(source.num_replicas), num_moved))
        info = source.request_info(request)
        agent.decide(*agent.observe(source.snapshot(simulator._time), info, None))
        if agent.awaits_reward:
            agent.settle(0.0)


def best_block(decisions: list[dict[str, float]]) -> list[dict[str, float]]:
    """The block of decisions with the lowest median."""
    return min((decisions[start : start + BLOCK] for start in range(0, len(decisions), BLOCK)), key=median_us)


def median_us(decisions: list[dict[str, float]]) -> float:
    """Median of the sum of the parts."""
    return 1e6 * statistics.median(sum(parts.values()) for parts in decisions)


def measure(num_decisions: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Time every case, and judge those that have a limit."""
    _autoload.install()
    import vidur.main  # noqa: F401  (sets up Vidur's logging, which is then quietened)

    logging.disable(logging.WARNING)
    results = {}
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as directory:
            results[case.name] = measure_case(case, num_decisions, Path(directory))
    medians = {name: results[name]["median_us"] for name in LIMITS_US if name in results}
    missed = [name for name, median in medians.items() if median > LIMITS_US[name]]
    return {"median_us": medians, "limits_us": LIMITS_US, "missed": missed, "cases": results}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result for people, in microseconds."""
    parts = "".join(f"{part:>10}" for part in PARTS)
    yield f"{'replicas':<32}{'median':>9}{'limit':>7}{parts}{'in the run':>13}"
    for name, case in result["cases"].items():
        limit = f"{LIMITS_US[name]:.0f}" if name in LIMITS_US else ""
        parts = "".join(f"{case['parts_us'][part]:>10.1f}" for part in PARTS)
        yield f"{name:<32}{case['median_us']:>6.1f} us{limit:>7}{parts}{case['in_run_median_us']:>10.1f} us"


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    parser = new_parser(__doc__)
    parser.add_argument("--decisions", type=positive, default=1200, help="timed decisions of each case")
    options = parse_options(parser, quick={"decisions": BLOCK})
    if options.decisions < BLOCK:
        parser.error(f"--decisions must be >= {BLOCK}, got {options.decisions}")
    # The smallest case of each kind.
    cases = [case for case in CASES if case.num_replicas == 4] if options.quick else CASES
    return report(options, lambda: measure(options.decisions, cases), lines_of, lambda result: result["missed"])


if __name__ == "__main__":
    sys.exit(main())
