"""The metrics of a cell (one scenario, one scheduler, one seed), and their definitions in one table.

They are computed from what happened to each request, the same way for every scheduler. The first requests of a run find
an empty cluster: they are warm-up and do not count. A run goes on until its last request is finished, so no latency is
cut off.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vidur_ppo_plugin.workload.slo import SLO

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """What a column of the results means."""

    name: str
    unit: str
    definition: str
    lower_is_better: bool = True
    #: Whether it is the same in every run; a wall-clock time is not.
    is_deterministic: bool = True
    #: Whether a difference can be called better or worse at all.
    is_judged: bool = True


def _latency(prefix: str, definition: str) -> list[Metric]:
    figures = {"mean": "mean", "p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
    return [Metric(f"{prefix}_{key}", "s", f"{definition}: {text}.") for key, text in figures.items()]


_E2E = "Arrival to last token"
_TTFT = "Arrival to first token"
_TBT = "(last token - first token) / (output tokens - 1) of each request with at least two output tokens"

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_latency("e2e", _E2E),
        *_latency("ttft", _TTFT),
        Metric("tbt_mean", "s", f"Time between tokens, averaged within each request: {_TBT}; mean over requests."),
        Metric("tbt_p99", "s", f"Time between tokens, averaged within each request: {_TBT}; 99th percentile."),
        Metric("normalised_latency_mean", "s/token", "Mean over requests of end-to-end latency / output tokens."),
        Metric(
            "goodput_rps",
            "requests/s",
            "Measured requests that met both limits of the SLO, per second between first and last measured arrival.",
            lower_is_better=False,
        ),
        Metric(
            "slo_fraction", "", "Share of the measured requests that met both limits of the SLO.", lower_is_better=False
        ),
        Metric(
            "throughput_rps",
            "requests/s",
            "Requests completed between the first and the last measured arrival, per second.",
            lower_is_better=False,
        ),
        Metric(
            "throughput_tokens_per_s",
            "tokens/s",
            "Output tokens of the requests completed between the first and the last measured arrival, per second.",
            lower_is_better=False,
        ),
        Metric("preemptions", "", "Times that a measured request lost its KV cache and started over, in total."),
        Metric(
            "load_spread",
            "requests",
            "Standard deviation across replicas of the requests in flight, averaged over the time between the first "
            "and the last measured arrival. Uneven is not always worse: replicas may differ, or be reserved.",
            is_judged=False,
        ),
        Metric(
            "decision_us",
            "us",
            "Mean wall-clock time of a placement decision; in Vidur with, in the twin without looking at the replicas.",
            is_deterministic=False,
        ),
        *(
            Metric(f"{prefix}_{key}_{size}", "s", f"{definition}: {text}, {size} prompts only.")
            for prefix, definition, keys in (("e2e", _E2E, ("mean", "p99")), ("ttft", _TTFT, ("mean",)))
            for size in ("short", "long")
            for key, text in (("mean", "mean"), ("p99", "99th percentile"))
            if key in keys
        ),
    )
}

#: Columns of the table of requests of a cell.
REQUEST_COLUMNS = (
    "arrived_at_s",
    "prompt_tokens",
    "decode_tokens",
    "replica",
    "scheduled_at_s",
    "first_token_at_s",
    "completed_at_s",
    "num_restarts",
    "is_warm_up",
)


def cell_metrics(
    requests: pd.DataFrame, *, num_replicas: int, slo: SLO, class_boundary_tokens: int, decision_us: float
) -> dict[str, float]:
    """All METRICS of a cell; NaN where there is nothing to measure (no request of a class)."""
    missing = requests["completed_at_s"].isna()
    if missing.any():
        raise ValueError(f"{int(missing.sum())} of {len(requests)} requests were not completed")
    measured = requests[~requests["is_warm_up"]]
    if len(measured) < 2:
        raise ValueError(f"{len(measured)} requests are left after the warm-up; at least 2 are needed")
    arrived_s = _floats(measured, "arrived_at_s")
    prompts, decodes = _floats(measured, "prompt_tokens"), _floats(measured, "decode_tokens")
    e2e_s = _floats(measured, "completed_at_s") - arrived_s
    ttft_s = _floats(measured, "first_token_at_s") - arrived_s
    tbt_s = np.where(decodes > 1, (e2e_s - ttft_s) / np.maximum(decodes - 1, 1), np.nan)
    start_s, end_s = float(arrived_s[0]), float(arrived_s[-1])
    window_s = end_s - start_s
    is_met = slo.is_met(prompts, ttft_s, tbt_s)
    values = {f"e2e_{key}": value for key, value in _distribution(e2e_s).items()}
    values |= {f"ttft_{key}": value for key, value in _distribution(ttft_s).items()}
    tbt = _distribution(tbt_s[~np.isnan(tbt_s)])
    completed = requests[requests["completed_at_s"].between(start_s, end_s)]
    values |= {
        "tbt_mean": tbt["mean"],
        "tbt_p99": tbt["p99"],
        "normalised_latency_mean": float(np.mean(e2e_s / decodes)),
        "goodput_rps": float(is_met.sum()) / window_s,
        "slo_fraction": float(is_met.mean()),
        "throughput_rps": len(completed) / window_s,
        "throughput_tokens_per_s": float(completed["decode_tokens"].sum()) / window_s,
        "preemptions": float(measured["num_restarts"].sum()),
        "load_spread": _load_spread(requests, num_replicas, start_s, end_s),
        "decision_us": decision_us,
    }
    for size, members in (("short", prompts <= class_boundary_tokens), ("long", prompts > class_boundary_tokens)):
        of_class = _distribution(e2e_s[members])
        values[f"e2e_mean_{size}"], values[f"e2e_p99_{size}"] = of_class["mean"], of_class["p99"]
        values[f"ttft_mean_{size}"] = _distribution(ttft_s[members])["mean"]
    return {name: values[name] for name in METRICS}


def definitions() -> dict[str, dict[str, Any]]:
    """The table as data, for the metadata of a results directory."""
    return {
        metric.name: {
            "unit": metric.unit,
            "definition": metric.definition,
            "lower_is_better": metric.lower_is_better,
        }
        for metric in METRICS.values()
    }


def check_columns(columns: Mapping[str, Any]) -> None:
    """ValueError if metrics are missing or unknown (results of another version)."""
    missing, unknown = sorted(set(METRICS) - set(columns)), sorted(set(columns) - set(METRICS))
    if missing or unknown:
        raise ValueError(f"metrics missing: {missing or 'none'}, unknown: {unknown or 'none'}")


def _floats(requests: pd.DataFrame, column: str) -> FloatArray:
    return np.asarray(requests[column], dtype=np.float64)


def _distribution(values: FloatArray) -> dict[str, float]:
    if len(values) == 0:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), float("nan"))
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _load_spread(requests: pd.DataFrame, num_replicas: int, start_s: float, end_s: float) -> float:
    """Time average over [start, end] of the standard deviation of requests in flight across replicas."""
    replica = np.tile(np.asarray(requests["replica"], dtype=np.int64), 2)
    moments_s = np.concatenate([_floats(requests, "arrived_at_s"), _floats(requests, "completed_at_s")])
    steps = np.zeros((len(moments_s), num_replicas))
    steps[np.arange(len(moments_s)), replica] = np.repeat([1.0, -1.0], len(requests))
    order = np.argsort(moments_s, kind="stable")
    in_flight = np.cumsum(steps[order], axis=0)
    edges_s = np.clip(np.append(moments_s[order], np.inf), start_s, end_s)
    return float(np.sum(in_flight.std(axis=1) * np.diff(edges_s)) / (end_s - start_s))
