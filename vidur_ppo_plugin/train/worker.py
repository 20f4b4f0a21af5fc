"""What runs in a worker: rollouts of streams, and evaluations. It knows neither how it was started nor who asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.envs.settings import changed, find_scenario
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.play import play

from .clusters import Cluster
from .config import TrainConfig
from .episodes import Episode
from .observing import GreedyPolicy, Weights, build_actor
from .streams import Experience, Exploration, Stream

#: The name under which the learned policy is evaluated.
POLICY = "policy"


@dataclass(frozen=True)
class StreamTask:
    """A stream to go on with: its episode, and the decisions that were made in it so far."""

    episode: Episode
    actions: NDArray[np.int16]


@dataclass(frozen=True)
class CollectJob:
    """A rollout of some streams. The result follows from the job and the weights alone, whoever does it."""

    iteration: int
    exploration: Exploration
    tasks: Sequence[StreamTask]


@dataclass(frozen=True)
class EvaluateJob:
    """A run of a scenario's held-out requests with a router."""

    scenario: str
    router: str
    seed: int
    num_requests: int


Job = CollectJob | EvaluateJob


class Worker:
    """Does jobs; keeps the streams that it ran last, so that it need not repeat their episodes."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
        self._config = config
        self._flags = config.flags
        self._clusters = clusters
        self._streams: dict[int, Stream] = {}

    def run(self, job: Job, weights: Weights | None) -> Any:
        """A list of `Experience`s, or the metrics of an evaluation."""
        if isinstance(job, CollectJob):
            assert weights is not None
            return self._collect(job, weights)
        return self._evaluate(job, weights)

    def _collect(self, job: CollectJob, weights: Weights) -> list[Experience]:
        actor, steps = build_actor(weights), self._flags.rollout_len
        experiences = []
        for task in job.tasks:
            stream = self._stream(task)
            rng = np.random.default_rng([self._config.seed, task.episode.stream, job.iteration, 1])
            experiences.append(stream.collect(actor, job.exploration, rng.random((steps, 2))))
        return experiences

    def _stream(self, task: StreamTask) -> Stream:
        """The stream where the task has it: the one that is there, or a new one that repeats the decisions."""
        number = task.episode.stream
        stream = self._streams.get(number)
        if stream is None or stream.episode != task.episode or stream.num_decisions != len(task.actions):
            stream = Stream(self._config, task.episode, self._clusters[task.episode.scenario])
            stream.replay(task.actions)
            self._streams[number] = stream
        return stream

    def _evaluate(self, job: EvaluateJob, weights: Weights | None) -> dict[str, float]:
        scenario, cluster = changed(find_scenario(job.scenario)), self._clusters[job.scenario]
        requests = scenario.requests(job.seed, job.num_requests)
        if job.router == POLICY:
            assert weights is not None
            router: Any = GreedyPolicy(build_actor(weights), self._flags, cluster.delay_model)
        else:
            router = build_router(job.router, seed=job.seed, delay_model=cluster.delay_model)
        visibility = Visibility(report_delay_s=scenario.report_delay_s, drains=scenario.drains(requests))

        def decide(snapshot: Any, request: Any) -> int:
            replica: int = router(visibility.view(snapshot), request)
            visibility.on_dispatch(replica, request.prompt_tokens)
            return replica

        slots = self._flags.max_queue_requests_per_replica if job.router == POLICY else 0
        done = play(cluster.twin, requests, decide, num_waiting_slots=slots)
        kept = slice(int(scenario.warm_up_fraction * len(requests)), None)
        e2e_s = (done.completed_at_s - requests.arrived_at_s)[kept]
        ttft_s = (done.first_token_at_s - requests.arrived_at_s)[kept]
        return {
            "e2e_mean": float(e2e_s.mean()),
            "e2e_p99": float(np.percentile(e2e_s, 99)),
            "ttft_mean": float(ttft_s.mean()),
            "ttft_p99": float(np.percentile(ttft_s, 99)),
        }
