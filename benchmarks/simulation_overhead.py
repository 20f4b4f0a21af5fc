"""What `ppo_modular` adds to the wall-clock time of a whole simulation: 2,000 requests of the quickstart workload.

    python benchmarks/simulation_overhead.py [--json] [--repeats 5]

Runs round_robin, ppo_modular in inference and ppo_modular learning at its defaults, in turn, in one process, so that
whatever else the machine does hits all alike; imports are excluded, and one round that warms up is dropped. To compare
like with like, ppo_modular computes its decisions (and learns from them) and then round_robin's placements are applied:
all three simulate the same events, which is checked. The shortest time of each kind counts, because other work on the
machine only ever adds time.

Limits: inference 1.10 times round_robin, learning 1.5 times, with at least 10 updates. Exit status 1 if one is missed.
For information: each as a real `python -m vidur.main`, imports included, with placements of its own.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import _autoload

PREFIX = "p_p_o_global_scheduler_modular_config_"
KINDS: dict[str, dict[str, Any]] = {
    "round_robin": {"global_scheduler_config_type": "round_robin"},
    "inference": {"global_scheduler_config_type": "ppo_modular", f"{PREFIX}inference_only": True},
    "training": {"global_scheduler_config_type": "ppo_modular"},
}
LIMITS = {"inference": 1.10, "training": 1.5}
LEAST_UPDATES = 10


def arguments(kind: str, num_requests: int, directory: Path) -> list[str]:
    """The command line of a run."""
    from vidur_ppo_plugin.cli import load_flags
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    flags = {
        **load_flags(None),
        "synthetic_request_generator_config_num_requests": num_requests,
        "metrics_config_output_dir": str(directory),
        "roofline_execution_time_predictor_config_cache_dir": str(directory / "cache"),
        **KINDS[kind],
    }
    return to_arguments(flags, known_flags())


def run(command_line: list[str]) -> tuple[float, int, float]:
    """What `vidur.main` does: seconds it takes, updates made, and the simulated time at which it ends."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    from vidur_ppo_plugin.sim.launch import _argv

    gc.collect()
    with _argv(["vidur.main", *command_line]), contextlib.redirect_stdout(io.StringIO()):
        started_s = time.perf_counter()
        config = SimulationConfig.create_from_cli_args()
        set_seeds(config.seed)
        simulator = Simulator(config)
        agent = getattr(simulator.scheduler, "agent", None)
        if agent is not None:
            apply_round_robin(simulator.scheduler)
        simulator.run()
        elapsed_s = time.perf_counter() - started_s
    return elapsed_s, 0 if agent is None else agent.ppo.num_updates, simulator._time


def apply_round_robin(scheduler: Any) -> None:
    """Let the scheduler compute its decisions, and place in turn."""
    place, turns = scheduler._place, itertools.cycle(range(len(scheduler._replica_ids)))

    def placed_in_turn(request: Any, now_s: float) -> int:
        place(request, now_s)
        return next(turns)

    scheduler._place = placed_in_turn


def measure(num_requests: int, repeats: int, directory: Path) -> dict[str, Any]:
    """Run all kinds in turn and compare."""
    times_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    updates, ends_s = 0, set()
    for repeat in range(-1, repeats):
        for kind in KINDS:
            elapsed_s, num_updates, end_s = run(arguments(kind, num_requests, directory))
            ends_s.add(end_s)
            updates = max(updates, num_updates)
            if repeat >= 0:
                times_s[kind].append(elapsed_s)
        print(f"round {repeat + 1} of {repeats}", file=sys.stderr)
    if len(ends_s) > 1:
        raise RuntimeError(f"the runs did not simulate the same events: they ended at {sorted(ends_s)} s")
    seconds = {kind: min(values) for kind, values in times_s.items()}
    return {
        **{f"{kind}_ratio": round(seconds[kind] / seconds["round_robin"], 4) for kind in LIMITS},
        "limits": LIMITS,
        "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
        "all_seconds": {kind: [round(value, 3) for value in values] for kind, values in times_s.items()},
        "updates": updates,
        "requests": num_requests,
        "seconds_with_imports": {
            kind: round(with_imports_s(arguments(kind, num_requests, directory)), 2) for kind in KINDS
        },
    }


def with_imports_s(command_line: list[str]) -> float:
    """Seconds of a real `python -m vidur.main`."""
    started_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "vidur.main", *command_line], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"vidur.main exits with status {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started_s


def main() -> int:
    """Measure, print, and return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of a run (default: 2000)")
    options = parser.parse_args()
    for name in ("repeats", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(options, name)}")
    _autoload.install()
    import vidur.main  # noqa: F401  (imports do not count)

    import vidur_ppo_plugin.sim.ppo_scheduler  # noqa: F401

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options.requests, options.repeats, Path(directory))
    missed = [f"{kind}_ratio" for kind, limit in LIMITS.items() if result[f"{kind}_ratio"] > limit]
    if result["updates"] < LEAST_UPDATES:
        missed.append("updates")
    result["missed"] = missed
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 1 if missed else 0


def print_table(result: dict[str, Any]) -> None:
    """The result for people."""
    print(f"{'':<14}{'seconds':>9}{'ratio':>8}{'limit':>8}{'with imports':>15}")
    for kind, seconds in result["seconds"].items():
        ratio = f"{result[f'{kind}_ratio']:>8.3f}{LIMITS[kind]:>8.2f}" if kind in LIMITS else " " * 16
        print(f"{kind:<14}{seconds:>9.2f}{ratio}{result['seconds_with_imports'][kind]:>13.1f} s")
    print(f"{result['updates']} updates (at least {LEAST_UPDATES}), {result['requests']} requests")
    if result["missed"]:
        print(f"MISSED: {', '.join(result['missed'])}")


if __name__ == "__main__":
    sys.exit(main())
