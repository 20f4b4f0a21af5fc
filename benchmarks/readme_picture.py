r"""The picture at the top of the README: what the shipped policy gains over each scheduler, as a heat map.

    vidur-ppo compare --seeds 10 --reference least_tokens --out results \
        --schedulers random,round_robin,lor,power_of_two,least_outstanding,least_tokens,ppo_modular:pretrained
    python benchmarks/readme_picture.py results [--policy ppo_modular:pretrained] [--against A,B] \
        [--metrics e2e_mean,ttft_mean,e2e_p99] [--out docs/images/gains.png] [--json]

A panel for each metric, a row for each scheduler, a column for each scenario: the change that the policy makes, paired
by seed. Blue is better, orange worse; grey where the 95 % interval contains zero, or there are too few seeds for one.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vidur_ppo_plugin.compare.display import TITLES
from vidur_ppo_plugin.compare.results import Results
from vidur_ppo_plugin.compare.statistics import compare_cells
from vidur_ppo_plugin.compare.style import diverging_colour

TEXT, MUTED, PLAIN = "#1c1f23", "#5f6670", "#f1f2f4"


#: metric -> scheduler -> scenario -> change of the policy, and its interval.
Gains = dict[str, dict[str, dict[str, Any]]]


def gains(results: Results, policy: str, against: list[str], metrics: list[str]) -> Gains:
    """From the cells of a comparison."""
    table: Gains = {metric: {name: {} for name in against} for metric in metrics}
    for name in against:
        for row in compare_cells(results.cells, name).itertuples():
            if row.scheduler == policy and row.metric in metrics:
                table[row.metric][name][row.scenario] = {"change": row.change, "low": row.low, "high": row.high}
    return table


def draw(table: Gains, policy: str, path: Path, note: str) -> None:
    """One PNG."""
    schedulers = list(next(iter(table.values())))
    scenarios = list(next(iter(next(iter(table.values())).values())))
    width, height = max(6.6, 1.9 + 0.72 * len(scenarios)), len(table) * (0.55 + 0.27 * len(schedulers)) + 1.0
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(table), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (metric, rows) in zip(panels, table.items(), strict=True):
        _panel(axes, rows, schedulers, scenarios)
        axes.set_title(TITLES[metric], loc="left", fontsize=9, color=TEXT)
    panels[-1].set_xticks(range(len(scenarios)), scenarios, rotation=30, ha="right", rotation_mode="anchor")
    title = f"What {policy} changes against each scheduler (%)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(note, fontsize=7, color=MUTED, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, rows: dict[str, dict[str, Any]], schedulers: list[str], scenarios: list[str]) -> None:
    for y, scheduler in enumerate(schedulers):
        for x, scenario in enumerate(scenarios):
            entry = rows[scheduler].get(scenario)
            if entry is None:
                continue
            is_sure = entry["low"] > 0 or entry["high"] < 0
            colour = diverging_colour(-entry["change"]) if is_sure else PLAIN
            axes.fill_between([x - 0.48, x + 0.48], y - 0.46, y + 0.46, color=colour, linewidth=0)
            percent = round(100 * entry["change"])
            text = f"{percent:+d}".replace("-", "\N{MINUS SIGN}") if percent else "0"
            weight = "bold" if is_sure else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight=weight,
                      color=TEXT if is_sure else MUTED)  # fmt: skip
    axes.set(xlim=(-0.5, len(scenarios) - 0.5), ylim=(len(schedulers) - 0.5, -0.5))
    axes.set_yticks(range(len(schedulers)), schedulers)
    axes.tick_params(length=0, labelsize=8, colors=TEXT)
    axes.spines[:].set_visible(False)


def main() -> int:
    """Read, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the results directory of `vidur-ppo compare`")
    parser.add_argument("--policy", default="ppo_modular:pretrained", help="its label in the comparison")
    parser.add_argument("--against", default="", help="labels; all deployable schedulers without a policy unless given")
    parser.add_argument("--metrics", default="e2e_mean,ttft_mean,e2e_p99")
    parser.add_argument("--out", type=Path, default=Path("docs/images/gains.png"))
    parser.add_argument("--json", action="store_true", help="also print one JSON object")
    options = parser.parse_args()
    results = Results(options.results)
    known = results.metadata["schedulers"]
    against = options.against.split(",") if options.against else [
        name for name, facts in known.items() if facts["deployable"] and facts["kind"] != "ppo_modular"
    ]  # fmt: skip
    for name in (options.policy, *against):
        if name not in known:
            parser.error(f"{options.results} has no scheduler {name!r}; it has {', '.join(known)}")
    metrics = options.metrics.split(",")
    if unknown := [name for name in metrics if name not in TITLES]:
        parser.error(f"--metrics: there is no {unknown[0]!r}; there are {', '.join(TITLES)}")
    table = gains(results, options.policy, against, metrics)
    seeds = results.metadata["seeds"]
    note = f"{len(seeds)} held-out seeds; blue: better, orange: worse (the 95 % interval excludes zero); grey: neither"
    draw(table, options.policy, options.out, note)
    print(json.dumps(table) if options.json else f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
