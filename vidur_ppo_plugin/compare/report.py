"""The comparison as one HTML page that needs no server and no network: `write_report`."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from .display import GROUPS, TITLES, Entries, best_of, entries_of, interval, number, percent, slo_text, unit_of
from .metrics import METRICS
from .report_data import heat_map_data, page_data, typographic, typographic_numbers
from .results import Results, write_atomically
from .statistics import CONFIDENCE, REFERENCE, compare_cells
from .summary import headline, standing_of, trade_offs

_STANDING_METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "goodput_rps")
_SCRIPTS = ("charts.js", "page.js")


@dataclass(frozen=True)
class TableCell:
    """A cell of a metrics table, ready to be printed; `sort_by` is empty where there is nothing to sort by."""

    metric: str
    sort_by: str
    value: str
    change: str
    interval: str
    verdict: str
    is_best: bool


def write_report(results: Results, path: Path, comparison: pd.DataFrame | None = None) -> None:
    """Write the page; the same results give the same bytes, and the file is replaced as a whole or not at all.

    `comparison` is what `compare_cells` says of the results, and is computed if it is not given.
    """
    write_atomically(path, render(results, comparison).encode())


def render(results: Results, comparison: pd.DataFrame | None = None) -> str:
    """The page as text."""
    metadata, cells = results.metadata, results.cells
    if comparison is None:
        comparison = compare_cells(cells, metadata["reference"])
    entries = entries_of(comparison)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"num": typographic_numbers, "name": _breakable}
    return environment.from_string(_asset("report.html.j2")).render(
        **_context(results, cells, entries),
        style=_asset("report.css"),
        script=script,
        # The page runs this script and nothing else, whatever a name or an error message contains.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=embeddable(page_data(results, cells, entries)),
    )


def embeddable(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or start another."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _breakable(name: str) -> Markup:
    """A name that may be broken after its separators, where a column is narrow."""
    return Markup(re.sub("([_:/])", r"\1<wbr>", str(escape(name))))


def _context(results: Results, cells: pd.DataFrame, entries: Entries) -> dict[str, Any]:
    metadata = results.metadata
    others = [label for label in metadata["schedulers"] if label != metadata["reference"]]
    return {
        "metadata": metadata,
        "reference": metadata["reference"],
        "index": {label: i for i, label in enumerate(metadata["schedulers"])},
        "headline": headline(metadata, entries, len(cells)),
        "standings": {
            label: [standing_of(metadata, entries, label, metric) for metric in _STANDING_METRICS] for label in others
        },
        "trade_offs": trade_offs(metadata, entries),
        "heat": heat_map_data(metadata, entries),
        "tables": {scenario: _table(scenario, metadata, entries) for scenario in metadata["scenarios"]},
        "num_seeds": _num_seeds(cells, metadata),
        "facts": {name: _facts(details) for name, details in metadata["scenarios"].items()},
        "groups": GROUPS,
        "titles": TITLES,
        "metrics": METRICS,
        "unit_of": unit_of,
        "failures": results.failures,
        "confidence": f"{CONFIDENCE:.0%}",
        "details": {key: _plain(value) for key, value in metadata.items()},
    }


def _table(scenario: str, metadata: Mapping[str, Any], entries: Entries) -> dict[str, list[TableCell]]:
    """The cells of a scenario's table by scheduler, in the order of the groups of metrics."""
    metrics = [metric for group in GROUPS.values() for metric in group]
    best = {metric: best_of(entries, scenario, metric, metadata["schedulers"]) for metric in metrics}
    return {
        label: [_cell(scenario, label, metric, entries, label in best[metric]) for metric in metrics]
        for label in metadata["schedulers"]
        if (scenario, label, metrics[0]) in entries
    }


def _cell(scenario: str, label: str, metric: str, entries: Entries, is_best: bool) -> TableCell:
    entry = entries[scenario, label, metric]
    is_reference = entry.verdict == REFERENCE
    return TableCell(
        metric=metric,
        sort_by="" if entry.value != entry.value else repr(entry.value),
        value=typographic(number(metric, entry.value)),
        change="" if is_reference else typographic(percent(entry.change)),
        interval="" if is_reference else typographic(interval(entry)),
        verdict=entry.verdict,
        is_best=is_best,
    )


def _num_seeds(cells: pd.DataFrame, metadata: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    counts = cells.groupby(["scenario", "scheduler"]).size().to_dict() if len(cells) else {}
    return {
        scenario: {label: int(counts.get((scenario, label), 0)) for label in metadata["schedulers"]}
        for scenario in metadata["scenarios"]
    }


def _facts(details: Mapping[str, Any]) -> dict[str, str]:
    """What a reader should know of a scenario."""
    return {
        "Load": f"{details['load']:.0%} of {details['capacity_qps']:.3g} requests/s",
        "Replicas": str(details["num_replicas"]),
        "Requests": f"{details['num_requests']:,} a seed, {details['warm_up_fraction']:.0%} of them warm-up",
        "SLO": slo_text(details["slo"]),
        "Short prompts": f"up to {details['class_boundary_tokens']:,} tokens",
    }


def _plain(value: Any) -> str:
    """A value of the metadata: short lists and tables as words, anything deeper as JSON."""
    if value is None:
        return "unknown"
    if isinstance(value, Mapping) and all(not isinstance(item, (dict, list)) for item in value.values()):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list) and all(not isinstance(item, (dict, list)) for item in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
