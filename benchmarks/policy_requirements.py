r"""What a comparison says of a policy: whether it beats Vidur, is never worse than least_tokens, and who is better.

    vidur-ppo compare --seeds 10 --reference least_tokens --out results --schedulers \
        random,round_robin,lor,power_of_two,least_outstanding,least_kv,least_tokens,shortest_delay,ppo_modular:pretrained
    python benchmarks/policy_requirements.py results [--policy ppo_modular:pretrained] [--json]

"beats Vidur": in every scenario mean latency and mean and P99 of the time to first token are lower than those of
random, round_robin and lor beyond noise, or at a load of at most 50 % within 0.5 %. "never worse": in every scenario
the upper ends of the 95 % intervals against least_tokens are below +1 % for means and +3 % for P99s. Then every metric
in which some scheduler is better than the policy beyond noise. Whoever is not in the comparison is not asked about.
Exits with 1 if one of the two does not hold.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from policy_runs import BEATS, METRICS, PRIOR, VIDURS, beats, is_not_inferior, text_of

from vidur_ppo_plugin.compare.results import Results, ResultsError
from vidur_ppo_plugin.compare.statistics import compare_cells

#: Scenario -> metric -> change and interval.
Changes = dict[str, dict[str, dict[str, float]]]


def changes_of(results: Results, policy: str) -> dict[str, Changes]:
    """Of the policy against each scheduler that is no policy."""
    cells, schedulers = results.cells, results.metadata["schedulers"]
    found: dict[str, Changes] = {}
    for reference in (name for name, facts in schedulers.items() if not facts.get("digest")):
        pair = cells[cells["scheduler"].isin((policy, reference))]
        for row in compare_cells(pair, reference).itertuples():
            if row.metric in METRICS and row.scheduler == policy:
                entry = {"change": row.change, "low": row.low, "high": row.high}
                found.setdefault(reference, {}).setdefault(row.scenario, {})[row.metric] = entry
    return found


def verdict(changes: dict[str, Changes], loads: dict[str, float]) -> dict[str, Any]:
    """What does not hold, and who is better at what; `loads` of the scenarios."""
    cells = [
        (reference, scenario, metric, entry)
        for reference, by_scenario in changes.items()
        for scenario, by_metric in by_scenario.items()
        for metric, entry in by_metric.items()
    ]
    vidur = [cell for cell in cells if cell[0] in VIDURS and cell[2] in BEATS]
    prior = [cell for cell in cells if cell[0] == PRIOR]
    return {
        "beats_vidur_of": len(vidur),
        "beats_vidur_not": [cell for cell in vidur if not beats(cell[3], loads[cell[1]])],
        "never_worse_of": len(prior),
        "never_worse_not": [cell for cell in prior if not is_not_inferior(cell[2], cell[3])],
        "better_than_the_policy": [cell for cell in cells if cell[3]["low"] > 0],
    }


def lines_of(changes: dict[str, Changes], found: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"| against {PRIOR} | " + " | ".join(METRICS) + " |", "|---|" + "---|" * len(METRICS)]
    lines += [
        f"| {scenario} | " + " | ".join(text_of(by_metric[metric]) for metric in METRICS) + " |"
        for scenario, by_metric in changes[PRIOR].items()
    ]
    titles = {"beats_vidur": "does not beat Vidur", "never_worse": f"may be worse than {PRIOR}"}
    for name, title in titles.items():
        misses, total = found[f"{name}_not"], found[f"{name}_of"]
        lines += ["", f"{title}: {len(misses)} of {total}", *map(_line, misses)]
    better = found["better_than_the_policy"]
    return [*lines, "", f"better than the policy: {len(better)}", *map(_line, better)]


def _line(cell: tuple[str, str, str, dict[str, float]]) -> str:
    reference, scenario, metric, entry = cell
    return f"  {scenario}, {metric}, against {reference}: {text_of(entry)}"


def main() -> int:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the results directory of `vidur-ppo compare`")
    parser.add_argument("--policy", default="ppo_modular:pretrained", help="its label in the comparison")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    try:
        results = Results(options.results)
    except ResultsError as error:
        parser.error(str(error))
    for name in (options.policy, PRIOR):
        if name not in results.metadata["schedulers"]:
            parser.error(f"{options.results} has no {name!r}; it has {', '.join(results.metadata['schedulers'])}")
    changes = changes_of(results, options.policy)
    loads = {name: facts["load"] for name, facts in results.metadata["scenarios"].items()}
    found = verdict(changes, loads)
    print(json.dumps({"changes": changes, **found}) if options.json else "\n".join(lines_of(changes, found)))
    return int(bool(found["beats_vidur_not"] or found["never_worse_not"]))


if __name__ == "__main__":
    sys.exit(main())
