"""An update from decisions that lie with workers: each computes the gradient on its own shard, and sums are made."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Parameter

from vidur_ppo_plugin.learn.batch import Contents, Minibatch, Normalisation, Statistics, Summary
from vidur_ppo_plugin.learn.parameters import Coefficients, ppo_parameters
from vidur_ppo_plugin.learn.ppo import PPO
from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.learn.shard import Shard
from vidur_ppo_plugin.policy.actor import Weights, actor_weights
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.features import Float32Array

from .config import TrainConfig
from .engines import Engine
from .worker import LOST, CollectJob, GradientJob, PrepareJob

#: The gradient of a part of a minibatch by the names of parameters; and the metrics.
PartGradient = tuple[dict[str, Float32Array], dict[str, float]]


@dataclass
class WorkerShards:
    """The decisions of an update, a shard for each job that collected them; `learn.batch.Shards` says what it does."""

    engine: Engine
    ppo: PPO
    jobs: Sequence[CollectJob]
    #: That the decisions were made with.
    weights: Weights
    contents: Sequence[Contents]

    def __post_init__(self) -> None:
        self._parameters = dict(self.ppo.network.named_parameters())
        self._learned = self._parameters if self.ppo.parameters.enable_critic else self.weights[0]
        self._preparing: tuple[list[PrepareJob], Weights] | None = None

    def prepare(self, statistics: Statistics) -> Sequence[Summary]:
        """Settle what is fixed during the update but for its normalisation."""
        self._preparing = [PrepareJob(job.key, statistics) for job in self.jobs], self._weights_now()
        summaries: list[Summary] = self._results(*self._preparing)
        return summaries

    def backward(
        self, minibatches: Sequence[Minibatch], normalisation: Normalisation, coefficients: Coefficients
    ) -> dict[str, float]:
        """Leave the sum of the shards' gradients in the network; returns the metrics."""
        jobs = [
            GradientJob(job.key, minibatch, normalisation, coefficients)
            for job, minibatch in zip(self.jobs, minibatches, strict=True)
        ]
        results: list[PartGradient | None] = self._results(jobs, self._weights_now())
        found = [result for result in results if result is not None]
        for name, parameter in self._parameters.items():
            parts = [gradient[name] for gradient, _ in found if name in gradient]
            parameter.grad = torch.tensor(sum(parts[1:], parts[0])) if parts else None
        metrics: dict[str, float] = {}
        for name, value in (pair for _, told in found for pair in told.items()):
            so_far = metrics.get(name, 0.0)
            metrics[name] = max(so_far, value) if name == "ratio_error" else so_far + value
        return metrics

    def _results(self, jobs: Sequence[PrepareJob | GradientJob], weights: Weights) -> list[Any]:
        results = self.engine.run(jobs, weights)
        if _is_lost(results):
            self.engine.run(self.jobs, self.weights)  # the same decisions again, by whoever is there now
            if self._preparing is not None:
                self.engine.run(*self._preparing)
            results = self.engine.run(jobs, weights)
        return results

    def _weights_now(self) -> Weights:
        return {name: self._parameters[name].detach().numpy().copy() for name in self._learned}, self.weights[1]


def _is_lost(results: Sequence[Any]) -> bool:
    return any(isinstance(result, str) and result == LOST for result in results)


class ShardLearner:
    """The worker's part: shards, with a network of its own that takes over the learner's weights."""

    def __init__(self, config: TrainConfig, shape: dict[str, int | bool]) -> None:
        torch.set_num_threads(1)
        self._network = ActorCritic(NetworkShape(**shape))  # type: ignore[arg-type]
        self._weights = dict(self._network.named_parameters())
        self._parameters = replace(ppo_parameters(config.flags), enable_critic=config.enable_critic)

    def shard(self, rollouts: Sequence[Rollout], weights: Weights, reference: Weights | None) -> Shard:
        """A shard of rollouts that were made with these weights."""
        other = None
        if reference is not None:
            other = ActorCritic(self._network.shape)
            _load(dict(other.named_parameters()), reference)
        _load(self._weights, weights)
        return Shard(rollouts, self._network, other, self._parameters)

    def prepare(self, shard: Shard, statistics: Statistics, weights: Weights) -> Summary:
        """Compute advantages and returns of a shard; `weights` are those that its decisions were made with."""
        _load(self._weights, weights)
        return shard.prepare(statistics)

    def gradient(
        self,
        shard: Shard,
        minibatch: Minibatch,
        normalisation: Normalisation,
        coefficients: Coefficients,
        weights: Weights,
    ) -> PartGradient:
        """Gradients of the loss on a shard's part of a minibatch, by parameter name, and its metrics."""
        _load(self._weights, weights)
        self._network.zero_grad()
        told = shard.backward(minibatch, normalisation, coefficients)
        gradients = {name: self._weights[name].grad for name in weights[0]}
        return {name: gradient.numpy() for name, gradient in gradients.items() if gradient is not None}, told


def _load(parameters: dict[str, Parameter], weights: Weights) -> None:
    with torch.no_grad():
        for name, values in weights[0].items():
            parameters[name].copy_(torch.from_numpy(values))


def weights_of(network: ActorCritic) -> Weights:
    """The actor of a network as it is now."""
    return actor_weights(network), network.shape.to_dict()
