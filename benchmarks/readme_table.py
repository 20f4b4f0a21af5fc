r"""The table of schedulers in the README, from the results directory of a comparison.

    vidur-ppo compare --reference round_robin --seeds 5 --out results \
        --schedulers round_robin,random,lor,least_outstanding,least_tokens,shortest_delay,size_split,oracle \
        --scenarios arxiv,chat,mixed_long,bursty,heterogeneous,vllm,kv_tight
    python benchmarks/readme_table.py results [--reference round_robin] [--json]

Each cell: change of mean latency, of its 99th percentile, and of the mean time to first token, in per cent. A change
whose 95 % interval contains zero is in parentheses.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vidur_ppo_plugin.compare.results import Results
from vidur_ppo_plugin.compare.statistics import compare_cells

METRICS = ("e2e_mean", "e2e_p99", "ttft_mean")


def table(results: Results, reference: str) -> dict[str, dict[str, dict[str, Any]]]:
    """scheduler -> scenario -> metric -> change in per cent, and whether its interval excludes zero."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in compare_cells(results.cells, reference).itertuples():
        if row.metric in METRICS and row.scheduler != reference:
            entry = {"change_percent": round(100 * row.change, 1), "is_sure": not row.low <= 0 <= row.high}
            rows.setdefault(row.scheduler, {}).setdefault(row.scenario, {})[row.metric] = entry
    return rows


def markdown(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    r"""The table for the README."""
    scenarios = list(next(iter(rows.values())))
    lines = ["| scheduler | " + " | ".join(scenarios) + " |", "|---|" + "---|" * len(scenarios)]
    for scheduler, by_scenario in rows.items():
        cells = [" / ".join(_text(by_scenario[scenario][metric]) for metric in METRICS) for scenario in scenarios]
        lines.append(f"| `{scheduler}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(entry: dict[str, Any]) -> str:
    percent = round(entry["change_percent"])
    text = f"{percent:+d}" if percent else "0"
    return text if entry["is_sure"] else f"({text})"


def main() -> int:
    """Read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the results directory of `vidur-ppo compare`")
    parser.add_argument("--reference", default="round_robin")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    rows = table(Results(options.results), options.reference)
    print(json.dumps(rows) if options.json else markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
