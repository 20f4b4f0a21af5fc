"""Runs comparisons for which `vidur-ppo compare` has no options, into results directories like its own."""

from collections.abc import Callable, Iterable
from pathlib import Path

from _requirements import PRIOR

from vidur_ppo_plugin.compare.results import Cell, Results
from vidur_ppo_plugin.compare.runner import Task, run_task, run_tasks
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec
from vidur_ppo_plugin.compare.setup import Setup
from vidur_ppo_plugin.scenario import Scenario


def open_results(
    out: Path, scenarios: list[Scenario], schedulers: list[SchedulerSpec], seeds: Iterable[int], reference: str = PRIOR
) -> tuple[Setup, Results]:
    """A results directory, new or to be continued."""
    setup = Setup(
        scenarios=scenarios,
        schedulers=schedulers,
        seeds=list(seeds),
        reference=reference,
        engine="twin",
        is_quick=False,
    )
    return setup, setup.open(out)


def run_cells(setup: Setup, results: Results, wanted: Callable[[Cell], bool], jobs: int) -> None:
    """Run the cells that are wanted and not finished; SystemExit with the error of one that fails."""
    scenarios = {scenario.name: scenario for scenario in setup.scenarios}
    specs = {spec.label: spec for spec in setup.schedulers}
    tasks = [
        Task(results.directory, cell, scenarios[cell.scenario], specs[cell.scheduler], setup.engine)
        for cell in results.planned
        if wanted(cell) and not results.is_finished(cell)
    ]
    if jobs > 1:
        run_tasks(tasks, jobs=jobs)
    else:
        for task in tasks:
            run_task(task)
    if results.failures:
        failure = results.failures[0]
        raise SystemExit(f"{failure['scenario']}, {failure['scheduler']}: {failure['error']}")
