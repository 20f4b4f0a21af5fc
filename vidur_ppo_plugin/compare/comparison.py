"""`vidur-ppo compare` from the options of the command line to the files of a results directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vidur_ppo_plugin.scenario import REPLAY, Scenario, ScenarioError, TraceWindows
from vidur_ppo_plugin.workload.trace import read_trace

from .capacity import find_capacity
from .results import METADATA, Cell, Results, to_json, write_atomically
from .runner import Task, in_parallel, run_tasks
from .scenarios import read_scenarios, require_capacity
from .schedulers import TUNED, SchedulerError, SchedulerSpec, check_fits, parse_schedulers
from .seeds import CAPACITY, COMPARISON, TUNING
from .setup import Setup
from .tuning import mean_latency_s, trials

NUM_TUNING_SEEDS = 2
#: What schedulers are compared with unless `--reference` says otherwise, if it is one of them.
USUAL_REFERENCE = "round_robin"
#: Of a quick comparison: one seed, and this share of the requests.
QUICK_SHARE = 0.2
# A window of a trace with fewer requests has no percentiles worth the name.
_FEWEST_WINDOW_REQUESTS = 100
_TUNED_KEY = "tuned"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    schedulers: list[str]
    scenarios: list[str]
    out: Path
    num_seeds: int
    jobs: int
    engine: str
    #: Empty: round_robin if it is compared, else the first scheduler.
    reference: str = ""
    is_quick: bool = False
    trace: Path | None = None


def compare(options: Options) -> Results:
    """Run what is not finished yet; the results, of which some cells may have failed."""
    setup = plan(options)
    results = setup.open(options.out)
    tuned = _tuned(setup, results, jobs=options.jobs)
    by_name = {scenario.name: scenario for scenario in setup.scenarios}
    specs = {spec.label: spec for spec in setup.schedulers}

    def task(cell: Cell) -> Task:
        spec = specs[cell.scheduler]
        if spec.kind == TUNED:
            spec = spec.with_options(**tuned[cell.scenario])
        return Task(options.out, cell, by_name[cell.scenario], spec, setup.engine)

    run_tasks([task(cell) for cell in results.planned if not results.is_finished(cell)], jobs=options.jobs)
    results.write_table()
    return results


def plan(options: Options) -> Setup:
    """Check everything that can be checked before anything runs or is written."""
    schedulers = parse_schedulers(options.schedulers)
    reference = _reference(options.reference, schedulers)
    seeds = list(COMPARISON[: 1 if options.is_quick else options.num_seeds])
    given = zip(options.scenarios, read_scenarios(options.scenarios), strict=True)
    scenarios = [_prepare(scenario, text, options, len(seeds)) for text, scenario in given]
    for scenario in scenarios:
        for spec in schedulers:
            check_fits(spec, scenario.name, scenario.num_replicas)
    return Setup(
        scenarios=scenarios,
        schedulers=schedulers,
        seeds=seeds,
        reference=reference,
        engine=options.engine,
        is_quick=options.is_quick,
    )


def _reference(label: str, schedulers: Sequence[SchedulerSpec]) -> str:
    """The scheduler that the others are compared with."""
    labels = [spec.label for spec in schedulers]
    if not labels:
        raise SchedulerError(f"--schedulers must name at least one, such as --schedulers {USUAL_REFERENCE}")
    if not label:
        return next((spec.label for spec in schedulers if spec.kind == USUAL_REFERENCE), labels[0])
    if label not in labels:
        raise SchedulerError(f"--reference {label!r} must be one of the schedulers compared: {', '.join(labels)}")
    return label


def _prepare(scenario: Scenario, text: str, options: Options, num_seeds: int) -> Scenario:
    """The scenario as it will run: shorter if quick, with the windows of the trace if it replays one."""
    if options.is_quick:
        scenario = scenario.at(num_requests=int(QUICK_SHARE * scenario.num_requests))
    if scenario.name != REPLAY:
        require_capacity(scenario, text)
        return scenario
    if options.trace is None:
        raise ScenarioError(f"scenario {REPLAY!r} needs --trace FILE, a CSV of arrival times and lengths")
    return _replayed(scenario, options.trace.resolve(), num_seeds, options)


def _replayed(scenario: Scenario, path: Path, num_seeds: int, options: Options) -> Scenario:
    """Cut the trace into windows, find the capacity for its lengths, and scale its time to the load."""
    trace = read_trace(path)
    seeds = [*COMPARISON[:num_seeds], *TUNING[:NUM_TUNING_SEEDS]]
    size = min(scenario.num_requests, len(trace) // len(seeds))
    if size < _FEWEST_WINDOW_REQUESTS:
        raise ScenarioError(
            f"--trace {path}: {len(trace)} requests are too few for {len(seeds)} windows ({num_seeds} seeds and "
            f"{NUM_TUNING_SEEDS} for tuning) of at least {_FEWEST_WINDOW_REQUESTS}; lower --seeds"
        )
    windows = {seed: index for index, seed in enumerate(seeds)}
    whole = TraceWindows(path, len(trace), {CAPACITY[0]: 0}, trace.rate_qps)
    capacity = find_capacity(
        scenario.at(num_requests=len(trace), trace=whole), engine=options.engine, seeds=CAPACITY[:1]
    )
    cut = TraceWindows(path, size, windows, trace.rate_qps)
    return scenario.at(num_requests=size, capacity=capacity, trace=cut)


def _tuned(setup: Setup, results: Results, *, jobs: int) -> dict[str, dict[str, Any]]:
    """The options of `size_split` in each scenario, found once and kept in the metadata."""
    known: dict[str, dict[str, Any]] = results.metadata.get(_TUNED_KEY, {})
    if known or not any(spec.kind == TUNED for spec in setup.schedulers):
        return known
    seeds = tuple(TUNING[: 1 if setup.is_quick else NUM_TUNING_SEEDS])
    tasks = [trial for scenario in setup.scenarios for trial in trials(scenario, seeds=seeds, engine=setup.engine)]
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    # In the order of the trials, so that equal results do not depend on who was first.
    outcomes = {id(trial): outcome for trial, outcome in in_parallel(mean_latency_s, tasks, jobs=jobs, title="tuning")}
    for trial in tasks:
        outcome = outcomes[id(trial)]
        if isinstance(outcome, BaseException):
            raise SchedulerError(f"{TUNED} cannot be tuned in {trial.scenario.name!r}: {outcome}") from outcome
        if trial.scenario.name not in best or outcome < best[trial.scenario.name][0]:
            best[trial.scenario.name] = (outcome, trial.options)
    known = {name: options for name, (_, options) in best.items()}
    results.metadata[_TUNED_KEY] = known
    write_atomically(results.directory / METADATA, to_json(results.metadata))
    return known
