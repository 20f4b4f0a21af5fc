"""One policy for any cluster: the same file at other sizes, loads, models, devices and replica schedulers.

    python benchmarks/pretrained.py [--checkpoint pretrained] [--tail T] [--cases sizes,loads,models,schedulers]
        [--seeds 10] [--most-seeds 10] [--requests-per-replica 1000] [--jobs N] [--json]

Change of the policy against each reference on the requests of held-out seeds, paired, with the 95 % interval, in the
twin. "beats Vidur": mean latency and mean and P99 of the time to first token are lower than those of random,
round_robin and lor beyond noise, or at a load of at most 50 % within 0.5 %. "never worse": against least_tokens the
upper ends of the intervals are below +1 % for means and +3 % for P99s. Where noise leaves one of them open, the number
of seeds is doubled, up to --most-seeds, for the references concerned; the table says how many there were.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

import policy_runs
from policy_runs import BEATS, METRICS, PRIOR, VIDURS, beats, change, is_not_inferior, text_of

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.compare.seeds import COMPARISON
from vidur_ppo_plugin.envs.settings import changed, find_scenario
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.scenario import Scenario

#: Metric -> change and its interval.
Changes = dict[str, dict[str, float]]
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


def cases() -> dict[str, dict[str, Scenario]]:
    """Group -> name -> cluster and requests."""
    mixed, mixed_long = find_scenario("mixed"), find_scenario("mixed_long")
    return {
        "sizes": {
            f"{scenario.name}, {size} replicas": changed(scenario, num_replicas=size)
            for scenario in (mixed, mixed_long)
            for size in SIZES
        },
        "loads": {
            f"{scenario.name}, load {load:.0%}": scenario.at(load=load)
            for scenario in (mixed, mixed_long)
            for load in LOADS
        },
        # Capacities found as those of the scenarios, by `compare.capacity.find_capacity`.
        "models": {
            "mixed, Llama-2-70B tp 4 on H100": _with(mixed, LLAMA_70B_ON_H100, 32.4),
            "mixed_long, Llama-2-70B tp 4 on H100": _with(mixed_long, LLAMA_70B_ON_H100, 23.5),
        },
        "schedulers": {
            "mixed, sarathi": mixed,
            "mixed, vllm": _with(mixed, VLLM, 36.1),
            "arXiv-like, vllm": find_scenario("vllm"),
        },
    }


def _with(scenario: Scenario, flags: dict[str, Any], qps: float) -> Scenario:
    assert scenario.capacity is not None
    capacity = dataclasses.replace(scenario.capacity, qps=qps)
    return scenario.at(flags={**scenario.flags, **flags}, capacity=capacity)


def study(scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    """Changes against every reference, and whether the two requirements hold."""
    scenario = scenario.at(num_requests=options.requests_per_replica * scenario.num_replicas)
    names = [f"policy=ppo_modular:{options.checkpoint}@{options.tail}", *VIDURS, PRIOR]
    policy, *references = parse_schedulers(names)
    rows: dict[str, policy_runs.Rows] = {scheduler.label: [] for scheduler in (policy, *references)}
    changes: dict[str, Changes] = {}
    num_seeds, last = 0, options.seeds
    while references and num_seeds < last:
        seeds = list(COMPARISON[num_seeds:last])
        for label, more in policy_runs.run_grid(scenario, [policy, *references], seeds, jobs=options.jobs).items():
            rows[label] += more
        for scheduler in references:
            theirs = rows[scheduler.label]
            changes[scheduler.label] = {metric: change(rows["policy"], theirs, metric) for metric in METRICS}
        references = [
            scheduler for scheduler in references if not holds(scheduler.label, changes[scheduler.label], scenario.load)
        ]
        num_seeds, last = last, min(2 * last, options.most_seeds)
    return {
        "changes": changes,
        "seeds": {label: len(rows[label]) for label in changes},
        "beats_vidur": all(holds(name, changes[name], scenario.load) for name in VIDURS),
        "never_worse": holds(PRIOR, changes[PRIOR], scenario.load),
    }


def holds(reference: str, changes: Changes, load: float) -> bool:
    """Whether what is asked for against this reference is shown."""
    if reference == PRIOR:
        return all(is_not_inferior(metric, changes[metric]) for metric in METRICS)
    return all(beats(changes[metric], load) for metric in BEATS)


def main() -> int:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = cases()
    parser.add_argument("--checkpoint", default="pretrained")
    parser.add_argument("--tail", type=float, default=BALANCED, help="tail_preference")
    parser.add_argument("--cases", default=",".join(known))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--most-seeds", type=int, default=0, help="--seeds unless given")
    parser.add_argument("--requests-per-replica", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    options.most_seeds = options.most_seeds or options.seeds
    if not 2 <= options.seeds <= options.most_seeds <= len(COMPARISON):
        parser.error(
            f"--seeds and --most-seeds must be in order and from 2 to {len(COMPARISON)}, "
            f"got {options.seeds} and {options.most_seeds}"
        )
    groups = options.cases.split(",")
    if unknown := [name for name in groups if name not in known]:
        parser.error(f"--cases: there is no {unknown[0]!r}; there are {', '.join(known)}")
    _autoload.install()
    results: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name, scenario in known[group].items():
            results[name] = study(scenario, options)
            print(f"{name} done", file=sys.stderr)
    if options.json:
        print(json.dumps({"checkpoint": options.checkpoint, "tail_preference": options.tail, "cases": results}))
        return 0
    print("| case | against | seeds | " + " | ".join(METRICS) + " | holds |\n" + "|---" * (len(METRICS) + 4) + "|")
    for name, result in results.items():
        for reference, entries in result["changes"].items():
            told = {PRIOR: f"never worse: {result['never_worse']}", VIDURS[0]: f"beats Vidur: {result['beats_vidur']}"}
            cells = [str(result["seeds"][reference]), *(text_of(entries[metric]) for metric in METRICS)]
            print(f"| {name} | {reference} | {' | '.join(cells)} | {told.get(reference, '')} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
