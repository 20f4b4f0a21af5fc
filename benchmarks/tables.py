r"""Tables and pictures from the results directory of a comparison: those of the README and of docs/.

    python benchmarks/tables.py table RESULTS [--reference round_robin] [--metrics e2e_mean,e2e_p99,ttft_mean]
    python benchmarks/tables.py picture RESULTS [--policy LABEL] [--against A,B] [--metrics ...] [--out FILE.png]
    python benchmarks/tables.py requirements RESULTS [--policy LABEL]
    python benchmarks/tables.py choose RESULTS
    python benchmarks/tables.py trade-off RESULTS [--out docs/images]

RESULTS is what `vidur-ppo compare --out RESULTS` wrote, or `benchmarks/make_results.py` where `compare` has no option
for it. All changes are relative, paired by seed, with 95 % intervals. Every part prints one JSON object with `--json`.

table         Schedulers down, scenarios across: change of each metric against the reference in per cent; in parentheses
              where the interval contains zero, or there are too few seeds (fewer than four) for one.
picture       What the policy changes against each scheduler, as a heat map. Blue is better, orange worse; grey where
              the interval contains zero, or there is none.
requirements  Whether the policy beats Vidur's schedulers and is never worse than least_tokens (`_requirements.py` has
              the definitions), and who is better than it at what, beyond noise. Exit status 1 if one does not hold.
choose        For each policy of the comparison, as a policy at several tail_preferences: how many figures may be worse
              than least_tokens' (the interval's upper end is beyond +1 % for a mean, +3 % for a P99), how many are (the
              change itself is), and which comes nearest to it. What may be worse wants more seeds.
trade-off     Mean against tail of latency: the policies beside every heuristic and every setting of size_split, and who
              has both lower than whom. One picture a scenario.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _pictures import MEAN, TAIL, draw_gains, draw_trade_off, front, has_both_lower
from _reporting import add_json, report
from _requirements import (
    BEATS,
    METRICS,
    MOST_WORSE,
    PRIOR,
    VIDURS,
    Changes,
    Entry,
    beats,
    changes_of,
    is_not_inferior,
    is_sure,
    policies_of,
    text_of,
)

from vidur_ppo_plugin.compare.display import TITLES
from vidur_ppo_plugin.compare.results import Results, ResultsError
from vidur_ppo_plugin.compare.schedulers import TUNED

SHIPPED = "ppo_modular:pretrained"
Figures = dict[str, Any]


class TablesError(ValueError):
    """A results directory that cannot give what was asked for; the message says what it has."""


def schedulers_of(results: Results) -> dict[str, Any]:
    """Label -> facts."""
    found: dict[str, Any] = results.metadata["schedulers"]
    return found


def check_label(results: Results, option: str, label: str) -> None:
    """TablesError if a comparison has no such scheduler."""
    if label not in schedulers_of(results):
        raise TablesError(f"{option}: {results.directory} has no {label!r}; it has {', '.join(schedulers_of(results))}")


def policy_of(results: Results, asked: str) -> str:
    """The policy that was asked for; else the shipped one at its default, or the only one."""
    policies = policies_of(schedulers_of(results))
    if not asked and SHIPPED not in policies and len(policies) != 1:
        raise TablesError(f"--policy must name one of the policies in {results.directory}: {', '.join(policies)}")
    label = asked or (SHIPPED if SHIPPED in policies else policies[0])
    check_label(results, "--policy", label)
    return label


def metrics_of(text: str) -> list[str]:
    """The metrics that were asked for."""
    metrics = text.split(",")
    for name in metrics:
        if name not in TITLES:
            raise TablesError(f"--metrics: there is no {name!r}; there are {', '.join(TITLES)}")
    return metrics


# --- table ---


def table(results: Results, options: argparse.Namespace) -> Figures:
    """Scheduler -> changes against the reference."""
    check_label(results, "--reference", options.reference)
    metrics, cells = metrics_of(options.metrics), results.cells
    return {
        scheduler: changes_of(cells, scheduler, options.reference, metrics)
        for scheduler in schedulers_of(results)
        if scheduler != options.reference
    }


def table_lines(figures: Figures) -> Iterator[str]:
    """A row for each scheduler, a column for each scenario."""
    scenarios = list(dict.fromkeys(scenario for changes in figures.values() for scenario in changes))
    yield "| scheduler | " + " | ".join(scenarios) + " |"
    yield "|---|" + "---|" * len(scenarios)
    for scheduler, changes in figures.items():
        cells = [" / ".join(map(percent, changes.get(scenario, {}).values())) for scenario in scenarios]
        yield f"| `{scheduler}` | " + " | ".join(cells) + " |"


def percent(entry: Entry) -> str:
    """A change in whole per cent, in parentheses if it may be none."""
    number = round(100 * entry["change"])
    text = f"{number:+d}" if number else "0"
    return text if is_sure(entry) else f"({text})"


# --- picture ---


def picture(results: Results, options: argparse.Namespace) -> Figures:
    """Draw what the policy gains; the numbers of the picture."""
    policy, cells = policy_of(results, options.policy), results.cells
    against = options.against.split(",") if options.against else [
        name for name, facts in schedulers_of(results).items()
        if facts["deployable"] and name not in policies_of(schedulers_of(results))
    ]  # fmt: skip
    for name in against:
        check_label(results, "--against", name)
    metrics = metrics_of(options.metrics)
    gains = {name: changes_of(cells, policy, name, metrics) for name in against}
    seeds = len(results.metadata["seeds"])
    note = f"{seeds} held-out seeds; blue: better, orange: worse (the 95 % interval excludes zero); grey: neither"
    draw_gains(gains, metrics, f"What {policy} changes against each scheduler (%)", note, options.out)
    return {"policy": policy, "picture": str(options.out), "gains": gains}


# --- requirements ---


def requirements(results: Results, options: argparse.Namespace) -> Figures:
    """What does not hold, and who is better than the policy at what."""
    check_label(results, "RESULTS", PRIOR)
    policy, known, table_of_cells = policy_of(results, options.policy), schedulers_of(results), results.cells
    loads = {name: facts["load"] for name, facts in results.metadata["scenarios"].items()}
    references = [name for name in known if name not in policies_of(known)]
    changes = {name: changes_of(table_of_cells, policy, name) for name in references}
    cells = [
        (reference, scenario, metric, entry)
        for reference, by_scenario in changes.items()
        for scenario, by_metric in by_scenario.items()
        for metric, entry in by_metric.items()
    ]
    vidur = [cell for cell in cells if cell[0] in VIDURS and cell[2] in BEATS]
    prior = [cell for cell in cells if cell[0] == PRIOR]
    return {
        "policy": policy,
        "changes": changes,
        "beats_vidur_of": len(vidur),
        "beats_vidur_not": [cell for cell in vidur if not beats(cell[3], loads[cell[1]])],
        "never_worse_of": len(prior),
        "never_worse_not": [cell for cell in prior if not is_not_inferior(cell[2], cell[3])],
        "better_than_the_policy": [cell for cell in cells if cell[3]["low"] > 0],
    }


def requirements_lines(figures: Figures) -> Iterator[str]:
    """The changes against the prior, and all that does not hold."""
    yield f"| {figures['policy']} against {PRIOR} | seeds | " + " | ".join(METRICS) + " |"
    yield "|---|" + "---|" * (len(METRICS) + 1)
    for scenario, by_metric in figures["changes"][PRIOR].items():
        cells = [str(by_metric[MEAN]["seeds"]), *(text_of(by_metric[metric]) for metric in METRICS)]
        yield f"| {scenario} | " + " | ".join(cells) + " |"
    titles = {"beats_vidur": "does not beat Vidur", "never_worse": f"may be worse than {PRIOR}"}
    for name, title in titles.items():
        yield from ("", f"{title}: {len(figures[f'{name}_not'])} of {figures[f'{name}_of']}")
        yield from map(_cell_line, figures[f"{name}_not"])
    better = figures["better_than_the_policy"]
    yield from ("", f"better than the policy: {len(better)}", *map(_cell_line, better))


def _cell_line(cell: tuple[str, str, str, Entry]) -> str:
    reference, scenario, metric, entry = cell
    return f"  {scenario}, {metric}, against {reference}: {text_of(entry)} ({entry['seeds']} seeds)"


# --- choose ---


def choose(results: Results, _: argparse.Namespace) -> Figures:
    """Policy -> changes against the prior, and the verdict on them."""
    check_label(results, "RESULTS", PRIOR)
    policies = policies_of(schedulers_of(results))
    if not policies:
        raise TablesError(f"RESULTS: {results.directory} has no policy; it has {', '.join(schedulers_of(results))}")
    cells = results.cells
    changes = {label: changes_of(cells, label, PRIOR) for label in policies}
    return {"changes": changes, "verdicts": {label: _verdict(found) for label, found in changes.items()}}


def _verdict(changes: Changes) -> dict[str, Any]:
    cells = [(name, metric, entry) for name, by_metric in changes.items() for metric, entry in by_metric.items()]
    return {
        "may_be_worse": sum(not is_not_inferior(metric, entry) for _, metric, entry in cells),
        "is_worse": sum(entry["change"] > MOST_WORSE[metric] for _, metric, entry in cells),
        "nearest": max(cells, key=lambda cell: cell[2]["change"] / MOST_WORSE[cell[1]]),
    }


def choose_lines(figures: Figures) -> Iterator[str]:
    """Every change, then the verdicts."""
    yield f"| policy | scenario | {' | '.join(METRICS)} |"
    yield "|---" * (len(METRICS) + 2) + "|"
    for label, changes in figures["changes"].items():
        for scenario, by_metric in changes.items():
            yield f"| {label} | {scenario} | {' | '.join(text_of(by_metric[metric]) for metric in METRICS)} |"
    yield "\n| policy | may be worse | is worse | nearest to its limit |\n|---|---|---|---|"
    for label, verdict in figures["verdicts"].items():
        scenario, metric, entry = verdict["nearest"]
        nearest = f"{scenario}, {metric}: {text_of(entry)}"
        yield f"| {label} | {verdict['may_be_worse']} | {verdict['is_worse']} | {nearest} |"


# --- trade-off ---


def trade_off(results: Results, options: argparse.Namespace) -> Figures:
    """Scenario -> the change of mean and tail of every scheduler; one picture each."""
    check_label(results, "RESULTS", PRIOR)
    known, cells = schedulers_of(results), results.cells
    changes = {name: changes_of(cells, name, PRIOR, (MEAN, TAIL)) for name in known if known[name]["deployable"]}
    policies = policies_of(known)
    return {
        scenario: _trade_off_in(scenario, changes, known, policies, options.out)
        for scenario in results.metadata["scenarios"]
    }


def _trade_off_in(
    scenario: str, changes: dict[str, Changes], known: dict[str, Any], policies: list[str], out: Path
) -> Figures:
    points = {name: by_scenario[scenario] for name, by_scenario in changes.items() if scenario in by_scenario}
    ours = {name: point for name, point in points.items() if name in policies}
    splits = {name: point for name, point in points.items() if known[name]["kind"] == TUNED}
    others = {name: point for name, point in points.items() if name not in ours and name not in splits}
    path = out / f"trade_off_{scenario}.png"
    draw_trade_off(scenario, ours, others, splits, path)
    theirs = {**others, **splits}

    def lower_than(label: str) -> list[str]:
        rivals = theirs if label in ours else ours
        return [rival for rival, point in rivals.items() if has_both_lower(point, points[label])]

    return {
        "policies": ours,
        "heuristics": others,
        "size_split": splits,
        "best_size_splits": list(front(splits)),
        "dominated_by": {label: lower_than(label) for label in points},
        "picture": str(path),
    }


def trade_off_lines(figures: Figures) -> Iterator[str]:
    """A table for each scenario; of the settings of size_split only those that no other setting beats in both."""
    for scenario, found in figures.items():
        yield f"\n{scenario}, against {PRIOR}\n\n| | mean | P99 | both lower than it |\n|---|---|---|---|"
        best = {label: found["size_split"][label] for label in found["best_size_splits"]}
        for label, point in {**found["policies"], **found["heuristics"], **best}.items():
            cells = " | ".join(text_of(point[metric]) for metric in (MEAN, TAIL))
            yield f"| {label} | {cells} | {', '.join(found['dominated_by'][label])} |"
        yield f"\nwrote {found['picture']}"


# --- the command line ---

PARTS = {
    "table": (table, table_lines),
    "picture": (picture, lambda figures: [f"wrote {figures['picture']}"]),
    "requirements": (requirements, requirements_lines),
    "choose": (choose, choose_lines),
    "trade-off": (trade_off, trade_off_lines),
}


def new_parser() -> argparse.ArgumentParser:
    """A subcommand for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    added = {name: parts.add_parser(name) for name in PARTS}
    for part in added.values():
        part.add_argument("results", type=Path, help="a results directory of `vidur-ppo compare`")
        add_json(part)
    added["table"].add_argument("--reference", default="round_robin")
    added["table"].add_argument("--metrics", default="e2e_mean,e2e_p99,ttft_mean")
    added["picture"].add_argument("--against", default="", help="all deployable schedulers without a policy by default")
    added["picture"].add_argument("--metrics", default="e2e_mean,ttft_mean,e2e_p99")
    added["picture"].add_argument("--out", type=Path, default=Path("docs/images/gains.png"))
    added["trade-off"].add_argument("--out", type=Path, default=Path("docs/images"), help="the pictures' directory")
    for name in ("picture", "requirements"):
        added[name].add_argument("--policy", default="", help=f"its label; {SHIPPED} or the only one by default")
    return parser


def missed_by(figures: Figures) -> list[str]:
    """The requirements that do not hold."""
    titles = {"beats_vidur_not": "beats Vidur", "never_worse_not": f"never worse than {PRIOR}"}
    return [title for name, title in titles.items() if figures.get(name)]


def main() -> int:
    """Read, print."""
    parser = new_parser()
    options = parser.parse_args()
    measure, lines_of = PARTS[options.part]
    try:
        results = Results(options.results)
        return report(options, lambda: measure(results, options), lines_of, missed_by)
    except (ResultsError, TablesError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
