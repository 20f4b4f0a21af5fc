"""An update from decisions that are spread over workers: each computes the gradient of what it has; sums are made."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidur_ppo_plugin.learn.parameters import Coefficients
from vidur_ppo_plugin.learn.ppo import PPO, NonFiniteUpdate
from vidur_ppo_plugin.policy.actor import Weights, actor_weights
from vidur_ppo_plugin.policy.network import ActorCritic

from .engines import Engine
from .shards import PartGradient, Scaling, ShardSums
from .worker import LOST, CollectJob, GradientJob

# Keeps normalised advantages finite where all decisions were worth the same; as in `learn.preparation`.
_EPSILON = 1e-8


@dataclass
class SpreadDecisions:
    """The decisions of an update, numbered through the jobs that collected them; a `GradientSource` of PPO."""

    engine: Engine
    ppo: PPO
    jobs: Sequence[CollectJob]
    #: That the decisions were made with.
    weights: Weights
    sums: Sequence[ShardSums]

    def __post_init__(self) -> None:
        self._bounds = np.cumsum([0, *(part.num_decisions for part in self.sums)])
        self._scaling: Scaling | None = None
        self._parameters = dict(self.ppo.network.named_parameters())
        self._shape = self.ppo.network.shape.to_dict()

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def prepare(self) -> dict[str, float]:
        """Settle what normalises advantages; how much better than its prior the policy was."""
        for stream, rewards in (pair for part in self.sums for pair in part.rewards):
            if not np.isfinite(rewards).all():
                raise NonFiniteUpdate(f"a reward of stream {stream} is not finite")
        scale = self.ppo.reward_scale([pair for part in self.sums for pair in part.rewards])
        self._scaling = (
            self._normalised(scale) if self.ppo.parameters.normalize_advantages else Scaling(scale, 0.0, scale)
        )
        own, prior = (
            sum(getattr(part, f"{name}_reward") for part in self.sums) / len(self) for name in ("own", "prior")
        )
        return {"gain_over_prior": (own - prior) / max(abs(prior), 1e-12)}

    def _normalised(self, scale: float) -> Scaling:
        size = len(self)
        mean = sum(part.advantage for part in self.sums) / size
        variance = max(0.0, sum(part.advantage_square for part in self.sums) / size - mean * mean)
        square = sum(part.every_square for part in self.sums) / size
        factor = scale / (scale * variance**0.5 + _EPSILON)
        return Scaling(factor, mean * factor, scale / (scale * square**0.5 + _EPSILON))

    def gradient(self, chosen: Tensor, part: tuple[int, int], coefficients: Coefficients) -> dict[str, float]:
        """Leave the gradient of the loss on the chosen decisions in the network; returns the metrics."""
        assert self._scaling is not None
        numbers = chosen.numpy()
        shard = np.searchsorted(self._bounds, numbers, side="right") - 1
        jobs = [
            GradientJob(
                key=job.key,
                rows=numbers[shard == index] - self._bounds[index],
                scaling=self._scaling,
                coefficients=coefficients,
                share=float((shard == index).mean()),
            )
            for index, job in enumerate(self.jobs)
        ]
        results = self._results(jobs)
        found = [(job.share, *result) for job, result in zip(jobs, results, strict=True) if result is not None]
        for name, parameter in self._parameters.items():
            parts = [gradient[name] for _, gradient, _ in found if name in gradient]
            parameter.grad = torch.tensor(sum(parts[1:], parts[0])) if parts else None
        metrics = {name: sum(share * told[name] for share, _, told in found) for name in found[0][2]}
        return {**metrics, "ratio_error": max(told["ratio_error"] for _, _, told in found)}

    def _results(self, jobs: Sequence[GradientJob]) -> list[PartGradient | None]:
        weights = self._weights_now()
        results = self.engine.run(jobs, weights)
        if any(isinstance(result, str) and result == LOST for result in results):
            self.engine.run(self.jobs, self.weights)  # the same decisions again, by whoever is there now
            results = self.engine.run(jobs, weights)
        return results

    def _weights_now(self) -> Weights:
        return {name: self._parameters[name].detach().numpy().copy() for name in self.weights[0]}, self._shape


def weights_of(ppo: PPO) -> Weights:
    """The actor as it is now."""
    return _weights(ppo.network)


def reference_of(ppo: PPO) -> Weights | None:
    """What `kl_ref_coef` pulls to; None for the prior."""
    return None if ppo.reference is None else _weights(ppo.reference)


def _weights(network: ActorCritic) -> Weights:
    return actor_weights(network), network.shape.to_dict()
