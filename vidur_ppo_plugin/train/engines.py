"""Who does the jobs: worker processes of this machine. Results come in the order of the jobs, whoever did them."""

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from .clusters import Cluster
from .config import TrainConfig
from .worker import Job, Worker

logger = logging.getLogger(__name__)

#: A worker that dies this often over one job dies because of it.
MAX_DEATHS = 3
_STOP_TIMEOUT_S = 5.0


class WorkerError(RuntimeError):
    """A job failed, or its workers died again and again."""


class Engine(Protocol):
    """Does jobs in parallel."""

    def run(self, jobs: Sequence[Job], weights: Any) -> list[Any]:
        """The results of the jobs, in their order. A worker that dies is replaced, and its job done again."""

    def close(self) -> None:
        """Stop all workers; a second call does nothing."""


class InProcessEngine:
    """No other process: jobs are done one after the other, here."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
        self._worker = Worker(config, clusters)

    def run(self, jobs: Sequence[Job], weights: Any) -> list[Any]:
        """The results of the jobs, in their order."""
        return [self._worker.run(job, weights) for job in jobs]

    def close(self) -> None:
        """Do nothing: there are no workers."""


class LocalEngine:
    """Worker processes on this machine, started afresh (spawn): job i is done by worker i modulo their number."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster], *, workers: int) -> None:
        self._setup = config, clusters
        self._workers = [_LocalWorker(*self._setup) for _ in range(workers)]
        #: Workers that had to be replaced so far.
        self.num_replaced = 0

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process_id for worker in self._workers]

    def run(self, jobs: Sequence[Job], weights: Any) -> list[Any]:
        """The results of the jobs, in their order."""
        results: list[Any] = [None] * len(jobs)
        size = len(self._workers)
        for first in range(0, len(jobs), size):
            batch = range(first, min(first + size, len(jobs)))
            for index in batch:
                with contextlib.suppress(OSError):  # it is dead: `_finish` finds out and replaces it
                    self._workers[index % size].send(jobs[index], weights)
            for index in batch:
                results[index] = self._finish(index % size, jobs[index], weights)
        return results

    def _finish(self, number: int, job: Job, weights: Any) -> Any:
        for _ in range(MAX_DEATHS):
            try:
                return self._workers[number].receive()
            except (EOFError, OSError):
                logger.warning("worker %d died: a new one does its open rollout again", number)
                self._workers[number].stop()
                self._workers[number] = _LocalWorker(*self._setup)
                self.num_replaced += 1
                self._workers[number].send(job, weights)
        raise WorkerError(f"worker {number} died {MAX_DEATHS} times over one job; is there enough memory?")

    def close(self) -> None:
        """Stop all workers; a second call does nothing."""
        for worker in self._workers:
            worker.stop()
        self._workers = []


class _LocalWorker:
    """A worker process, and the pipe to it."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, config, clusters), daemon=True)
        with _single_threaded():
            self._process.start()
        other_end.close()  # or the death of the worker would not be seen

    @property
    def process_id(self) -> int:
        """Process id of the worker."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, job: Job, weights: Any) -> None:
        self._line.send((job, weights))

    def receive(self) -> Any:
        """The result of the job."""
        failure, result = self._line.recv()
        if failure:
            raise WorkerError(f"a worker failed:\n{failure}")
        return result

    def stop(self) -> None:
        self._line.close()  # the worker then ends by itself
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def _single_threaded() -> Any:
    """One thread for each worker: more threads than cores make numpy slower, not faster."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _serve(line: Connection, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
    """Do jobs in a worker process until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the learner decides what it means
    worker = Worker(config, clusters)
    while True:
        try:
            job, weights = line.recv()
        except (EOFError, OSError):
            return
        try:
            answer = "", worker.run(job, weights)
        except Exception:  # whatever a job raises is its result; the learner shows it and stops
            answer = traceback.format_exc(), None
        try:
            line.send(answer)
        except OSError:
            return
