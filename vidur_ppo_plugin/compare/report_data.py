"""What the page draws, as plain data: small enough to be embedded, rounded to what can be seen."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import series
from .display import GROUPS, TITLES, Entries, Entry, interval, number, percent, unit_of
from .results import Results
from .statistics import BETTER, REFERENCE, SAME, WORSE
from .style import change_strength, replica_colours, scheduler_styles

# Matplotlib's dashes as SVG has them.
_SVG_DASHES = {"-": "", "--": "6 3", ":": "1.5 3", "-.": "7 3 1.5 3"}


def page_data(results: Results, cells: pd.DataFrame, entries: Entries) -> dict[str, Any]:
    """Everything the scripts of the page need."""
    metadata = results.metadata
    styles = scheduler_styles(metadata)
    return {
        "levels": _rounded(series.QUANTILE_LEVELS, 4),
        "schedulers": [
            {"label": label, "slot": styles[label].slot, "dash": _SVG_DASHES[styles[label].dash]}
            for label in metadata["schedulers"]
        ],
        "scenarios": {
            scenario: _scenario_data(results, cells[cells["scenario"] == scenario], entries)
            for scenario in dict.fromkeys(cells["scenario"])
        },
        "heat": heat_map_data(metadata, entries),
    }


def heat_map_data(metadata: Mapping[str, Any], entries: Entries) -> dict[str, Any]:
    """The heat map of each metric: a row for each scheduler but the reference, a cell for each scenario."""
    others = [label for label in metadata["schedulers"] if label != metadata["reference"]]
    return {
        metric: {
            label: [
                _heat_map_cell(metric, entries.get((scenario, label, metric))) for scenario in metadata["scenarios"]
            ]
            for label in others
        }
        for group in GROUPS.values()
        for metric in group
    }


def typographic(text: str) -> str:
    """A number as it is printed: with a minus sign and a sign for infinity."""
    return text.replace("-", "\N{MINUS SIGN}").replace("inf", "\N{INFINITY}")


def describe(metric: str, entry: Entry) -> str:
    """A cell of the comparison in words."""
    value = f"{TITLES[metric]} {number(metric, entry.value)} {unit_of(metric)}".strip()
    if entry.verdict == REFERENCE:
        return typographic_numbers(f"{value} ({REFERENCE})")
    change = f"{percent(entry.change)} {interval(entry)}".strip()
    return f"{value}, {typographic(change)}: {entry.verdict}"


def typographic_numbers(text: str) -> str:
    """A sentence with its numbers as they are printed; only a hyphen in front of a digit is a minus sign."""
    return "".join(
        "\N{MINUS SIGN}" if sign == "-" and following.isdigit() and (i == 0 or text[i - 1] in " [(") else sign
        for i, (sign, following) in enumerate(zip(text, text[1:] + " ", strict=True))
    )


def _heat_map_cell(metric: str, entry: Entry | None) -> list[Any]:
    """[text, description, tone, strength]; tone: 1 better, -1 worse, 0 no difference, null not judged."""
    if entry is None or math.isnan(entry.change):
        return ["n/a", "not measured", None, 0]
    tone = {BETTER: 1, WORSE: -1, SAME: 0}.get(entry.verdict)
    strength = round(change_strength(entry.change), 2) if tone else 0
    return [typographic(percent(entry.change)), describe(metric, entry), tone, strength]


def _scenario_data(results: Results, cells: pd.DataFrame, entries: Entries) -> dict[str, Any]:
    scenario = cells["scenario"].iloc[0]
    num_replicas = results.metadata["scenarios"][scenario]["num_replicas"]
    data: dict[str, Any] = {"replicaColours": replica_colours(num_replicas), "schedulers": {}}
    for label, group in cells.groupby("scheduler", sort=False):
        runs = [results.requests(scenario, str(label), seed) for seed in group["seed"]]
        together, first = pd.concat(runs), runs[0]
        shares = series.action_shares(first, num_replicas)
        waiting, in_flight = series.waiting(first, num_replicas), series.in_flight(first, num_replicas)
        data["schedulers"][label] = {
            "seed": int(group["seed"].iloc[0]),
            "e2e": _significant(series.quantiles(series.end_to_end_s(together))),
            "ttft": _significant(series.quantiles(series.first_token_s(together))),
            "time": _rounded(waiting.time_s, 2),
            "waiting": [_rounded(values, 1) for values in waiting.values],
            "inFlight": [_rounded(values, 1) for values in in_flight.values],
            "shareTime": _rounded(shares.time_s, 2),
            "shares": [_rounded(values, 3) for values in shares.values],
            "classes": _classes(group),
        }
    return data


def _classes(cells: pd.DataFrame) -> dict[str, list[float | None]]:
    """The [short, long] variants of the latency metrics that are measured by class."""
    metrics = ("e2e_mean", "e2e_p99", "ttft_mean")
    return {m: _significant(np.array([cells[f"{m}_{size}"].mean() for size in ("short", "long")])) for m in metrics}


def _significant(values: NDArray[np.float64]) -> list[float | None]:
    return [_short(float(f"{value:.4g}")) for value in values]


def _rounded(values: NDArray[np.float64], decimals: int) -> list[float | None]:
    return [_short(round(float(value), decimals)) for value in values]


def _short(value: float) -> float | None:
    """JSON knows neither infinity nor NaN, and a whole number is shorter without its point."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
