"""Which tail_preference of a policy is the balanced one: the lowest at which it is nowhere worse than least_tokens.

    python benchmarks/choose_preference.py CHECKPOINT [--preferences 0.5,0.6,0.7,0.8] [--scenarios NAMES] [--seeds 16]
        [--jobs N] [--json]

Change against least_tokens on seeds for tuning (never those of a comparison), paired, with the 95 % interval, in the
twin. For each preference: how many figures may be worse (the upper end of the interval is beyond +1 % for a mean, +3 %
for a P99), how many are (the change itself is), and which comes nearest to it. What may be worse wants more seeds.
"""

import argparse
import json
import sys
from typing import Any

import policy_runs
from policy_runs import METRICS, MOST_WORSE, PRIOR, change, is_not_inferior, text_of

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.schedulers import SchedulerError, parse_schedulers
from vidur_ppo_plugin.compare.seeds import TUNING
from vidur_ppo_plugin.scenario import REPLAY, ScenarioError, find_scenario, scenario_names

#: Scenario -> metric -> change and interval.
Changes = dict[str, dict[str, dict[str, float]]]


def study(checkpoint: str, preferences: list[float], scenarios: list[str], num_seeds: int, jobs: int) -> dict[str, Any]:
    """Preference -> changes in every scenario."""
    policies = [f"{preference:g}=ppo_modular:{checkpoint}@{preference:g}" for preference in preferences]
    schedulers = parse_schedulers([PRIOR, *policies])
    found: dict[str, Changes] = {scheduler.label: {} for scheduler in schedulers[1:]}
    for name in scenarios:
        rows = policy_runs.run_grid(find_scenario(name), schedulers, list(TUNING[:num_seeds]), jobs=jobs)
        for label, by_scenario in found.items():
            by_scenario[name] = {metric: change(rows[label], rows[PRIOR], metric) for metric in METRICS}
        print(f"{name} done", file=sys.stderr)
    return found


def judged(changes: Changes) -> dict[str, Any]:
    """How many figures may be worse and are, and which of all comes nearest to its limit."""
    cells = [(name, metric, entry) for name, by_metric in changes.items() for metric, entry in by_metric.items()]
    return {
        "may_be_worse": sum(not is_not_inferior(metric, entry) for _, metric, entry in cells),
        "is_worse": sum(entry["change"] > MOST_WORSE[metric] for _, metric, entry in cells),
        "nearest": max(cells, key=lambda cell: cell[2]["change"] / MOST_WORSE[cell[1]]),
    }


def main() -> int:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a policy: pretrained, a checkpoint or the directory of its run")
    parser.add_argument("--preferences", default="0.5,0.6,0.7,0.8")
    parser.add_argument("--scenarios", default=",".join(name for name in scenario_names() if name != REPLAY))
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(TUNING):
        parser.error(f"--seeds must be from 2 to {len(TUNING)}, got {options.seeds}")
    try:
        preferences = [float(text) for text in options.preferences.split(",")]
    except ValueError:
        parser.error(f"--preferences must be numbers from 0 to 1 with commas, got {options.preferences!r}")
    names = options.scenarios.split(",")
    if REPLAY in names:
        parser.error(f"--scenarios: {REPLAY!r} has no requests without a trace: leave it out")
    _autoload.install()
    try:
        found = study(options.checkpoint, preferences, names, options.seeds, options.jobs)
    except (SchedulerError, ScenarioError) as error:
        parser.error(str(error))
    verdicts = {label: judged(changes) for label, changes in found.items()}
    if options.json:
        print(json.dumps({"checkpoint": options.checkpoint, "changes": found, "verdicts": verdicts}))
        return 0
    print(f"| scenario | preference | {' | '.join(METRICS)} |\n{'|---' * (len(METRICS) + 2)}|")
    for name in names:
        for label, changes in found.items():
            print(f"| {name} | {label} | {' | '.join(text_of(changes[name][metric]) for metric in METRICS)} |")
    print("\n| preference | may be worse | is worse | nearest to its limit |\n|---|---|---|---|")
    for label, verdict in verdicts.items():
        name, metric, entry = verdict["nearest"]
        nearest = f"{name}, {metric}: {text_of(entry)}"
        print(f"| {label} | {verdict['may_be_worse']} | {verdict['is_worse']} | {nearest} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
