"""What runs in a worker: rollouts of streams, and evaluations. It knows neither how it was started nor who asks."""

import dataclasses
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vidur_ppo_plugin.envs.settings import changed
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.learn.features import build_features, build_prior
from vidur_ppo_plugin.learn.parameters import Coefficients
from vidur_ppo_plugin.policy.actor import Actor, Weights
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.cluster import play

from .clusters import Cluster
from .config import TrainConfig, scenario_of
from .episodes import Episode
from .slots import CompletedRequests, Exploration, Slot, rollouts_of

if TYPE_CHECKING:
    from vidur_ppo_plugin.learn.batch import Contents, Minibatch, Normalisation, Statistics, Summary
    from vidur_ppo_plugin.learn.shard import Shard

    from .gradients import PartGradient, ShardLearner

#: The name under which the learned policy is evaluated.
POLICY = "policy"


@dataclass(frozen=True)
class SlotTask:
    """A slot to go on with: its episode, and the decisions that were made in it so far, [clusters, decisions]."""

    episode: Episode
    actions: NDArray[np.int16]
    #: Whether its episode ends with the rollout.
    is_last: bool


@dataclass(frozen=True)
class CollectJob:
    """A rollout of some slots; its decisions stay with the worker. The result follows from job and weights alone."""

    iteration: int
    exploration: Exploration
    tasks: Sequence[SlotTask]
    #: What `kl_ref_coef` pulls to; None for the prior.
    reference: Weights | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """Tells rollouts apart."""
        return self.iteration, *(task.episode.slot for task in self.tasks)


@dataclass(frozen=True)
class CollectResult:
    """What was decided and served in each slot, and what the worker keeps to learn from."""

    actions: Sequence[NDArray[np.int16]]
    served: Sequence[CompletedRequests]
    contents: "Contents"


@dataclass(frozen=True)
class EvaluateJob:
    """A run of a scenario's held-out requests with a router."""

    scenario: str
    router: str
    seed: int
    num_requests: int
    #: What the policy is asked for; routers do not know it.
    tail_preference: float = BALANCED


@dataclass(frozen=True)
class PrepareJob:
    """`Shard.prepare` of the decisions that a job collected."""

    #: `CollectJob.key` of what it is about.
    key: tuple[int, ...]
    statistics: "Statistics"


@dataclass(frozen=True)
class GradientJob:
    """The gradient of the loss on some of the decisions that a job collected; None without any."""

    key: tuple[int, ...]
    minibatch: "Minibatch"
    normalisation: "Normalisation"
    coefficients: Coefficients


Job = CollectJob | EvaluateJob | PrepareJob | GradientJob
#: From a worker that does not have the decisions: it took the place of another, and they have to be collected again.
LOST = "lost"


def _use_one_thread() -> None:
    """For linear algebra: its last bits depend on the number of threads, and workers want one core each."""
    importlib.import_module(
        "scipy.linalg.cython_blas"
    )  # compiled code multiplies with it; only what is there is limited
    threadpool_limits(1)


class Worker:
    """Does jobs; keeps the slots that it ran last, so that it need not repeat their episodes."""

    def __init__(self, config: TrainConfig, clusters: dict[str, Cluster]) -> None:
        _use_one_thread()
        self._config = config
        self._flags = config.flags
        self._clusters = clusters
        self._slots: dict[int, Slot] = {}
        self._learner: ShardLearner | None = None
        self._shards: dict[tuple[int, ...], Shard] = {}
        # Clusters with their speeds: they come with tables of batch times, which fill up.
        self._sized: dict[tuple[str, tuple[float, ...]], Cluster] = {}

    def run(self, job: Job, weights: Any) -> Any:
        """A `CollectResult`, `Summary`, gradient or metrics of an evaluation; `weights`: of the policy."""
        if isinstance(job, CollectJob):
            return self._collect(job, weights)
        if isinstance(job, PrepareJob):
            return self._prepare(job, weights)
        if isinstance(job, GradientJob):
            return self._gradient(job, weights)
        return self._evaluate(job, weights)

    def _collect(self, job: CollectJob, weights: Weights) -> CollectResult:
        actor, steps = Actor(*weights), self._flags.rollout_len
        experiences, rollouts = [], []
        for task in job.tasks:
            slot = self._slot(task, actor)
            rng = np.random.default_rng([self._config.seed, task.episode.slot, job.iteration, 1])
            uniforms = rng.random((task.episode.num_clusters, steps, 2))
            experience = slot.collect(actor, job.exploration, uniforms, rng)
            experiences.append(experience)
            first_stream = task.episode.slot * self._config.clusters_in_step
            rollouts += rollouts_of(experience, job.exploration, first_stream, is_last=task.is_last)
        for key in [key for key in self._shards if key[0] < job.iteration]:
            del self._shards[key]
        shard = self._shard_learner(weights).shard(rollouts, weights, job.reference)
        self._shards[job.key] = shard
        return CollectResult(
            actions=[experience.actions.astype(np.int16) for experience in experiences],
            served=[experience.served for experience in experiences],
            contents=shard.contents,
        )

    def _shard_learner(self, weights: Weights) -> "ShardLearner":
        from .gradients import ShardLearner  # imports torch, which rollouts and evaluations do without

        if self._learner is None:
            self._learner = ShardLearner(self._config, weights[1])
        return self._learner

    def _prepare(self, job: PrepareJob, weights: Weights) -> "Summary | str":
        if job.key not in self._shards:
            return LOST
        return self._shard_learner(weights).prepare(self._shards[job.key], job.statistics, weights)

    def _gradient(self, job: GradientJob, weights: Weights) -> "PartGradient | str | None":
        if job.key not in self._shards:
            return LOST
        if len(job.minibatch) == 0:
            return None
        shard = self._shards[job.key]
        return self._shard_learner(weights).gradient(shard, job.minibatch, job.normalisation, job.coefficients, weights)

    def _slot(self, task: SlotTask, actor: Actor) -> Slot:
        """The slot where the task has it: the one that is there, or a new one that repeats the decisions."""
        number = task.episode.slot
        slot = self._slots.get(number)
        if slot is None or slot.episode != task.episode or slot.num_decisions != task.actions.shape[1]:
            slot = Slot(self._config, task.episode, self._cluster(task.episode))
            slot.replay(actor, task.actions)
            self._slots[number] = slot
        return slot

    def _cluster(self, episode: Episode) -> Cluster:
        key = episode.scenario, episode.speed_factors
        if key not in self._sized:
            self._sized[key] = self._clusters[episode.scenario].with_speeds(episode.speed_factors)
        return self._sized[key]

    def _evaluate(self, job: EvaluateJob, weights: Weights | None) -> dict[str, float]:
        scenario, cluster = changed(scenario_of(job.scenario)), self._clusters[job.scenario]
        requests = scenario.requests(job.seed, job.num_requests)
        if job.router == POLICY:
            assert weights is not None
            flags = dataclasses.replace(self._flags, tail_preference=job.tail_preference)
            prior = build_prior(flags, cluster.delay_model)
            router: Any = Policy(Actor(*weights), build_features(flags), prior, random.Random(flags.seed))
        else:
            router = build_router(job.router, seed=job.seed, delay_model=cluster.delay_model)
        visibility = Visibility(report_delay_s=scenario.report_delay_s, drains=scenario.drains(requests))
        if cluster.twin is None:
            from .vidur_clusters import play_in_vidur  # imports Vidur, which takes seconds

            vidur_flags = scenario.vidur_flags(job.seed, job.num_requests)
            slots = self._flags.max_queue_requests_per_replica
            done = play_in_vidur(vidur_flags, router, visibility=visibility, num_waiting_slots=slots)
        else:
            slots = self._flags.max_queue_requests_per_replica if job.router == POLICY else 0
            done = play(cluster.twin, requests, router, visibility=visibility, num_waiting_slots=slots)
        kept = slice(int(scenario.warm_up_fraction * len(requests)), None)
        e2e_s = (done.completed_at_s - requests.arrived_at_s)[kept]
        ttft_s = (done.first_token_at_s - requests.arrived_at_s)[kept]
        return {
            "e2e_mean": float(e2e_s.mean()),
            "e2e_p99": float(np.percentile(e2e_s, 99)),
            "ttft_mean": float(ttft_s.mean()),
            "ttft_p99": float(np.percentile(ttft_s, 99)),
        }
