"""Mean against tail: what the policy offers at its tail settings, and what every heuristic offers.

    python benchmarks/trade_off.py [--checkpoint pretrained] [--scenarios mixed_long,mixed] [--tails 0,0.25,0.5,1]
        [--trace FILE.csv | --lengths TEXT --name NAME] [--seeds 10] [--requests N] [--out DIR] [--jobs N] [--json]

Changes of the mean and of the 99th percentile of latency against least_tokens, on the requests of held-out seeds, in
the twin. `size_split` is run at every threshold that `vidur-ppo compare` tries, at a dozen more between 500 and 16,000
tokens, and at every number of long replicas. One PNG a scenario. With --trace, the requests of a CSV of arrival times
and lengths take the place of those of the scenario, at the scenario's load; with --lengths, other lengths do, written
as in docs/scenarios.md: `0.97: trace(FILE.csv); 0.03: uniform(8000, 24000) / lognormal(139, 0.973, 5, 2000)`.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import policy_runs
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from policy_runs import Rows, change

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.capacity import find_capacity
from vidur_ppo_plugin.compare.schedulers import TUNED, SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.compare.seeds import CAPACITY, COMPARISON, TUNING
from vidur_ppo_plugin.compare.tuning import thresholds
from vidur_ppo_plugin.envs.settings import find_scenario
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.scenario import Scenario, TraceWindows
from vidur_ppo_plugin.workload.trace import read_trace

REFERENCE = "least_tokens"
HEURISTICS = (
    *("random", "round_robin", "lor", "least_outstanding", "power_of_two", "least_kv", "least_tokens", "least_work"),
    "shortest_delay",
)
MEAN, TAIL = "e2e_mean", "e2e_p99"
# Beyond this nobody would use a scheduler: it would only squeeze the others in the picture.
_MOST_SHOWN = 0.25
# Tried beside those of `compare`: the best one may lie between two of its quantiles.
_MORE_THRESHOLDS = (500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 6000, 8000, 12000)
_MARKERS = ("x", "+", "v", "s", "d", "^", "*", "<", ">", "p", "h", "P")


def splits(scenario: Scenario) -> list[SchedulerSpec]:
    """`size_split` at every setting."""
    return [
        SchedulerSpec(f"{TUNED} {threshold}/{number}", TUNED).with_options(
            threshold_tokens=threshold, num_long_replicas=number
        )
        for threshold in sorted({*thresholds(scenario, seed=TUNING[0]), *_MORE_THRESHOLDS})
        for number in range(1, scenario.num_replicas)
    ]


def traced(scenario: Scenario, path: Path, num_seeds: int) -> Scenario:
    """The scenario's cluster and load with the requests of a trace, cut into a window for each seed."""
    trace = read_trace(path)
    seeds = [*COMPARISON[:num_seeds], TUNING[0]]
    size = min(scenario.num_requests, len(trace) // len(seeds))
    whole = TraceWindows(path.resolve(), len(trace), {CAPACITY[0]: 0}, trace.rate_qps)
    capacity = find_capacity(scenario.at(num_requests=len(trace), trace=whole), engine="twin", seeds=CAPACITY[:1])
    windows = TraceWindows(path.resolve(), size, {seed: index for index, seed in enumerate(seeds)}, trace.rate_qps)
    return scenario.at(name=f"{scenario.name}_trace", num_requests=size, capacity=capacity, trace=windows)


def with_lengths(scenario: Scenario, lengths: str, name: str) -> Scenario:
    """The scenario's cluster and load with other lengths, at their own capacity."""
    other = scenario.at(name=name, lengths=lengths)
    return other.at(capacity=find_capacity(other, engine="twin"))


def study(scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    """Every point: label -> changes of mean and tail; and who of the other side has both lower than it."""
    policies = parse_schedulers([f"tail {tail:g}=ppo_modular:{options.checkpoint}@{tail}" for tail in options.tails])
    others = [*parse_schedulers(list(HEURISTICS)), *splits(scenario)]
    rows = policy_runs.run_grid(scenario, [*policies, *others], list(COMPARISON[: options.seeds]), jobs=options.jobs)
    points = {label: _point(own, rows[REFERENCE]) for label, own in rows.items()}
    ours, theirs = ([spec.label for spec in specs] for specs in (policies, others))
    return {
        "policy": {label: points[label] for label in ours},
        "heuristics": {label: points[label] for label in theirs},
        "dominated_by": {
            **{label: [other for other in theirs if _has_both_lower(points[other], points[label])] for label in ours},
            **{label: [other for other in ours if _has_both_lower(points[other], points[label])] for label in theirs},
        },
    }


def _point(ours: Rows, theirs: Rows) -> dict[str, dict[str, float]]:
    return {metric: change(ours, theirs, metric) for metric in (MEAN, TAIL)}


def _has_both_lower(one: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> bool:
    return all(one[metric]["change"] < other[metric]["change"] for metric in (MEAN, TAIL))


def draw(name: str, result: dict[str, Any], path: Path) -> None:
    """The two curves, and everybody else."""
    figure = Figure(figsize=(6.4, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown = {
        label: point
        for label, point in result["heuristics"].items()
        if point[MEAN]["change"] < _MOST_SHOWN and point[TAIL]["change"] < _MOST_SHOWN
    }
    split = [point for label, point in shown.items() if label.startswith(TUNED)]
    axes.scatter(*_columns(split), s=12, color="#d55e00", alpha=0.6, label=f"{TUNED}, every setting")
    front = sorted(_front(split), key=lambda point: point[MEAN]["change"])
    axes.plot(*_columns(front), color="#d55e00", linewidth=1, alpha=0.6)
    named = [(label, point) for label, point in shown.items() if not label.startswith(TUNED)]
    for marker, (label, point) in zip(itertools.cycle(_MARKERS), named, strict=False):
        axes.scatter(*_columns([point]), s=26, color="#1c1f23", marker=marker, label=label, alpha=0.8)
    policy = list(result["policy"].items())
    axes.plot(*_columns([point for _, point in policy]), color="#0072b2", marker="o", markersize=5, label="policy")
    for index, (label, point) in enumerate(policy):
        above = index % 2  # neighbours on the curve would cover each other's names
        axes.annotate(label, [values[0] for values in _columns([point])], fontsize=7, color="#0072b2",
                      xytext=(-4, 7) if above else (4, -11), ha="right" if above else "left",
                      textcoords="offset points")  # fmt: skip
    axes.axhline(0, color="#9aa0a6", linewidth=0.6)
    axes.axvline(0, color="#9aa0a6", linewidth=0.6)
    axes.set_xlabel(f"mean latency, change against {REFERENCE} (%)")
    axes.set_ylabel("P99 of latency, change (%)")
    axes.set_title(f"{name}: lower left is better", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(color="#e3e6ea", linewidth=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _columns(points: Sequence[dict[str, dict[str, float]]]) -> tuple[list[float], list[float]]:
    first, second = ([100 * point[metric]["change"] for point in points] for metric in (MEAN, TAIL))
    return first, second


def _front(points: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
    return [point for point in points if not any(_has_both_lower(other, point) for other in points)]


def main() -> int:
    """Run, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="pretrained")
    parser.add_argument("--scenarios", default="mixed_long,mixed")
    parser.add_argument("--tails", default=f"0,0.25,0.5,{BALANCED},1", help="the usual one among them")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--lengths", help="other lengths than the scenario's, as in docs/scenarios.md")
    parser.add_argument("--name", help="what the scenario with --lengths is called")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, help="of each run; the scenario's own unless given")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if (options.lengths is None) != (options.name is None) or (options.lengths and options.trace):
        parser.error("--lengths needs --name, and goes without --trace")
    options.tails = [float(part) for part in options.tails.split(",")]
    _autoload.install()
    results = {}
    for name in options.scenarios.split(","):
        scenario = find_scenario(name)
        if options.requests:
            scenario = scenario.at(num_requests=options.requests)
        if options.trace is not None:
            scenario = traced(scenario, options.trace, options.seeds)
        if options.lengths is not None:
            scenario = with_lengths(scenario, options.lengths, options.name)
        results[scenario.name] = study(scenario, options)
        draw(scenario.name, results[scenario.name], options.out / f"trade_off_{scenario.name}.png")
        print(f"{scenario.name} done", file=sys.stderr)
    if options.json:
        print(json.dumps({"checkpoint": options.checkpoint, "scenarios": results}))
        return 0
    for name, result in results.items():
        print(f"\n{name}, against {REFERENCE}\n\n| | mean | P99 | both lower than it |\n|---|---|---|---|")
        split = {label: point for label, point in result["heuristics"].items() if label.startswith(TUNED)}
        front = [label for label, point in split.items() if point in _front(list(split.values()))]
        for label, point in {**result["policy"], **result["heuristics"]}.items():
            if label in split and label not in front:
                continue
            worse = result["dominated_by"][label]
            cells = " | ".join(policy_runs.text_of(point[metric]) for metric in (MEAN, TAIL))
            print(f"| {label} | {cells} | {', '.join(worse)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
