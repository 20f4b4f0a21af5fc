"""Comparisons for which `vidur-ppo compare` has no options, into results directories like its own.

    python benchmarks/make_results.py preferences --out DIR [--checkpoint pretrained] [--preferences 0.5,0.6,0.7,0.8]
        [--scenarios NAMES] [--seeds 16]
    python benchmarks/make_results.py clusters --out DIR [--checkpoint pretrained] [--tail T] [--seeds 10]
        [--cases sizes,loads,models,schedulers] [--most-seeds N] [--requests-per-replica 1000]
    python benchmarks/make_results.py trade-off --out DIR [--checkpoint pretrained] [--scenarios mixed_long,mixed]
        [--tails 0,0.25,0.5,0.8,1] [--trace FILE.csv | --lengths TEXT --name NAME] [--seeds 10] [--requests N]

All take `--jobs N`, `--json` and `--quick`, run in the twin, and continue where an earlier run stopped.
`benchmarks/tables.py` turns the directories into tables and pictures.

preferences  Policies at several tail_preferences and least_tokens on seeds for tuning, never those of a comparison.
             `tables.py choose DIR` says which is the lowest that is nowhere worse than least_tokens.
clusters     The same policy file at other sizes, loads, models, devices and replica schedulers, beside Vidur's three
             and least_tokens. Where noise leaves it open whether a requirement holds, the number of seeds is doubled,
             up to --most-seeds, for the schedulers concerned. `tables.py requirements DIR` says what holds.
trade-off    The policy at several tail_preferences, every heuristic, and `size_split` at every threshold that
             `vidur-ppo compare` tries, at a dozen more, and at every number of long replicas. With --trace, the
             requests of a CSV of arrival times and lengths take the place of those of the scenario, at its load; with
             --lengths, other lengths do, written as in docs/scenarios.md. `tables.py trade-off DIR` draws it.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from _comparison import open_results, run_cells
from _reporting import new_parser, parse_options, positive, report
from _requirements import PRIOR, VIDURS, changes_of, holds

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.capacity import find_capacity
from vidur_ppo_plugin.compare.results import Results, ResultsError
from vidur_ppo_plugin.compare.schedulers import TUNED, SchedulerError, SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.compare.seeds import CAPACITY, COMPARISON, TUNING
from vidur_ppo_plugin.compare.tuning import thresholds
from vidur_ppo_plugin.envs.settings import changed
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK
from vidur_ppo_plugin.scenario import REPLAY, Scenario, ScenarioError, TraceWindows, find_scenario, scenario_names
from vidur_ppo_plugin.workload.trace import read_trace

SIZES = (2, 4, 16, 64)
LOADS = (0.3, 0.5, 0.7, 0.9, 1.0)
# A model and a device that no scenario has, four to a replica.
LLAMA_70B_ON_H100 = {
    "replica_config_model_name": "meta-llama/Llama-2-70b-hf",
    "replica_config_device": "h100",
    "replica_config_network_device": "h100_dgx",
    "replica_config_tensor_parallel_size": 4,
}
VLLM = {"replica_scheduler_config_type": "vllm", "vllm_scheduler_config_max_tokens_in_batch": 8192}
# Thresholds of size_split beside those of `compare`: the best one may lie between two of its quantiles.
MORE_THRESHOLDS = (500, 750, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 6000, 8000, 12000)
POLICY = "policy"


# --- preferences ---


def preferences(options: argparse.Namespace) -> Results:
    """Policies and the prior on seeds for tuning."""
    policies = [f"{value:g}=ppo_modular:{options.checkpoint}@{value:g}" for value in options.preferences]
    scenarios = [resized(find_scenario(name), options.requests) for name in names_of(options.scenarios)]
    schedulers = parse_schedulers([PRIOR, *policies])
    setup, results = open_results(options.out, scenarios, schedulers, TUNING[: options.seeds])
    run_cells(setup, results, lambda _: True, options.jobs)
    return results


def names_of(text: str) -> list[str]:
    """Names of scenarios; ScenarioError for the one that has no requests of its own."""
    names = text.split(",")
    if REPLAY in names:
        raise ScenarioError(f"--scenarios: {REPLAY!r} has no requests without a trace: leave it out")
    return names


def resized(scenario: Scenario, num_requests: int | None) -> Scenario:
    """The scenario with so many requests, its own unless given."""
    return scenario.at(num_requests=num_requests) if num_requests else scenario


# --- clusters ---


def cases() -> dict[str, list[Scenario]]:
    """Group -> clusters and requests; the name of each says what it is."""
    mixed, mixed_long = find_scenario("mixed"), find_scenario("mixed_long")
    return {
        "sizes": [
            _named(changed(scenario, num_replicas=size), f"{scenario.name}, {size} replicas")
            for scenario in (mixed, mixed_long)
            for size in SIZES
        ],
        "loads": [
            _named(scenario.at(load=load), f"{scenario.name}, load {load:.0%}")
            for scenario in (mixed, mixed_long)
            for load in LOADS
        ],
        # Capacities found as those of the scenarios, by `compare.capacity.find_capacity`.
        "models": [
            _named(_with(mixed, LLAMA_70B_ON_H100, 32.4), "mixed, Llama-2-70B tp 4 on H100"),
            _named(_with(mixed_long, LLAMA_70B_ON_H100, 23.5), "mixed_long, Llama-2-70B tp 4 on H100"),
        ],
        "schedulers": [
            _named(mixed, "mixed, sarathi"),
            _named(_with(mixed, VLLM, 36.1), "mixed, vllm"),
            _named(find_scenario("vllm"), "arXiv-like, vllm"),
        ],
    }


def _named(scenario: Scenario, name: str) -> Scenario:
    return scenario.at(name=name)


def _with(scenario: Scenario, flags: dict[str, Any], qps: float) -> Scenario:
    assert scenario.capacity is not None
    capacity = dataclasses.replace(scenario.capacity, qps=qps)
    return scenario.at(flags={**scenario.flags, **flags}, capacity=capacity)


def clusters(options: argparse.Namespace) -> Results:
    """The policy and those that it is judged by, with more seeds where noise leaves it open what holds."""
    known = cases()
    groups = options.cases.split(",")
    if unknown := [name for name in groups if name not in known]:
        raise ScenarioError(f"--cases: there is no {unknown[0]!r}; there are {', '.join(known)}")
    scenarios = [
        scenario.at(num_requests=options.requests_per_replica * scenario.num_replicas)
        for group in groups
        for scenario in known[group][: 1 if options.quick else None]
    ]
    references = (*VIDURS, PRIOR)
    schedulers = parse_schedulers([f"{POLICY}=ppo_modular:{options.checkpoint}@{options.tail:g}", *references])
    most = max(options.seeds, options.most_seeds)
    setup, results = open_results(options.out, scenarios, schedulers, COMPARISON[:most])
    still_open = {(scenario.name, reference) for scenario in scenarios for reference in references}
    loads, last = {scenario.name: scenario.load for scenario in scenarios}, options.seeds
    while True:
        seeds, opponents = set(COMPARISON[:last]), still_open | {(name, POLICY) for name, _ in still_open}
        run_cells(
            setup,
            results,
            lambda cell, seeds=seeds, asked=opponents: cell.seed in seeds and (cell.scenario, cell.scheduler) in asked,
            options.jobs,
        )
        cells = results.cells
        changes = {reference: changes_of(cells, POLICY, reference) for reference in references}
        still_open = {
            (name, reference)
            for name, reference in still_open
            if not holds(reference, changes[reference][name], loads[name])
        }
        print(f"{last} seeds: {len(still_open)} comparisons are open", file=sys.stderr)
        if not still_open or last == most:
            return results
        last = min(2 * last, most)


# --- trade-off ---


def trade_off(options: argparse.Namespace) -> Results:
    """The policies, every heuristic, and size_split at every setting in its own scenario."""
    scenarios = [
        with_other_requests(resized(find_scenario(name), options.requests), options)
        for name in names_of(options.scenarios)
    ]
    splits = {scenario.name: size_splits(scenario, options.quick) for scenario in scenarios}
    heuristics = [name for name in (*STOCK, *HEURISTICS) if name != TUNED]
    everywhere = parse_schedulers(
        [*(f"tail {tail:g}=ppo_modular:{options.checkpoint}@{tail:g}" for tail in options.tails), *heuristics]
    )
    specs = {spec.label: spec for spec in (*everywhere, *(spec for own in splits.values() for spec in own))}
    setup, results = open_results(options.out, scenarios, list(specs.values()), COMPARISON[: options.seeds])
    asked = {name: {spec.label for spec in (*everywhere, *own)} for name, own in splits.items()}
    run_cells(setup, results, lambda cell: cell.scheduler in asked[cell.scenario], options.jobs)
    return results


def size_splits(scenario: Scenario, is_quick: bool) -> list[SchedulerSpec]:
    """`size_split` at every setting; at two of them if it shall be quick."""
    specs = [
        SchedulerSpec(f"{TUNED} {threshold}/{number}", TUNED).with_options(
            threshold_tokens=threshold, num_long_replicas=number
        )
        for threshold in sorted({*thresholds(scenario, seed=TUNING[0]), *MORE_THRESHOLDS})
        for number in range(1, scenario.num_replicas)
    ]
    return specs[-2:] if is_quick else specs


def with_other_requests(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario's cluster and load with the requests that were asked for, at their own capacity."""
    if options.trace is not None:
        return traced(scenario, options.trace, options.seeds)
    if options.lengths is None:
        return scenario
    other = scenario.at(name=options.name, lengths=options.lengths)
    return other.at(capacity=find_capacity(other, engine="twin"))


def traced(scenario: Scenario, path: Path, num_seeds: int) -> Scenario:
    """The requests of a trace, cut into a window for each seed."""
    trace = read_trace(path)
    seeds = [*COMPARISON[:num_seeds], TUNING[0]]
    size = min(scenario.num_requests, len(trace) // len(seeds))
    whole = TraceWindows(path.resolve(), len(trace), {CAPACITY[0]: 0}, trace.rate_qps)
    capacity = find_capacity(scenario.at(num_requests=len(trace), trace=whole), engine="twin", seeds=CAPACITY[:1])
    windows = TraceWindows(path.resolve(), size, {seed: index for index, seed in enumerate(seeds)}, trace.rate_qps)
    return scenario.at(name=f"{scenario.name}_trace", num_requests=size, capacity=capacity, trace=windows)


# --- the command line ---

KINDS = {"preferences": preferences, "clusters": clusters, "trade-off": trade_off}
QUICK = {
    "preferences": {"preferences": "0,0.8", "scenarios": "mixed_long", "seeds": 2, "requests": 100},
    "clusters": {"cases": "schedulers", "seeds": 2, "most_seeds": 4, "requests_per_replica": 50},
    "trade-off": {"tails": "0,0.8", "scenarios": "mixed_long", "seeds": 2, "requests": 100},
}


def numbers(text: str) -> list[float]:
    """Numbers with commas between them, as an argument's type."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas, got {text!r}") from None


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line; the first word says which options there are."""
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        parser = new_parser(__doc__)
        parser.add_argument("kind", choices=KINDS)
        parser.parse_args(sys.argv[1:2])
        parser.error(f"the first argument must be one of {', '.join(KINDS)}, got {sys.argv[1]!r}")
    kind = sys.argv[1]
    parser = new_parser(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True, help="the results directory, new or to be continued")
    parser.add_argument("--checkpoint", default="pretrained", help="a policy: a checkpoint or the directory of its run")
    parser.add_argument("--jobs", type=positive, default=1)
    if kind == "preferences":
        parser.add_argument("--preferences", type=numbers, default="0.5,0.6,0.7,0.8")
        parser.add_argument("--scenarios", default=",".join(name for name in scenario_names() if name != REPLAY))
        parser.add_argument("--requests", type=positive, help="of each run; the scenario's own unless given")
        parser.add_argument("--seeds", type=positive, default=16)
    elif kind == "clusters":
        parser.add_argument("--tail", type=float, default=BALANCED, help="tail_preference")
        parser.add_argument("--cases", default=",".join(cases()))
        parser.add_argument("--seeds", type=positive, default=10)
        parser.add_argument("--most-seeds", type=positive, default=1, help="--seeds unless it is more")
        parser.add_argument("--requests-per-replica", type=positive, default=1000)
    else:
        parser.add_argument("--scenarios", default="mixed_long,mixed")
        parser.add_argument(
            "--tails", type=numbers, default=f"0,0.25,0.5,{BALANCED},1", help="tail_preferences of the policy"
        )
        parser.add_argument("--trace", type=Path, help="a CSV of arrival times and lengths")
        parser.add_argument("--lengths", help="other lengths than the scenario's, as in docs/scenarios.md")
        parser.add_argument("--name", help="what the scenario with --lengths is called")
        parser.add_argument("--seeds", type=positive, default=10)
        parser.add_argument("--requests", type=positive, help="of each run; the scenario's own unless given")
    options = parse_options(parser, QUICK[kind])
    if kind == "trade-off":
        is_named, has_lengths = options.name is not None, options.lengths is not None
        if is_named != has_lengths or (has_lengths and options.trace is not None):
            parser.error("--lengths needs --name, and goes without --trace")
    return parser, options


def main() -> int:
    """Run, and say where the results are."""
    parser, options = parse()

    def make() -> dict[str, Any]:
        _autoload.install()
        results = KINDS[options.kind](options)
        return {"directory": str(options.out), "cells": len(results.cells), "table": str(results.write_table())}

    try:
        return report(options, make, lambda made: [f"{made['cells']} cells in {made['directory']}"])
    except (SchedulerError, ScenarioError, ResultsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
