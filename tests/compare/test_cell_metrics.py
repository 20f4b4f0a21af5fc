"""Metrics of a cell against hand-computed values."""

import math

import numpy as np
import pandas as pd
import pytest

from vidur_ppo_plugin.compare.metrics import METRICS, REQUEST_COLUMNS, SLO, cell_metrics, definitions

# Two replicas; the first request is warm-up. Latencies 4, 2 and 6, time to first token 1, 1 and 5.
REQUESTS = pd.DataFrame(
    [
        (0.0, 100, 10, 0, 0.0, 1.0, 9.0, 0, True),
        (10.0, 100, 4, 0, 10.5, 11.0, 14.0, 0, False),
        (11.0, 3000, 1, 1, 11.0, 12.0, 13.0, 2, False),
        (20.0, 200, 2, 1, 24.0, 25.0, 26.0, 1, False),
    ],
    columns=list(REQUEST_COLUMNS),
)


def metrics(requests: pd.DataFrame = REQUESTS, **changes: object) -> dict[str, float]:
    options = {"num_replicas": 2, "slo": SLO(), "class_boundary_tokens": 1000, "decision_us": 12.0}
    return cell_metrics(requests, **{**options, **changes})  # type: ignore[arg-type]


def test_latencies() -> None:
    values = metrics()
    assert list(values) == list(METRICS)
    assert values["e2e_mean"] == pytest.approx(4.0)
    assert values["e2e_p50"] == 4.0
    assert values["e2e_p99"] == pytest.approx(np.percentile([4, 2, 6], 99))
    assert values["ttft_mean"] == pytest.approx(7 / 3)
    # (14 - 11) / 3 and (26 - 25) / 1; the request with one output token has no time between tokens.
    assert values["tbt_mean"] == pytest.approx(1.0)
    assert values["normalised_latency_mean"] == pytest.approx((4 / 4 + 2 / 1 + 6 / 2) / 3)
    assert values["decision_us"] == 12.0


def test_classes() -> None:
    values = metrics()
    assert values["e2e_mean_short"] == pytest.approx(5.0)
    assert values["e2e_mean_long"] == values["e2e_p99_long"] == pytest.approx(2.0)
    assert (values["ttft_mean_short"], values["ttft_mean_long"]) == (pytest.approx(3.0), pytest.approx(1.0))
    assert math.isnan(metrics(class_boundary_tokens=5000)["e2e_mean_long"])


def test_service_level() -> None:
    # 1 s + 1 ms a token: the second is late by none, but decodes at 1 s a token; the third is in time; the fourth late.
    assert metrics()["slo_fraction"] == pytest.approx(1 / 3)
    assert metrics()["goodput_rps"] == pytest.approx(0.1)  # one in the ten seconds between the measured arrivals
    assert metrics(slo=SLO(ttft_base_s=5.0, tbt_s=1.0))["slo_fraction"] == 1.0


def test_throughput_counts_what_ends_between_the_first_and_the_last_measured_arrival() -> None:
    values = metrics()
    assert values["throughput_rps"] == pytest.approx(0.2)
    assert values["throughput_tokens_per_s"] == pytest.approx(0.5)


def test_preemptions_and_load_spread() -> None:
    assert metrics()["preemptions"] == 3.0
    # From 10 to 20: (1, 0) for 1 s, (1, 1) for 2 s, (1, 0) for 1 s, then empty. A spread of 1/2 for 2 s of 10.
    assert metrics()["load_spread"] == pytest.approx(0.1)


def test_the_order_of_completion_does_not_matter() -> None:
    """Warm-up requests that end late belong to the load, not to the latencies."""
    late = REQUESTS.copy()
    late.loc[0, "completed_at_s"] = 15.0
    assert metrics(late)["e2e_mean"] == metrics()["e2e_mean"]
    assert metrics(late)["throughput_rps"] == pytest.approx(0.3)
    assert metrics(late)["load_spread"] > metrics()["load_spread"]


def test_unfinished_requests_and_too_few_are_refused() -> None:
    unfinished = REQUESTS.copy()
    unfinished.loc[2, "completed_at_s"] = math.nan
    with pytest.raises(ValueError, match="1 of 4 requests were not completed"):
        metrics(unfinished)
    with pytest.raises(ValueError, match="1 requests are left after the warm-up"):
        metrics(REQUESTS.iloc[[0, 1]])


def test_every_metric_is_defined() -> None:
    for name, definition in definitions().items():
        assert definition["definition"].endswith("."), name
