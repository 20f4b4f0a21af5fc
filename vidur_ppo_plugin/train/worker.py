"""What runs in a worker: rollouts of streams, and evaluations. It knows neither how it was started nor who asks."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.envs.settings import changed, find_scenario
from vidur_ppo_plugin.learn.parameters import Coefficients, PPOParameters
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.play import play

from .clusters import Cluster
from .config import TrainConfig
from .episodes import Episode
from .observing import GreedyPolicy, Weights, build_actor
from .slots import Experience, Exploration, Slot

#: The name under which the learned policy is evaluated.
POLICY = "policy"


@dataclass(frozen=True)
class SlotTask:
    """A slot to go on with: its episode, and the decisions that were made in it so far, [decisions, clusters]."""

    episode: Episode
    actions: NDArray[np.int16]


@dataclass(frozen=True)
class CollectJob:
    """A rollout of some slots. The result follows from the job and the weights alone, whoever does it."""

    iteration: int
    exploration: Exploration
    tasks: Sequence[SlotTask]


@dataclass(frozen=True)
class EvaluateJob:
    """A run of a scenario's held-out requests with a router."""

    scenario: str
    router: str
    seed: int
    num_requests: int
    #: What the policy is asked for; routers do not know it.
    tail_preference: float = 0.5


@dataclass(frozen=True)
class GradientJob:
    """The gradient of the policy's loss on some decisions; the parameters of the network come as one vector."""

    #: Parameters of an update, and the shape of the network.
    learner: tuple[PPOParameters, Any]
    #: Decisions by their number of replicas: the arrays of `learn.batch.Group`.
    groups: Sequence[dict[str, NDArray[Any]]]
    coefficients: Coefficients
    #: Of these decisions in their minibatch.
    share: float


Job = CollectJob | EvaluateJob | GradientJob


class Worker:
    """Does jobs; keeps the slots that it ran last, so that it need not repeat their episodes."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
        self._config = config
        self._flags = config.flags
        self._clusters = clusters
        self._slots: dict[int, Slot] = {}
        self._gradients: Any = None
        # Clusters with their speeds: they come with tables of batch times, which fill up.
        self._sized: dict[tuple[str, tuple[float, ...]], Cluster] = {}

    def run(self, job: Job, weights: Any) -> Any:
        """A list of `Experience`s, the metrics of an evaluation, or a gradient; `weights` are those of the policy."""
        if isinstance(job, GradientJob):
            return self._gradient(job, weights)
        if isinstance(job, CollectJob):
            assert weights is not None
            return self._collect(job, weights)
        return self._evaluate(job, weights)

    def _collect(self, job: CollectJob, weights: Weights) -> list[Experience]:
        actor, steps = build_actor(weights), self._flags.rollout_len
        experiences = []
        for task in job.tasks:
            slot = self._slot(task)
            rng = np.random.default_rng([self._config.seed, task.episode.slot, job.iteration, 1])
            uniforms = rng.random((steps, task.episode.num_clusters, 2))
            experiences.append(slot.collect(actor, job.exploration, uniforms))
        return experiences

    def _gradient(self, job: GradientJob, vector: Any) -> Any:
        from .gradients import GradientWorker  # imports torch, which rollouts do without

        if self._gradients is None:
            self._gradients = GradientWorker(*job.learner)
        return self._gradients.compute(job, vector)

    def _slot(self, task: SlotTask) -> Slot:
        """The slot where the task has it: the one that is there, or a new one that repeats the decisions."""
        number = task.episode.slot
        slot = self._slots.get(number)
        if slot is None or slot.episode != task.episode or slot.num_decisions != len(task.actions):
            slot = Slot(self._config, task.episode, self._cluster(task.episode))
            slot.replay(task.actions)
            self._slots[number] = slot
        return slot

    def _cluster(self, episode: Episode) -> Cluster:
        key = episode.scenario, episode.speed_factors
        if key not in self._sized:
            self._sized[key] = self._clusters[episode.scenario].with_speeds(episode.speed_factors)
        return self._sized[key]

    def _evaluate(self, job: EvaluateJob, weights: Weights | None) -> dict[str, float]:
        scenario, cluster = changed(find_scenario(job.scenario)), self._clusters[job.scenario]
        requests = scenario.requests(job.seed, job.num_requests)
        if job.router == POLICY:
            assert weights is not None
            flags = dataclasses.replace(self._flags, tail_preference=job.tail_preference)
            router: Any = GreedyPolicy(build_actor(weights), flags, cluster.delay_model)
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
