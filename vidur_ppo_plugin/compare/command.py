"""What `vidur-ppo compare`, `vidur-ppo capacity` and `vidur-ppo scenario` do with their options."""

import dataclasses
import os
import shlex
from pathlib import Path

import yaml
from rich.console import Console

from vidur_ppo_plugin.scenario import REPLAY, Capacity, ScenarioError, find_scenario, load_scenario, scenario_names

from .capacity import find_capacity
from .comparison import USUAL_REFERENCE, Options, compare
from .engines import TWIN, vidur_arguments
from .plots import write_plots
from .report import write_report
from .results import Results
from .runner import in_parallel
from .scenarios import read_scenario, require_capacity
from .schedulers import parse_schedulers
from .statistics import compare_cells
from .table import print_tables

REPORT = "report.html"
PLOTS = "plots"


def compare_command(
    *,
    out: str,
    schedulers: str,
    scenarios: str,
    reference: str,
    trace: str | None,
    seeds: int,
    jobs: int,
    engine: str,
    quick: bool,
) -> int:
    """Compare, print the tables, write report and plots; 1 if a cell failed, else 0."""
    options = Options(
        schedulers=_names(schedulers),
        scenarios=_scenario_names(scenarios),
        out=Path(out),
        reference=reference,
        num_seeds=seeds,
        jobs=jobs or os.cpu_count() or 1,
        engine=engine,
        is_quick=quick,
        trace=None if trace is None else Path(trace),
    )
    results = compare(options)
    chosen = results.metadata["reference"]
    if not reference and results.metadata["schedulers"][chosen]["kind"] != USUAL_REFERENCE:
        print(f"Reference: {chosen}, the first of --schedulers, for want of {USUAL_REFERENCE}; see --reference")
    present(results)
    return 1 if results.failures else 0


def present(results: Results) -> None:
    """The tables in the terminal, and the files that show the same."""
    comparison = compare_cells(results.cells, results.metadata["reference"])
    print_tables(results, comparison=comparison)
    report, plots = results.directory / REPORT, results.directory / PLOTS
    write_report(results, report, comparison)
    write_plots(results, plots, comparison)
    Console().print(f"\nreport {report}, plots {plots}, data {results.write_table()}", soft_wrap=True, highlight=False)


def capacity_command(scenarios: str, jobs: int) -> int:
    """Find capacities and print them as they stand in the scenario files."""
    names = _scenario_names(scenarios)
    for name in names:
        if not read_scenario(name).lengths:
            raise ScenarioError(f"scenario {name!r} has no capacity of its own: it depends on the trace")
    failed = False
    for name, found in in_parallel(_capacity_of, names, jobs=jobs or os.cpu_count() or 1, title="scenarios"):
        if isinstance(found, Capacity):
            print(f"{name}: {yaml.safe_dump({'capacity': dataclasses.asdict(found)}, default_flow_style=True).strip()}")
        else:
            failed = True
            print(f"{name}: {found!r}")
    return 1 if failed else 0


def scenario_command(name: str | None, scheduler: str, seed: int) -> int:
    """List the scenarios, or print the plain command of Vidur that simulates one."""
    if name is None:
        for known in scenario_names():
            scenario = load_scenario(known)
            Console().print(f"{known:<15}{scenario.num_replicas:>3} replicas  {scenario.why}", highlight=False)
        return 0
    scenario, (spec,) = read_scenario(name), parse_schedulers([scheduler])
    if not scenario.lengths:
        raise ScenarioError(f"scenario {name!r} replays a trace: only `vidur-ppo compare --trace FILE` can run it")
    require_capacity(scenario, name)
    print(shlex.join(["python", "-m", "vidur.main", *vidur_arguments(scenario, spec, seed)]))
    return 0


def _capacity_of(name: str) -> Capacity:
    return find_capacity(find_scenario(name), engine=TWIN)


def _scenario_names(text: str) -> list[str]:
    return _names(text) or [name for name in scenario_names() if name != REPLAY]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
