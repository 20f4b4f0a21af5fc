"""How much faster a comparison is with two processes than with one; at most 0.65 times the time is the limit.

    python benchmarks/compare_scaling.py [--repeats N] [--limit X] [--json]

The real command in new processes, start of interpreter and imports included: 3 scenarios, 6 schedulers, 8 seeds. It
needs two cores that nobody else uses; the best of several repeats counts, since others can only slow a run down.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCHEDULERS = "round_robin,lor,power_of_two,least_outstanding,least_tokens,shortest_delay"
SCENARIOS = "mixed,mixed_long,hetero_mixed8"


def run(jobs: int, seeds: int) -> float:
    """Seconds of a whole comparison."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--schedulers", SCHEDULERS, "--scenarios", SCENARIOS, "--seeds", str(seeds), "--jobs", str(jobs))
        command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "compare", "--out", str(Path(name) / "out"), *options]
        started_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started_s


def main() -> int:
    """Measure, print, and fail above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=0.65, help="exit with status 1 above this ratio")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args()
    for name in ("repeats", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(options, name)}")
    run(2, 1)  # compiles what is not compiled yet
    times_s = {jobs: min(run(jobs, options.seeds) for _ in range(options.repeats)) for jobs in (1, 2)}
    ratio = times_s[2] / times_s[1]
    if options.json:
        print(json.dumps({"one_s": times_s[1], "two_s": times_s[2], "ratio": ratio, "cores": os.cpu_count()}))
    else:
        print(f"one process {times_s[1]:.1f} s, two {times_s[2]:.1f} s: {ratio:.2f} times (limit {options.limit})")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
