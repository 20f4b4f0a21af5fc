"""Proximal policy optimisation (Schulman et al. 2017), to be read from top to bottom.

One `update` takes the rollouts of one or more streams and changes the network in place. Old log-probabilities are
recomputed (in `preparation`), in torch, at the temperature and epsilon that were used, before the first step: the ratio
is then exactly 1, although the decisions were made by another engine.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic

from .batch import Batch
from .loss import Loss, check_same_shape
from .parameters import Coefficients, PPOParameters
from .preparation import Preparation, log_probabilities
from .rollout import Rollout
from .warm_start import DemonstrationSet

__all__ = ["PPO", "Coefficients", "NonFiniteUpdate", "PPOParameters", "check_same_shape", "log_probabilities"]

logger = logging.getLogger(__name__)


class GradientSource(Protocol):
    """Decisions to learn from, wherever they are."""

    def __len__(self) -> int: ...

    def prepare(self) -> dict[str, float]:
        """Settle what is fixed during the update; how good policy and critic were before it."""

    def gradient(self, chosen: Tensor, part: tuple[int, int], coefficients: Coefficients) -> dict[str, float]:
        """Leave the gradient of the loss on the chosen decisions in the network; returns the metrics.

        `part`: the how manieth of how many minibatches of the epoch it is.
        """


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient was not finite; the network was put back to what it was before the update."""


class PPO:
    """The learner: network, optimiser and the statistics that normalise rewards and values."""

    def __init__(self, network: ActorCritic, parameters: PPOParameters, *, seed: int) -> None:
        self.network = network
        self.parameters = parameters
        self._weights = list(network.parameters())  # to walk through the modules at every step takes long
        self.optimizer = _adam(network, parameters.lr)
        self._generator = torch.Generator().manual_seed(seed)
        self._preparation = Preparation(network, parameters)
        self._loss = Loss(network, parameters)
        #: The cloned or loaded policy that `kl_ref_coef` pulls to; None: the prior.
        self.reference: ActorCritic | None = None
        #: What `bc_coef` weighs; None without a warm start.
        self.demonstrations: DemonstrationSet | None = None
        #: Digest of the demonstrations that learning began with, also if they are no longer there.
        self.cloned_from: str | None = None
        self.num_updates = 0

    def reset_optimizer(self) -> None:
        """Forget the moments of past gradients."""
        self.optimizer = _adam(self.network, self.parameters.lr)

    def keep_reference(self) -> None:
        """Make the policy as it is now the reference."""
        self.reference = copy.deepcopy(self.network).requires_grad_(False)

    def update(self, rollouts: Rollout | Sequence[Rollout], coefficients: Coefficients) -> dict[str, float]:
        """Learn from a rollout, or from several; returns what happened. NonFiniteUpdate leaves everything as it was."""
        rollouts = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        for rollout in rollouts:
            check_finite(rollout)
        return self.update_from(_Rollouts(self, rollouts), coefficients)

    def update_from(self, source: GradientSource, coefficients: Coefficients) -> dict[str, float]:
        """The same from decisions that may be elsewhere."""
        before = _copied(self.state_dict())
        try:
            metrics = self._update(source, coefficients)
        except NonFiniteUpdate:
            self.load_state_dict(before)
            raise
        self.num_updates += 1
        return metrics

    def _update(self, source: GradientSource, coefficients: Coefficients) -> dict[str, float]:
        parameters = self.parameters
        for group in self.optimizer.param_groups:
            group["lr"] = coefficients.learning_rate
        state_metrics = source.prepare()
        steps: list[dict[str, float]] = []
        size = len(source)
        # Few large minibatches rather than a tiny rest.
        num_minibatches = max(1, round(size / parameters.minibatch_size))
        epochs_done = 0
        for _ in range(parameters.epochs):
            order = torch.randperm(size, generator=self._generator)
            for part, chosen in enumerate(torch.tensor_split(order, num_minibatches)):
                steps.append(self._step(source, chosen, (part, num_minibatches), coefficients))
            epochs_done += 1
            if (
                parameters.early_stop_kl_factor
                and steps[-1]["approx_kl"] > parameters.early_stop_kl_factor * parameters.target_kl
            ):
                break
        metrics = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        # Divergence and clipping as they are at the end of the update, not averaged over its beginning.
        last_epoch = steps[-num_minibatches:]
        for name in ("approx_kl", "clipfrac", "entropy"):
            metrics[name] = float(np.mean([step[name] for step in last_epoch]))
        metrics["first_ratio_error"] = steps[0]["ratio_error"]
        del metrics["ratio_error"]
        return {**metrics, **state_metrics, "epochs": float(epochs_done)}

    def _step(
        self, source: GradientSource, chosen: Tensor, part: tuple[int, int], coefficients: Coefficients
    ) -> dict[str, float]:
        """One gradient step: the policy on randomly chosen decisions, the recurrent critic on stretches of time."""
        metrics = source.gradient(chosen, part, coefficients)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self.parameters.max_grad_norm)
        if not torch.isfinite(norm):
            names = [
                n for n, p in self.network.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
            ]
            raise NonFiniteUpdate(f"the gradient is not finite in {', '.join(names)}")
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}

    def prepared(self, rollouts: Sequence[Rollout]) -> tuple[Batch, dict[str, float]]:
        """A batch of rollouts, and how good policy and critic were before the update."""
        return self._preparation.batch(rollouts, self.reference)

    def reward_scale(self, rewards: Sequence[tuple[int, NDArray[np.float64]]]) -> float:
        """What rewards are multiplied with; those of each stream are added to the statistics."""
        return self._preparation.reward_scale(rewards)

    def gradient(
        self, batch: Batch, chosen: Tensor, part: tuple[int, int], coefficients: Coefficients
    ) -> dict[str, float]:
        """Leave the gradient of all losses in the network."""
        policy_loss, metrics = self._loss.of_policy(batch, chosen, coefficients)
        loss, value_loss = policy_loss, torch.zeros(())
        if self.parameters.enable_critic:
            value_loss = self._loss.of_critic(batch.segments_of(*part))
            loss = policy_loss + self.parameters.value_coef * value_loss
            metrics["value_loss"] = value_loss.item()
        if coefficients.bc_coef and self.demonstrations is not None:
            bc_loss = self.demonstrations.loss(self.network, size=len(chosen), generator=self._generator)
            loss = loss + coefficients.bc_coef * bc_loss
            metrics["bc_loss"] = bc_loss.item()
        if not torch.isfinite(loss):
            parts = {"policy": policy_loss.item(), "value": value_loss.item(), "cloning": metrics.get("bc_loss", 0.0)}
            raise NonFiniteUpdate(f"the loss is not finite: {parts}")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        return {
            "network": self.network.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "demonstrations": self.cloned_from if self.demonstrations is None else self.demonstrations.digest,
            "optimizer": self.optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "preparation": self._preparation.state_dict(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.network.load_state_dict(state["network"])
        self._load_reference(state["reference"])
        if self.demonstrations is not None and state["demonstrations"] not in (None, self.demonstrations.digest):
            logger.warning("the demonstrations are not those of the checkpoint: learning will continue differently")
        self.cloned_from = state["demonstrations"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._preparation.load_state_dict(state["preparation"])
        self.num_updates = state["num_updates"]

    def _load_reference(self, weights: dict[str, Any] | None) -> None:
        if weights is None:
            self.reference = None
            return
        self.keep_reference()
        assert self.reference is not None
        self.reference.load_state_dict(weights)


class _Rollouts:
    """Rollouts that this learner computes the gradients of itself."""

    def __init__(self, ppo: PPO, rollouts: Sequence[Rollout]) -> None:
        self._ppo, self._rollouts = ppo, rollouts
        self._batch = Batch([], [])

    def __len__(self) -> int:
        return len(self._batch)

    def prepare(self) -> dict[str, float]:
        self._batch, metrics = self._ppo.prepared(self._rollouts)
        return metrics

    def gradient(self, chosen: Tensor, part: tuple[int, int], coefficients: Coefficients) -> dict[str, float]:
        return self._ppo.gradient(self._batch, chosen, part, coefficients)


def _adam(network: ActorCritic, lr: float) -> torch.optim.Adam:
    try:  # one operator instead of dozens; on the CPU since torch 2.4
        return torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5, fused=True)
    except RuntimeError:
        return torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5)


def _copied(state: Any) -> Any:
    """A copy of nested dictionaries and lists with tensors; several times as fast as `copy.deepcopy`."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def check_finite(rollout: Rollout) -> None:
    """NonFiniteUpdate naming the first number of a rollout that is not finite."""
    for name in ("replicas", "request", "prior_logits", "temperatures", "rewards", "action_rewards"):
        values = getattr(rollout, name)
        if values is not None and not np.all(np.isfinite(values)):
            where = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
            raise NonFiniteUpdate(f"{name}{list(where)} of the rollout is not finite: {values[where]}")
