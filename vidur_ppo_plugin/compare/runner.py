"""Runs the cells of a comparison in parallel processes, and continues where an earlier run stopped.

Each process writes its finished cells into the results directory itself, so a killed run loses only what it was busy
with. A cell that fails leaves its traceback, and the others go on.
"""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vidur_ppo_plugin.scenario import Scenario

from .engines import run_cell
from .results import Cell, Results
from .schedulers import SchedulerSpec

Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """A cell with all that another process needs to run it."""

    directory: Path
    cell: Cell
    scenario: Scenario
    scheduler: SchedulerSpec
    engine: str


def run_tasks(tasks: Sequence[Task], *, jobs: int) -> None:
    """Run cells; what failed is in the results directory."""
    for task, failure in in_parallel(run_task, tasks, jobs=jobs, title="cells"):
        if isinstance(failure, BaseException):  # the process died: it could not write that down itself
            Results(task.directory).write_failure(task.cell, f"{type(failure).__name__}: {failure}")


def run_task(task: Task) -> None:
    """Run one cell and write what came of it; errors are written, not raised."""
    results = Results(task.directory)
    try:
        run = run_cell(task.scenario, task.scheduler, task.cell.seed, engine=task.engine)
        results.write_cell(task.cell, run.metrics(task.scenario), run.requests)
    except Exception:  # whatever a simulation raises is the outcome of this cell
        results.write_failure(task.cell, traceback.format_exc())


def in_parallel(
    function: Callable[[Any], Result], tasks: Sequence[Any], *, jobs: int, title: str
) -> Iterable[tuple[Any, Result | BaseException]]:
    """(task, result or exception) of each task, as they finish, in `jobs` new processes with a progress bar."""
    if not tasks:
        return
    # One thread for each process: more threads than cores make numpy and torch slower, not faster.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_end_with_parent)
    with _progress() as bar, pool:
        shown = bar.add_task(title, total=len(tasks))
        futures: dict[Future[Result], Any] = {pool.submit(function, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], _outcome(future)
                bar.advance(shown)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """In a worker: end when the parent dies, however it dies. A pool's workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _outcome(future: "Future[Any]") -> Any:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return RuntimeError("the process that ran this died (out of memory?); run again to continue")
    return error if error is not None else future.result()


def _progress() -> Progress:
    """A progress bar on standard error, only where that is a terminal."""
    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
