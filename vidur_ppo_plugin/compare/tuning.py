"""`size_split` tuned for a scenario: the threshold and the number of long replicas with the lowest mean latency.

On tuning seeds, which are never compared. The thresholds tried are quantiles of the scenario's own prompts.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from vidur_ppo_plugin.scenario import Scenario

from .engines import run_cell
from .schedulers import TUNED, SchedulerSpec

_QUANTILES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
_SHARES_OF_LONG_REPLICAS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)


@dataclass(frozen=True)
class Trial:
    """One setting, to be run in another process."""

    scenario: Scenario
    options: dict[str, Any]
    seeds: tuple[int, ...]
    engine: str


def trials(scenario: Scenario, *, seeds: tuple[int, ...], engine: str) -> list[Trial]:
    """All settings that are tried for a scenario."""
    size = scenario.num_replicas
    numbers = sorted({min(size - 1, max(1, round(share * size))) for share in _SHARES_OF_LONG_REPLICAS})
    return [
        Trial(scenario, {"threshold_tokens": threshold, "num_long_replicas": number}, seeds, engine)
        for threshold, number in itertools.product(thresholds(scenario, seed=seeds[0]), numbers)
    ]


def thresholds(scenario: Scenario, *, seed: int) -> list[int]:
    """Thresholds to try: quantiles of the prompts of a seed, and the boundary between short and long ones."""
    prompts = scenario.requests(seed).prompt_tokens
    return sorted({int(value) for value in np.quantile(prompts, _QUANTILES)} | {scenario.class_boundary_tokens})


def mean_latency_s(trial: Trial) -> float:
    """Mean end-to-end latency of a setting over its seeds."""
    spec = SchedulerSpec(TUNED, TUNED).with_options(**trial.options)
    runs = (run_cell(trial.scenario, spec, seed, engine=trial.engine) for seed in trial.seeds)
    return float(np.mean([run.metrics(trial.scenario)["e2e_mean"] for run in runs]))
