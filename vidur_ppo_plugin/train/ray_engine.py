"""Workers as Ray actors, on the machines of a Ray cluster. Which machine does a job changes nothing in its result."""

import logging
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from .clusters import Cluster
from .config import TrainConfig
from .engines import MAX_DEATHS, WorkerError
from .schema import ConfigError
from .worker import Job, Worker

logger = logging.getLogger(__name__)

# How long a replacement may take to find a place: a cluster that has lost a machine may have none left.
_PLACE_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 10.0


class RayEngine:
    """An actor for each worker: job i is done by actor i modulo their number, or by another if that one is lost."""

    def __init__(
        self,
        config: TrainConfig,
        clusters: dict[str, Cluster],
        *,
        workers: int,
        address: str = "",
        place_timeout_s: float = _PLACE_TIMEOUT_S,
    ) -> None:
        """`address`: of a running cluster; without one, a local cluster is started and ended with this engine."""
        self._has_started_ray = not ray.is_initialized()
        if self._has_started_ray:
            connect(address)
        # Threads: as in `engines`.
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        self._actor_class: Any = ray.remote(num_cpus=1, runtime_env=environment)(Worker)
        self._setup = ray.put(config), ray.put(clusters)
        self._place_timeout_s = place_timeout_s
        self._actors: list[Any] = [self._actor_class.remote(*self._setup) for _ in range(workers)]
        #: Actors that had to be replaced so far.
        self.num_replaced = 0

    def run(self, jobs: Sequence[Job], weights: Any) -> list[Any]:
        """The results of the jobs, in their order."""
        sent = ray.put(weights)  # once, whatever the number of workers
        size = len(self._actors)
        references = [self._actors[index % size].run.remote(job, sent) for index, job in enumerate(jobs)]
        return [self._finish(index % size, reference, jobs[index], sent) for index, reference in enumerate(references)]

    def _finish(self, number: int, reference: Any, job: Job, sent: Any) -> Any:
        actor = self._actors[number]
        for _ in range(MAX_DEATHS):
            try:
                return ray.get(reference)
            except RayTaskError as error:
                raise WorkerError(f"a worker failed:\n{error}") from error
            except RayActorError:
                # Another of its jobs may have found that out already.
                if self._actors[number] is actor:
                    logger.warning("worker %d is lost: another one does its open rollout again", number)
                    self._replace(number)
                actor = self._actors[number]
                reference = actor.run.remote(job, sent)
        raise WorkerError(f"worker {number} died {MAX_DEATHS} times over one job; is there enough memory?")

    def _replace(self, number: int) -> None:
        """A new actor, or one of the others where there is no room for a new one."""
        self.num_replaced += 1
        lost, actor = self._actors[number], self._actor_class.remote(*self._setup)
        ready, _ = ray.wait([actor.__ray_ready__.remote()], timeout=self._place_timeout_s)
        if not ready:
            ray.kill(actor)
            others = [other for other in self._actors if other is not lost]
            if not others:
                raise WorkerError("the Ray cluster has no CPU left for a worker")
            actor = others[number % len(others)]
            logger.warning("the Ray cluster has no room for a new worker: the others do its work")
        self._actors[number] = actor

    def close(self) -> None:
        """Stop all workers; a second call does nothing."""
        for actor in set(self._actors):
            ray.kill(actor)
        self._actors = []
        if self._has_started_ray:
            ray.shutdown()
            self._has_started_ray = False


def connect(address: str) -> None:
    """Connect to a Ray cluster, or start one on this machine; ConfigError if there is none at the address."""
    try:
        _check_reachable(address)
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--address {address}: no Ray cluster can be reached there: {error}") from error


def _check_reachable(address: str) -> None:
    """OSError if nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
