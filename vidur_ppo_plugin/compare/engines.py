"""Runs one cell: the requests of a scenario's seed through a scheduler, in Vidur or in its twin, to the same result."""

import contextlib
import io
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.clusters.drive import drive
from vidur_ppo_plugin.flags import format_drains
from vidur_ppo_plugin.routing.routers import STOCK, Router
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Completions
from vidur_ppo_plugin.workload.requests import Requests

from .metrics import REQUEST_COLUMNS, cell_metrics
from .oracle import Oracle
from .scheduler_router import build_scheduler_router
from .schedulers import ORACLE, SchedulerSpec

VIDUR, TWIN = "vidur", "twin"
ENGINES = (TWIN, VIDUR)

#: A comparison needs nothing of what Vidur writes.
_QUIET: dict[str, Any] = {
    "metrics_config_write_metrics": False,
    "metrics_config_store_plots": False,
    "metrics_config_enable_chrome_trace": False,
}


class EngineError(ValueError):
    """A cell that an engine cannot run; the message says which could."""


@dataclass(frozen=True)
class CellRun:
    """What happened in a cell."""

    #: A row for each request, in order of arrival, with the columns of `metrics.REQUEST_COLUMNS`.
    requests: pd.DataFrame
    #: Mean wall-clock time of a decision.
    decision_us: float

    def metrics(self, scenario: Scenario) -> dict[str, float]:
        """The metrics of the cell."""
        return cell_metrics(
            self.requests,
            num_replicas=scenario.num_replicas,
            slo=scenario.slo,
            class_boundary_tokens=scenario.class_boundary_tokens,
            decision_us=self.decision_us,
        )


def run_cell(scenario: Scenario, scheduler: SchedulerSpec, seed: int, *, engine: str) -> CellRun:
    """Simulate; a scheduler that learns on the way runs in Vidur, whichever the engine."""
    if engine == VIDUR or scheduler.is_learning:
        return _run_in_vidur(scenario, scheduler, seed)
    return _run_in_twin(scenario, scheduler, seed)


def cell_flags(scenario: Scenario, scheduler: SchedulerSpec, seed: int) -> dict[str, Any]:
    """The flags with which `python -m vidur.main` simulates the same cell."""
    hidden: dict[str, Any] = {}
    # Vidur's own schedulers have no such flags: see `_run_in_vidur`.
    if scenario.report_delay_s and scheduler.kind not in STOCK:
        hidden["report_delay_s"] = scenario.report_delay_s
    if scenario.drained and scheduler.kind not in STOCK:
        hidden["drained"] = format_drains(scenario.drains(scenario.requests(seed)))
    return {**scenario.vidur_flags(seed), **scheduler.vidur_flags(seed, **hidden)}


def vidur_arguments(scenario: Scenario, scheduler: SchedulerSpec, seed: int) -> list[str]:
    """`cell_flags` as arguments; EngineError where plain Vidur cannot do what a cell does."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    if scheduler.kind == ORACLE:
        raise EngineError(f"{scheduler.label} is not a scheduler of `python -m vidur.main`")
    if scheduler.kind in STOCK and (scenario.report_delay_s or scenario.drained):
        raise EngineError(
            f"{scheduler.label} is Vidur's own and has no flags for old reports or drained replicas, "
            f"which scenario {scenario.name!r} needs"
        )
    _autoload.install()
    return to_arguments(cell_flags(scenario, scheduler, seed), known_flags())


def _run_in_vidur(scenario: Scenario, scheduler: SchedulerSpec, seed: int) -> CellRun:
    from vidur_ppo_plugin.sim.launch import run
    from vidur_ppo_plugin.sim.schedulers import replace_router

    if scheduler.kind == ORACLE:
        raise EngineError(f"{scheduler.label} forward-simulates in the twin: it needs --engine twin")
    visibility = _visibility(scenario, scenario.requests(seed))

    def replace_stock_scheduler(simulator: Any, config: Any) -> None:
        replace_router(simulator, config, build_scheduler_router(scheduler, config, seed=seed)[0], visibility)

    # Vidur's own look at the replicas themselves and know no drained ones: their routers take their place.
    prepare = None if visibility.is_clear or scheduler.kind not in STOCK else replace_stock_scheduler
    with _simulation(cell_flags(scenario, scheduler, seed)) as arguments:
        outcome = run(arguments, prepare)
    columns = [name for name in REQUEST_COLUMNS if name != "is_warm_up"]
    rows = [tuple(getattr(request, name) for name in columns) for request in outcome.requests]
    table = pd.DataFrame(rows, columns=columns)
    return CellRun(mark_warm_up(table, scenario), 1e6 * outcome.decision_s / len(rows))


def _run_in_twin(scenario: Scenario, scheduler: SchedulerSpec, seed: int) -> CellRun:
    from vidur_ppo_plugin.sim.launch import parse
    from vidur_ppo_plugin.sim.twin_config import twin_config

    requests = scenario.requests(seed)
    kind = SchedulerSpec("", "round_robin") if scheduler.kind == ORACLE else scheduler
    with _simulation({**scenario.vidur_flags(seed), **kind.vidur_flags(seed)}) as arguments:
        config = parse(arguments)
        try:
            cluster = twin_config(config)
        except ValueError as error:
            raise EngineError(f"scenario {scenario.name!r}: {error}; use --engine vidur") from error
        done, deciding_s = play_in_twin(cluster, config, requests, scheduler, _visibility(scenario, requests), seed)
    table = pd.DataFrame(
        {
            "arrived_at_s": requests.arrived_at_s,
            "prompt_tokens": requests.prompt_tokens,
            "decode_tokens": requests.decode_tokens,
            "replica": done.replica,
            "scheduled_at_s": done.scheduled_at_s,
            "first_token_at_s": done.first_token_at_s,
            "completed_at_s": done.completed_at_s,
            "num_restarts": done.num_restarts,
        }
    )
    return CellRun(mark_warm_up(table, scenario), 1e6 * deciding_s / len(requests))


def play_in_twin(
    cluster: TwinConfig, config: Any, requests: Requests, scheduler: SchedulerSpec, visibility: Visibility, seed: int
) -> tuple[Completions, float]:
    """What happens to each request, in their order, and the seconds spent deciding; `config` is Vidur's."""
    from vidur_ppo_plugin.twin.cluster import TwinCluster

    router: Router
    if scheduler.kind == ORACLE:
        run = TwinCluster(cluster, requests)
        router = Oracle(run, seed=seed, **scheduler.options)
    else:
        router, num_waiting_slots = build_scheduler_router(scheduler, config, seed=seed)
        run = TwinCluster(cluster, requests, num_waiting_slots=num_waiting_slots)
    timed = _TimedRouter(router)
    drive(run, timed, visibility=visibility)
    return run.outcomes(), timed.total_s


def _visibility(scenario: Scenario, requests: Requests) -> Visibility:
    return Visibility(report_delay_s=scenario.report_delay_s, drains=scenario.drains(requests))


class _TimedRouter:
    """A router whose time is taken."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.total_s = 0.0

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> int:
        started_s = time.perf_counter()
        replica = self._router(seen, request)
        self.total_s += time.perf_counter() - started_s
        return replica


@contextlib.contextmanager
def _simulation(flags: Mapping[str, Any]) -> Iterator[list[str]]:
    """The arguments of a simulation that writes nothing that stays, and says nothing."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    _autoload.install()
    with quietly(to_arguments(flags, known_flags())) as arguments:
        yield arguments


@contextlib.contextmanager
def quietly(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Arguments of `vidur.main` with which it writes nothing that stays, and says nothing."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    with tempfile.TemporaryDirectory(prefix="vidur-ppo-compare-") as name, _silence():
        own = {
            **_QUIET,
            "metrics_config_output_dir": str(Path(name) / "output"),
            "roofline_execution_time_predictor_config_cache_dir": str(Path(name) / "cache"),
        }
        yield [*arguments, *to_arguments(own, known_flags())]


def mark_warm_up(requests: pd.DataFrame, scenario: Scenario) -> pd.DataFrame:
    """The table with its types and the first requests marked: the same ones for every scheduler."""
    counts = ("prompt_tokens", "decode_tokens", "replica", "num_restarts")
    kinds = {name: np.int64 if name in counts else np.float64 for name in requests.columns}
    num_warm_up = int(scenario.warm_up_fraction * len(requests))
    return requests.astype(kinds).assign(is_warm_up=np.arange(len(requests)) < num_warm_up)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Vidur logs much, and what learns shows its progress: neither is wanted from many processes at once."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            yield
    except SystemExit as stop:  # how a command line ends that is refused
        raise EngineError(errors.getvalue().strip() or f"Vidur ended with status {stop.code}") from stop
    finally:
        logging.disable(level)
