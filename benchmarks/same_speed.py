"""Whether this checkout is slower than another one.

    python benchmarks/same_speed.py --base DIR [--pairs 15] [--only NAME,...] [--json] [--quick]

`--base` is the directory of the other checkout, for example one that `git worktree add` made. Each measurement is run
in both, in processes of their own, one right after the other, and whoever was first in a pair is second in the next;
the pairs of all measurements are spread over the whole time. What is reported is the time here over the time there: the
geometric mean over the pairs, with a 95 % interval by Student's t on the logarithms. Exit status 1 if an interval lies
above 1.05. Both must do the same work, which is counted. A run of each before the first pair compiles, and does not
count. All of it takes about three quarters of an hour, on a machine that does nothing else. `--only` takes some of:

    decisions    decisions of the shipped policy and of least_tokens on given snapshots of 4, 64 and 1,024 replicas
    simulations  runs in Vidur: round_robin, the shipped policy, learning from nothing
    twin         requests through routers in the twin, and the shipped policy in the compiled pass
    training-1   vidur-ppo train in one process: a decision once it runs, and the whole command
    training-2   the same with two workers
    comparison   vidur-ppo compare in the twin, on one scenario
    serving      completions through vidur-ppo serve to a backend that answers at once
    start-up     python -c pass with the start-up file, vidur-ppo --help, vidur.main --help
    first-run    vidur-ppo run where nothing is compiled yet (fewer pairs: it is slow)

The package must be installed in the environment (its start-up file is part of what is measured); which checkout's
modules are imported is decided by PYTHONPATH, and checked.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _reporting import new_parser, parse_options, positive, report
from scipy import stats

Result = dict[str, Any]

HERE = Path(__file__).resolve().parents[1]
MEASURE = Path(__file__).with_name("_speed.py")
LIMIT = 1.05
CONFIDENCE = 0.95


class Measurement(NamedTuple):
    """One of `_speed.MEASUREMENTS`."""

    #: About what a process of it takes in all, imports included.
    seconds: float
    #: No more pairs than these.
    most_pairs: int | None = None
    #: Whether each process begins with nothing compiled.
    is_cold: bool = False


MEASUREMENTS = {
    "start-up": Measurement(5),
    "decisions": Measurement(7),
    "simulations": Measurement(12),
    "twin": Measurement(8),
    "training-1": Measurement(11),
    "training-2": Measurement(12),
    "comparison": Measurement(8),
    "serving": Measurement(5),
    "first-run": Measurement(30, most_pairs=5, is_cold=True),
}
QUICK = {"python-start": Measurement(1)}


class Pairs(NamedTuple):
    """The samples of a measurement, pair by pair."""

    base: list[Result]
    this: list[Result]


def sample(name: str, checkout: Path, *, is_cold: bool) -> Result:
    """One process of a measurement with the package of a checkout."""
    with tempfile.TemporaryDirectory(prefix="same-speed-") as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline",
        }
        if is_cold:
            environment["NUMBA_CACHE_DIR"] = str(Path(directory) / "numba")
        # In a directory of its own: `python -m` looks for modules in the working directory first.
        done = subprocess.run(
            [sys.executable, str(MEASURE), name, directory],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed in {checkout}:\n{done.stderr[-3000:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    if Path(found["package"]).parent != checkout:
        raise SystemExit(f"{name} was to be measured in {checkout}, but {found['package']} was imported")
    return found


def num_pairs(measurement: Measurement, pairs: int) -> int:
    """How many pairs of a measurement are run."""
    return min(pairs, measurement.most_pairs or pairs)


def measure(base: Path, pairs: int, chosen: dict[str, Measurement]) -> Result:
    """Run all pairs, and the ratios that come of them."""
    runs = sum(2 * (num_pairs(one, pairs) + (not one.is_cold)) * one.seconds for one in chosen.values())
    print(f"about {math.ceil(runs / 60)} minutes", file=sys.stderr, flush=True)
    for name, measurement in chosen.items():
        if not measurement.is_cold:
            for checkout in (base, HERE):
                sample(name, checkout, is_cold=False)
            print(f"{name}: warmed up", file=sys.stderr, flush=True)
    found = {name: Pairs([], []) for name in chosen}
    for number in range(pairs):
        for name, measurement in chosen.items():
            if number >= num_pairs(measurement, pairs):
                continue
            order = ((base, found[name].base), (HERE, found[name].this))
            for checkout, samples in order if number % 2 == 0 else reversed(order):
                samples.append(sample(name, checkout, is_cold=measurement.is_cold))
        print(f"pair {number + 1} of {pairs}", file=sys.stderr, flush=True)
    figures = {label: figure for name in chosen for label, figure in compared(name, found[name])}
    slower = [label for label, figure in figures.items() if figure["low"] is not None and figure["low"] > LIMIT]
    return {"base": str(base), "limit": LIMIT, "figures": figures, "slower": slower}


def compared(name: str, pairs: Pairs) -> Iterator[tuple[str, Result]]:
    """Each figure of a measurement: the time here over the time there, and its interval."""
    first = pairs.base[0]
    for one in (*pairs.base, *pairs.this):
        if one["work"] != first["work"]:
            raise SystemExit(f"{name} did not do the same work: {one['work']} in {one['package']}, not {first['work']}")
    for label in first["seconds"]:
        base_s, this_s = ([one["seconds"][label] for one in side] for side in (pairs.base, pairs.this))
        yield (
            label,
            {**ratio_of(base_s, this_s), "base_s": geometric_mean(base_s), "this_s": geometric_mean(this_s)},
        )


def ratio_of(base_s: Sequence[float], this_s: Sequence[float]) -> Result:
    """Geometric mean of this over base, and its interval; no interval of a single pair."""
    logs = [math.log(this / base) for this, base in zip(this_s, base_s, strict=True)]
    mean, size = math.fsum(logs) / len(logs), len(logs)
    found: Result = {"ratio": math.exp(mean), "low": None, "high": None, "pairs": size}
    if size > 1:
        deviation = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (size - 1))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, size - 1)) * deviation / math.sqrt(size)
        found |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def lines_of(result: Result) -> Iterator[str]:
    """The result for people."""
    yield f"{'':<42}{'base':>12}{'this':>12}{'this/base':>11}{'95 % interval':>18}{'pairs':>7}"
    for label, figure in result["figures"].items():
        interval = "" if figure["low"] is None else f"{figure['low']:.3f} to {figure['high']:.3f}"
        times = "".join(f"{text_of(figure[side]):>12}" for side in ("base_s", "this_s"))
        slower = "  SLOWER" if label in result["slower"] else ""
        yield f"{label:<42}{times}{figure['ratio']:>11.3f}{interval:>18}{figure['pairs']:>7}{slower}"


def text_of(seconds: float) -> str:
    """A time in a unit that fits."""
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def checkout_of(text: str) -> Path:
    """A directory with a checkout of this project, as an argument's type."""
    path = Path(text).resolve()
    if not (path / "vidur_ppo_plugin" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"must be a checkout of this project, but {path} has no vidur_ppo_plugin")
    return path


def main() -> int:
    """Measure, print, and return 1 if something is slower."""
    parser = new_parser(__doc__)
    parser.add_argument("--base", type=checkout_of, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--pairs", type=positive, default=15, help="pairs of each measurement (default: 15)")
    parser.add_argument("--only", default="", help="measurements, comma-separated; all if empty")
    options = parse_options(parser, quick={"pairs": 2})
    known = QUICK if options.quick and not options.only else MEASUREMENTS
    wanted = options.only.split(",") if options.only else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(known)}")
    return report(
        options,
        lambda: measure(options.base, options.pairs, {name: known[name] for name in wanted}),
        lines_of,
        lambda result: [f"{label} is slower" for label in result["slower"]],
    )


if __name__ == "__main__":
    sys.exit(main())
