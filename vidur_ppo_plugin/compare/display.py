"""How results are shown, the same in the terminal, in the plots and on the page: titles, numbers, and what is best."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .metrics import METRICS
from .statistics import REFERENCE

_LATENCY_FIGURES = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}

#: A short name for each metric.
TITLES: dict[str, str] = {
    **{f"e2e_{key}": f"E2E {text}" for key, text in _LATENCY_FIGURES.items()},
    **{f"ttft_{key}": f"TTFT {text}" for key, text in _LATENCY_FIGURES.items()},
    "tbt_mean": "TBT mean",
    "tbt_p99": "TBT P99",
    "normalised_latency_mean": "Latency per token",
    "goodput_rps": "Goodput",
    "slo_fraction": "SLO met",
    "throughput_rps": "Requests",
    "throughput_tokens_per_s": "Output tokens",
    "preemptions": "Preemptions",
    "load_spread": "Load spread",
    "decision_us": "Decision time",
    **{
        f"{prefix}_{key}_{size}": f"{prefix.upper()} {_LATENCY_FIGURES[key]} ({size})"
        for size in ("short", "long")
        for prefix, key in (("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"))
    },
}

#: Every metric once, in the groups in which the page shows them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Latency": ("e2e_mean", "e2e_p50", "e2e_p90", "e2e_p99", "normalised_latency_mean"),
    "First token": ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99"),
    "Short and long prompts": (
        *("e2e_mean_short", "e2e_mean_long", "e2e_p99_short", "e2e_p99_long"),
        *("ttft_mean_short", "ttft_mean_long"),
    ),
    "Goodput and throughput": ("goodput_rps", "slo_fraction", "throughput_rps", "throughput_tokens_per_s"),
    "Other": ("tbt_mean", "tbt_p99", "preemptions", "load_spread", "decision_us"),
}

#: The metrics of a quick look.
MAIN = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99", "tbt_p99", "goodput_rps")

# Fractions and units that read better in another scale: factor, and the unit shown.
_SHOWN_UNITS = {"us": (1.0, "µs"), "s/token": (1e3, "ms/token")}
_PER_CENT = {"slo_fraction"}
_MILLISECONDS = {"tbt_mean", "tbt_p99"}


@dataclass(frozen=True)
class Entry:
    """A metric of a scheduler in a scenario, as `compare_cells` has it."""

    value: float
    change: float
    low: float
    high: float
    verdict: str

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of the change lies on one side of zero."""
        return self.verdict != REFERENCE and (self.low > 0 or self.high < 0)


Entries = Mapping[tuple[str, str, str], Entry]


def entries_of(comparison: pd.DataFrame) -> dict[tuple[str, str, str], Entry]:
    """The rows of `compare_cells` by scenario, scheduler and metric."""
    return {
        (row.scenario, row.scheduler, row.metric): Entry(row.value, row.change, row.low, row.high, row.verdict)
        for row in comparison.itertuples(index=False)
    }


def best_of(entries: Entries, scenario: str, metric: str, schedulers: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The deployable schedulers with the best value of a metric; none if all are equal."""
    values = {
        label: entries[scenario, label, metric].value
        for label, details in schedulers.items()
        if details["deployable"] and (scenario, label, metric) in entries
    }
    values = {label: value for label, value in values.items() if not math.isnan(value)}
    if not METRICS[metric].is_judged or len(set(values.values())) < 2:
        return set()
    best = (min if METRICS[metric].lower_is_better else max)(values.values())
    return {label for label, value in values.items() if value == best}


def unit_of(metric: str) -> str:
    """The unit that `number` uses for a metric; may be empty."""
    if metric in _PER_CENT:
        return "%"
    if metric in _MILLISECONDS:
        return "ms"
    unit = METRICS[metric].unit
    return _SHOWN_UNITS.get(unit, (1.0, unit))[1]


def number(metric: str, value: float) -> str:
    """A value of a metric to about three digits, without its unit."""
    if math.isnan(value):
        return "n/a"
    if metric in _PER_CENT:
        return f"{value * 100:.1f}"
    scale = 1e3 if metric in _MILLISECONDS else _SHOWN_UNITS.get(METRICS[metric].unit, (1.0, ""))[0]
    value *= scale
    if metric == "preemptions":
        return f"{value:.1f}"
    decimals = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{decimals}f}"


def percent(change: float) -> str:
    """A relative change with its sign, in per cent: "-12.3%"; "n/a" where undefined."""
    return "n/a" if math.isnan(change) else f"{_signed(change)}%"


def interval(entry: Entry) -> str:
    """The interval of a change in per cent: "[-15.0, -9.8]"; empty where there is none."""
    if math.isnan(entry.low) or math.isnan(entry.high):
        return ""
    return f"[{_signed(entry.low)}, {_signed(entry.high)}]"


def slo_text(slo: Mapping[str, float]) -> str:
    """The SLO of a scenario in words."""
    base_s, per_token_ms = slo["ttft_base_s"], slo["ttft_per_prompt_token_s"] * 1e3
    first = f"first token within {base_s:g} s" + (f" + {per_token_ms:g} ms per prompt token" if per_token_ms else "")
    return f"{first}; {slo['tbt_s'] * 1e3:g} ms between tokens"


def _signed(change: float) -> str:
    if math.isinf(change):
        return "+inf" if change > 0 else "-inf"
    shown = change * 100
    text = f"{shown:+.0f}" if abs(shown) >= 99.95 else f"{shown:+.1f}"
    return "0.0" if float(text) == 0 else text
