"""What the benchmarks of policies share: cells in the twin, in parallel, and their changes paired by seed."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.runner import in_parallel
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec
from vidur_ppo_plugin.compare.statistics import paired_change
from vidur_ppo_plugin.scenario import Scenario

Result = TypeVar("Result")
#: The metrics that requirements are about.
METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99")
#: Vidur's own schedulers, and those of METRICS in which a policy has to be better than each of them.
VIDURS = ("random", "round_robin", "lor")
BEATS = ("e2e_mean", "ttft_mean", "ttft_p99")
#: What a policy must never be worse than, and the largest upper end of the 95 % interval that counts as that.
PRIOR = "least_tokens"
MOST_WORSE = {"e2e_mean": 0.01, "ttft_mean": 0.01, "e2e_p99": 0.03, "ttft_p99": 0.03}
# Where a cluster is hardly loaded nobody waits for anybody: there a change that small is a tie, and enough.
_TIE = 0.005
_LIGHT_LOAD = 0.5
#: A row for each seed.
Rows = list[dict[str, float]]


class Task(NamedTuple):
    """A scheduler on the requests of a scenario's seed."""

    scenario: Scenario
    scheduler: SchedulerSpec
    seed: int


def run_task(task: Task) -> dict[str, float]:
    """Its metrics, in the twin."""
    return run_cell(task.scenario, task.scheduler, task.seed, engine="twin").metrics(task.scenario)


def run_grid(
    scenario: Scenario, schedulers: Sequence[SchedulerSpec], seeds: Sequence[int], *, jobs: int
) -> dict[str, Rows]:
    """Label -> metrics of each seed."""
    tasks = [Task(scenario, scheduler, seed) for scheduler in schedulers for seed in seeds]
    results = run_all(run_task, tasks, jobs=jobs)
    return {
        scheduler.label: results[index * len(seeds) : (index + 1) * len(seeds)]
        for index, scheduler in enumerate(schedulers)
    }


def run_all(function: Callable[[Any], Result], tasks: Sequence[Any], *, jobs: int) -> list[Result]:
    """The result of each task, in their order; the first failure is raised."""
    if jobs == 1:
        return [function(task) for task in tasks]
    numbered = [(function, index, task) for index, task in enumerate(tasks)]
    outcomes = {task[1]: outcome for task, outcome in in_parallel(_call, numbered, jobs=jobs, title="runs")}
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcomes[index] for index in range(len(tasks))]  # type: ignore[misc]


def _call(task: tuple[Callable[[Any], Any], int, Any]) -> Any:
    function, _, argument = task
    return function(argument)


def change(ours: Rows, theirs: Rows, metric: str) -> dict[str, float]:
    """Relative change of a metric and its 95 % interval, paired by seed."""
    values = (np.array([row[metric] for row in rows]) for rows in (ours, theirs))
    return dict(zip(("change", "low", "high"), paired_change(*values), strict=True))


def beats(entry: Mapping[str, float], load: float) -> bool:
    """Whether a change is an improvement beyond noise, or at light load a tie."""
    return entry["high"] < 0 or (load <= _LIGHT_LOAD and abs(entry["change"]) <= _TIE)


def is_not_inferior(metric: str, entry: Mapping[str, float]) -> bool:
    """Whether a change against PRIOR excludes that the policy is worse."""
    return entry["high"] < MOST_WORSE[metric]


def text_of(entry: Mapping[str, float]) -> str:
    """A change for people."""
    if np.isnan(entry["low"]):
        return f"{entry['change']:+.1%}"
    return f"{entry['change']:+.1%} [{100 * entry['low']:+.1f}, {100 * entry['high']:+.1f}]"


def parse_flags(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of a command line, values as in JSON where they look like it."""
    flags = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            parser.error(f"--flag must be NAME=VALUE, got {text!r}")
        flags[name] = json.loads(value) if value[:1] in "0123456789.-tf" else value
    return flags
