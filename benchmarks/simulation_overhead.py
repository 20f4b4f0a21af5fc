"""What `ppo_modular` adds to the wall-clock time of a whole simulation: 2,000 requests of `configs/learning.yaml`.

    python benchmarks/simulation_overhead.py [--json] [--quick] [--repeats 5] [--requests 2000]

Runs round_robin, the policy that comes with the package in inference, and ppo_modular learning from nothing, in turn,
in one process, so that whatever else the machine does hits all alike; imports are excluded, and one round that warms up
is dropped. To compare like with like, ppo_modular computes its decisions (and learns from them) and then round_robin's
placements are applied: all three simulate the same events, which is checked. The shortest time of each kind counts,
because other work on the machine only ever adds time.

Limits: inference 1.10 times round_robin, learning 1.5 times, with at least 10 updates. Exit status 1 if one is missed,
and an error if learning made no update at all, or inference made one. For information: each as a real
`python -m vidur.main`, imports included, with placements of its own (not with --quick).
"""

import argparse
import gc
import itertools
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin import _autoload

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "learning.yaml"
PREFIX = "p_p_o_global_scheduler_modular_config_"
KINDS: dict[str, dict[str, Any]] = {
    "round_robin": {"global_scheduler_config_type": "round_robin"},
    "inference": {
        "global_scheduler_config_type": "ppo_modular",
        f"{PREFIX}load_checkpoint": "pretrained",
        f"{PREFIX}inference_only": True,
    },
    "training": {"global_scheduler_config_type": "ppo_modular"},
}
LIMITS = {"inference": 1.10, "training": 1.5}
LEAST_UPDATES = 10


def arguments(kind: str, num_requests: int, directory: Path) -> list[str]:
    """The command line of a run."""
    from vidur_ppo_plugin.cli import load_flags
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    flags = {
        **load_flags(str(CONFIG)),
        "synthetic_request_generator_config_num_requests": num_requests,
        "metrics_config_output_dir": str(directory),
        "roofline_execution_time_predictor_config_cache_dir": str(directory / "cache"),
        **KINDS[kind],
    }
    return to_arguments(flags, known_flags())


class Run(NamedTuple):
    """What came of a simulation."""

    elapsed_s: float
    num_updates: int
    num_completed: int
    #: The simulated time at which it ended.
    end_s: float


def run(command_line: list[str]) -> Run:
    """What `vidur.main` does, timed."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    from vidur_ppo_plugin.sim.launch import _argv

    gc.collect()
    with _argv(["vidur.main", *command_line]):
        started_s = time.perf_counter()
        config = SimulationConfig.create_from_cli_args()
        set_seeds(config.seed)
        simulator = Simulator(config)
        agent = getattr(simulator.scheduler, "agent", None)
        if agent is not None:
            apply_round_robin(simulator.scheduler)
        requests = [event._request for _, event in simulator._event_queue]
        simulator.run()
        elapsed_s = time.perf_counter() - started_s
    num_completed = sum(request._completed for request in requests)
    return Run(elapsed_s, 0 if agent is None else agent.ppo.num_updates, num_completed, simulator._time)


def apply_round_robin(scheduler: Any) -> None:
    """Let the scheduler compute its decisions, and place in turn."""
    cluster = scheduler.cluster
    place, turns = cluster.place, itertools.cycle(range(cluster.num_replicas))
    cluster.place = lambda replica: place(next(turns))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all kinds in turn and compare."""
    _autoload.install()
    import vidur.main  # noqa: F401  (imports do not count)

    import vidur_ppo_plugin.sim.ppo_scheduler  # noqa: F401

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        command_lines = {kind: arguments(kind, options.requests, Path(directory)) for kind in KINDS}
        runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
        for repeat in range(-1, options.repeats):
            for kind, command_line in command_lines.items():
                runs[kind].append(run(command_line))
            print(f"round {repeat + 1} of {options.repeats}", file=sys.stderr)
        check(runs, options.requests)
        # The first round warmed up.
        times_s = {kind: [one.elapsed_s for one in of_kind[1:]] for kind, of_kind in runs.items()}
        seconds = {kind: min(values) for kind, values in times_s.items()}
        with_imports = {} if options.quick else {kind: with_imports_s(line) for kind, line in command_lines.items()}
    result = {
        **{f"{kind}_ratio": round(seconds[kind] / seconds["round_robin"], 4) for kind in LIMITS},
        "limits": LIMITS,
        "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
        "all_seconds": {kind: [round(value, 3) for value in values] for kind, values in times_s.items()},
        "updates": runs["training"][-1].num_updates,
        "requests": options.requests,
        "completed": min(one.num_completed for of_kind in runs.values() for one in of_kind),
        "seconds_with_imports": {kind: round(value, 2) for kind, value in with_imports.items()},
    }
    return {**result, "missed": list(missed(result))}


def check(runs: dict[str, list[Run]], num_requests: int) -> None:
    """RuntimeError if the kinds did not simulate the same, or did not do what they are measured for."""
    ends_s = {one.end_s for of_kind in runs.values() for one in of_kind}
    if len(ends_s) > 1:
        raise RuntimeError(f"the runs did not simulate the same events: they ended at {sorted(ends_s)} s")
    for kind, of_kind in runs.items():
        for one in of_kind:
            if one.num_completed != num_requests:
                raise RuntimeError(f"{kind} completed {one.num_completed} of {num_requests} requests")
            if (one.num_updates > 0) != (kind == "training"):
                raise RuntimeError(f"{kind} made {one.num_updates} updates")


def with_imports_s(command_line: list[str]) -> float:
    """Seconds of a real `python -m vidur.main`."""
    started_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "vidur.main", *command_line], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"vidur.main exits with status {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started_s


def missed(result: dict[str, Any]) -> Iterator[str]:
    """The names of figures that miss their limit."""
    yield from (f"{kind}_ratio" for kind, limit in LIMITS.items() if result[f"{kind}_ratio"] > limit)
    if result["updates"] < LEAST_UPDATES:
        yield "updates"


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    yield f"{'':<14}{'seconds':>9}{'ratio':>8}{'limit':>8}{'with imports':>15}"
    for kind, seconds in result["seconds"].items():
        ratio = f"{result[f'{kind}_ratio']:>8.3f}{LIMITS[kind]:>8.2f}" if kind in LIMITS else " " * 16
        imports = result["seconds_with_imports"].get(kind)
        yield f"{kind:<14}{seconds:>9.2f}{ratio}" + (f"{imports:>13.1f} s" if imports else "")
    yield f"{result['updates']} updates (at least {LEAST_UPDATES}), {result['requests']} requests"


def main() -> int:
    """Measure, print, and return 1 if a limit is missed."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--requests", type=positive, default=2000, help="requests of a run (default: 2000)")
    options = parse_options(parser, quick={"repeats": 1, "requests": 300})
    return report(options, lambda: measure(options), lines_of, lambda result: result["missed"])


if __name__ == "__main__":
    sys.exit(main())
