"""How much faster a comparison is with two processes than with one; at most 0.65 times the time is the limit.

    python benchmarks/compare_scaling.py [--json] [--quick] [--repeats 2] [--seeds 8] [--limit 0.65]

The real command in new processes, start of interpreter and imports included: 3 scenarios, 6 schedulers, 8 seeds. It
needs two cores that nobody else uses; the best of several repeats counts, since others can only slow a run down.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin.compare.results import Results

SCHEDULERS = "round_robin,lor,power_of_two,least_outstanding,least_tokens,shortest_delay"
SCENARIOS = ("mixed", "mixed_long", "hetero_mixed8")


def run(options: argparse.Namespace, jobs: int, seeds: int) -> tuple[float, int]:
    """Seconds of a whole comparison, and the number of its cells that were run."""
    scenarios = ",".join(SCENARIOS[: options.scenarios])
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "compare", "--out", str(out)]
        command += ["--schedulers", SCHEDULERS, "--reference", "round_robin", "--scenarios", scenarios]
        command += ["--seeds", str(seeds), "--jobs", str(jobs), *(["--quick"] if options.quick else [])]
        started_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started_s, len(Results(out).cells)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The best of several runs with one process and with two."""
    if not options.quick:
        run(options, 2, 1)  # compiles what is not compiled yet
    runs = {jobs: [run(options, jobs, options.seeds) for _ in range(options.repeats)] for jobs in (1, 2)}
    times_s = {jobs: min(elapsed_s for elapsed_s, _ in of_jobs) for jobs, of_jobs in runs.items()}
    return {
        "one_s": times_s[1],
        "two_s": times_s[2],
        "ratio": times_s[2] / times_s[1],
        "cells": min(num_cells for of_jobs in runs.values() for _, num_cells in of_jobs),
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Measure, print, and fail above the limit."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=2, help="runs of each kind, of which the best counts")
    parser.add_argument("--seeds", type=positive, default=8)
    parser.add_argument("--scenarios", type=positive, default=len(SCENARIOS), help="how many of the three")
    parser.add_argument("--limit", type=float, default=0.65, help="exit with status 1 above this ratio")
    options = parse_options(parser, quick={"repeats": 1, "seeds": 1, "scenarios": 1})
    return report(
        options,
        lambda: measure(options),
        lambda result: [
            f"one process {result['one_s']:.1f} s, two {result['two_s']:.1f} s for {result['cells']} cells: "
            f"{result['ratio']:.2f} times (limit {options.limit})"
        ],
        lambda result: ["ratio"] if result["ratio"] > options.limit else [],
    )


if __name__ == "__main__":
    sys.exit(main())
