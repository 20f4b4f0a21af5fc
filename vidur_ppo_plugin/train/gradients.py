"""Gradients from several workers at once: each computes that of a part of a minibatch, the learner adds them up."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from vidur_ppo_plugin.learn.batch import Batch, Group
from vidur_ppo_plugin.learn.loss import Loss
from vidur_ppo_plugin.learn.parameters import Coefficients, PPOParameters
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape

from .engines import Engine
from .worker import GradientJob

Float32Array = NDArray[np.float32]
#: The gradient of a part, times its share of the minibatch; and what the loss told.
PartGradient = tuple[Float32Array, dict[str, float]]


class ParallelGradients:
    """A `PolicyGradient` of PPO by so many jobs for each minibatch; the same for the same number of jobs."""

    def __init__(self, engine: Engine, network: ActorCritic, parameters: PPOParameters, *, num_jobs: int) -> None:
        self._engine = engine
        self._network = network
        self._learner = parameters, network.shape
        self._num_jobs = num_jobs

    def __call__(self, batch: Batch, chosen: Tensor, coefficients: Coefficients) -> dict[str, float]:
        """Leave the gradient in the network; returns the metrics."""
        jobs = [
            GradientJob(
                learner=self._learner,
                groups=[group.arrays(rows) for group, rows, _ in batch.parts(part)],
                coefficients=coefficients,
                share=len(part) / len(chosen),
            )
            for part in torch.tensor_split(chosen, min(self._num_jobs, len(chosen)))
        ]
        vector = parameters_to_vector(self._network.parameters()).detach().numpy()
        results: list[PartGradient] = self._engine.run(jobs, vector)
        self._fill_in(np.sum([gradient for gradient, _ in results], axis=0))
        parts = [metrics for _, metrics in results]
        combined = {
            name: sum(job.share * metrics[name] for job, metrics in zip(jobs, parts, strict=True)) for name in parts[0]
        }
        return {**combined, "ratio_error": max(metrics["ratio_error"] for metrics in parts)}

    def _fill_in(self, gradient: Float32Array) -> None:
        first = 0
        for parameter in self._network.parameters():
            last = first + parameter.numel()
            parameter.grad = torch.tensor(gradient[first:last]).reshape(parameter.shape)
            first = last


class GradientWorker:
    """Computes gradients of parts, with a network of its own."""

    def __init__(self, parameters: PPOParameters, shape: NetworkShape) -> None:
        torch.set_num_threads(1)
        self._network = ActorCritic(shape)
        self._loss = Loss(self._network, parameters)

    def compute(self, job: GradientJob, vector: Any) -> PartGradient:
        """The gradient at the parameters of the vector."""
        vector_to_parameters(torch.tensor(vector), self._network.parameters())
        batch = Batch([Group.from_arrays(arrays) for arrays in job.groups], [])
        loss, metrics = self._loss.of_policy(batch, torch.arange(len(batch)), job.coefficients)
        self._network.zero_grad()
        (loss * job.share).backward()  # type: ignore[no-untyped-call]
        gradients = [
            torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in self._network.parameters()
        ]
        return torch.cat(gradients).numpy(), metrics
