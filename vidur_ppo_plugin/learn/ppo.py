"""Proximal policy optimisation (Schulman et al. 2017), to be read from top to bottom.

One `update` takes a rollout and changes the network in place. Old log-probabilities are recomputed here, in torch, at
the temperature and epsilon that were used, before the first step: the ratio is then exactly 1, although the decisions
were made by another engine.
"""

import copy
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic

from .advantages import all_action_advantages, explained_variance, gain_over_prior, generalised_advantages
from .normalise import RewardNormaliser, RunningMoments
from .rollout import Rollout
from .warm_start import DemonstrationSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PPOParameters:
    """What an update does; `ppo_flags.py` says when to raise and when to lower each."""

    lr: float = 3e-4
    gamma: float = 0.0
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.5
    entropy_min: float = 0.0
    entropy_floor_coef: float = 1.0
    epochs: int = 4
    minibatch_size: int = 64
    max_grad_norm: float = 1.0
    normalize_advantages: bool = True
    normalize_rewards: bool = True
    all_action_baseline: bool = True
    # Stop an update once the approximate KL exceeds this multiple of target_kl; 0 never stops.
    early_stop_kl_factor: float = 0.0
    target_kl: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What schedules and controllers change from update to update."""

    learning_rate: float
    entropy_coef: float
    kl_coef: float = 0.0
    kl_ref_coef: float = 0.0
    # Above 0 only with demonstrations.
    bc_coef: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A rollout as tensors, with what is fixed during an update."""

    replicas: Tensor
    request: Tensor
    prior_logits: Tensor
    reference_logits: Tensor
    actions: Tensor
    temperatures: Tensor
    epsilons: Tensor
    old_log_probs: Tensor
    old_action_log_probs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    hiddens: list[Tensor]


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient was not finite; the network was put back to what it was before the update."""


class PPO:
    """The learner: network, optimiser and the statistics that normalise rewards and values."""

    def __init__(self, network: ActorCritic, parameters: PPOParameters, *, seed: int) -> None:
        self.network = network
        self.parameters = parameters
        self.optimizer = _adam(network, parameters.lr)
        self._generator = torch.Generator().manual_seed(seed)
        self._reward_normaliser = RewardNormaliser(parameters.gamma)
        self._return_moments = RunningMoments()
        #: The cloned policy that `kl_ref_coef` pulls to; None: the prior.
        self.reference: ActorCritic | None = None
        #: What `bc_coef` weighs; None without a warm start.
        self.demonstrations: DemonstrationSet | None = None
        # The critic's memory at the start of the next rollout.
        self._hidden = network.initial_hidden()
        self.num_updates = 0

    def keep_reference(self) -> None:
        """Make the policy as it is now the reference."""
        self.reference = copy.deepcopy(self.network).requires_grad_(False)

    def update(self, rollout: Rollout, coefficients: Coefficients) -> dict[str, float]:
        """Learn from a rollout; returns what happened. NonFiniteUpdate leaves everything as it was."""
        check_finite(rollout)
        before = _copied(self.state_dict())
        try:
            metrics = self._update(rollout, coefficients)
        except NonFiniteUpdate:
            self.load_state_dict(before)
            raise
        self.num_updates += 1
        return metrics

    def _update(self, rollout: Rollout, coefficients: Coefficients) -> dict[str, float]:
        parameters = self.parameters
        for group in self.optimizer.param_groups:
            group["lr"] = coefficients.learning_rate
        batch, state_metrics = self._prepare(rollout)
        steps: list[dict[str, float]] = []
        size = len(rollout)
        # Few large minibatches rather than a tiny rest.
        num_minibatches = max(1, round(size / parameters.minibatch_size))
        epochs_done = 0
        for _ in range(parameters.epochs):
            order = torch.randperm(size, generator=self._generator)
            for part, chosen in enumerate(torch.tensor_split(order, num_minibatches)):
                segment = torch.tensor_split(torch.arange(size), num_minibatches)[part]
                steps.append(self._step(batch, chosen, segment, coefficients))
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

    def _prepare(self, rollout: Rollout) -> tuple[_Batch, dict[str, float]]:
        """Old probabilities, values, advantages and returns, and how good policy and critic were before the update.

        Advances the critic's memory and the statistics.
        """
        parameters = self.parameters
        # Copies: torch aligns its own memory, and the last bit of a product depends on the alignment.
        tensors = {
            "replicas": torch.tensor(rollout.replicas),
            "request": torch.tensor(rollout.request),
            "prior_logits": torch.tensor(rollout.prior_logits),
            "actions": torch.tensor(rollout.actions),
            "temperatures": torch.tensor(rollout.temperatures),
            "epsilons": torch.tensor(rollout.epsilons),
        }
        rewards = rollout.rewards
        if parameters.normalize_rewards:
            rewards = self._reward_normaliser(rewards)
        scale = float(rewards[0] / rollout.rewards[0]) if rollout.rewards[0] else 1.0
        with torch.no_grad():
            encoded = self.network.encode(tensors["replicas"], tensors["request"])
            logits = self.network.logits(encoded, tensors["prior_logits"])
            old_log_probs = log_probabilities(logits, tensors["temperatures"], tensors["epsilons"])
            reference_logits = tensors["prior_logits"]
            if self.reference is not None:
                encoded_by_reference = self.reference.encode(tensors["replicas"], tensors["request"])
                reference_logits = self.reference.logits(encoded_by_reference, reference_logits)
            values, hiddens, next_value = self._values(encoded, rollout)
        mean, std = self._return_moments.mean, self._return_moments.std
        unscaled = values.numpy().astype(np.float64) * std + mean
        advantages = generalised_advantages(
            rewards, unscaled, next_value * std + mean if rollout.next_observation is not None else 0.0,
            gamma=parameters.gamma, gae_lambda=parameters.gae_lambda,
        )  # fmt: skip
        returns = advantages + unscaled
        metrics = {"explained_variance": explained_variance(unscaled, returns)}
        if rollout.action_rewards is not None:
            metrics["gain_over_prior"] = gain_over_prior(rollout.action_rewards, logits.numpy(), rollout.prior_logits)
        metrics |= self.network.attention_summary(tensors["replicas"], tensors["request"])
        if parameters.all_action_baseline and rollout.action_rewards is not None:
            probabilities = old_log_probs.exp().numpy().astype(np.float64)
            advantages = all_action_advantages(rollout.action_rewards * scale, probabilities, rollout.actions)
        self._return_moments.update(returns)
        if parameters.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        targets = (returns - self._return_moments.mean) / self._return_moments.std
        batch = _Batch(
            **tensors,
            reference_logits=reference_logits,
            old_log_probs=old_log_probs,
            old_action_log_probs=old_log_probs.gather(1, tensors["actions"][:, None])[:, 0],
            old_values=values,
            advantages=torch.tensor(advantages.astype(np.float32)),
            returns=torch.tensor(targets.astype(np.float32)),
            hiddens=hiddens,
        )
        return batch, metrics

    def _values(self, encoded: Tensor, rollout: Rollout) -> tuple[Tensor, list[Tensor], float]:
        """Values in order, the critic's memory before each minibatch-sized segment, and the bootstrap value."""
        num_segments = max(1, round(len(rollout) / self.parameters.minibatch_size))
        values, hiddens, hidden = [], [], self._hidden
        for segment in torch.tensor_split(encoded, num_segments):
            hiddens.append(hidden)
            segment_values, hidden = self.network.values(segment, hidden)
            values.append(segment_values)
        self._hidden = hidden
        next_value = 0.0
        if rollout.next_observation is not None:
            following = rollout.next_observation
            state = self.network.encode(torch.tensor(following.replicas)[None], torch.tensor(following.request)[None])
            next_value = float(self.network.values(state, hidden)[0][0])
        else:
            self._hidden = self.network.initial_hidden()
        return torch.cat(values), hiddens, next_value

    def _step(self, batch: _Batch, chosen: Tensor, segment: Tensor, coefficients: Coefficients) -> dict[str, float]:
        """One gradient step: the policy on randomly chosen decisions, the recurrent critic on a stretch of time."""
        policy_loss, metrics = self._policy_loss(batch, chosen, coefficients)
        value_loss = self._value_loss(batch, segment)
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
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.parameters.max_grad_norm)
        if not torch.isfinite(norm):
            names = [
                n for n, p in self.network.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
            ]
            raise NonFiniteUpdate(f"the gradient is not finite in {', '.join(names)}")
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}

    def _policy_loss(
        self, batch: _Batch, chosen: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, dict[str, float]]:
        parameters = self.parameters
        encoded = self.network.encode(batch.replicas[chosen], batch.request[chosen])
        logits = self.network.logits(encoded, batch.prior_logits[chosen])
        log_probs = log_probabilities(logits, batch.temperatures[chosen], batch.epsilons[chosen])
        probs = log_probs.exp()
        log_ratio = log_probs.gather(1, batch.actions[chosen][:, None])[:, 0] - batch.old_action_log_probs[chosen]
        ratio, advantages = log_ratio.exp(), batch.advantages[chosen]
        check_same_shape(ratio=ratio, advantages=advantages)
        clipped = ratio.clamp(1 - parameters.clip_ratio, 1 + parameters.clip_ratio)
        surrogate = torch.min(ratio * advantages, clipped * advantages).mean()
        entropy = -(probs * log_probs).sum(dim=1).mean()
        old_log_probs = batch.old_log_probs[chosen]
        kl = (old_log_probs.exp() * (old_log_probs - log_probs)).sum(dim=1).mean()
        # A penalty with a real gradient: below the floor it pushes entropy up.
        floor = parameters.entropy_floor_coef * torch.relu(parameters.entropy_min - entropy)
        loss = -surrogate - coefficients.entropy_coef * entropy + coefficients.kl_coef * kl + floor
        kl_reference = torch.zeros(())
        if coefficients.kl_ref_coef:
            # The prior or the cloned policy, at the same temperature.
            reference = torch.log_softmax(batch.reference_logits[chosen] / batch.temperatures[chosen][:, None], dim=1)
            kl_reference = (reference.exp() * (reference - log_probs)).sum(dim=1).mean()
            loss = loss + coefficients.kl_ref_coef * kl_reference
        with torch.no_grad():
            metrics = {
                "policy_loss": float(-surrogate),
                "entropy": float(entropy),
                # Schulman's low-variance, non-negative estimator (http://joschu.net/blog/kl-approx.html).
                "approx_kl": float((ratio - 1 - log_ratio).mean()),
                "clipfrac": float(((ratio - 1).abs() > parameters.clip_ratio).float().mean()),
                "kl_reference": float(kl_reference),
                "ratio_error": float((ratio - 1).abs().max()),
            }
        return loss, metrics

    def _value_loss(self, batch: _Batch, segment: Tensor) -> Tensor:
        parameters = self.parameters
        first = int(segment[0])
        lengths = [len(part) for part in torch.tensor_split(torch.arange(len(batch.actions)), len(batch.hiddens))]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        hidden = batch.hiddens[starts.index(first)]
        values, _ = self.network.values(self.network.encode(batch.replicas[segment], batch.request[segment]), hidden)
        returns, old_values = batch.returns[segment], batch.old_values[segment]
        check_same_shape(values=values, returns=returns)
        loss = (values - returns) ** 2
        if parameters.value_clip:
            clipped = old_values + (values - old_values).clamp(-parameters.value_clip, parameters.value_clip)
            loss = torch.max(loss, (clipped - returns) ** 2)
        return 0.5 * loss.mean()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        return {
            "network": self.network.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "demonstrations": None if self.demonstrations is None else self.demonstrations.digest,
            "optimizer": self.optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "rewards": self._reward_normaliser.state_dict(),
            "returns": self._return_moments.state_dict(),
            "hidden": self._hidden,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.network.load_state_dict(state["network"])
        self._load_reference(state["reference"])
        if self.demonstrations is not None and state["demonstrations"] not in (None, self.demonstrations.digest):
            logger.warning("the demonstrations are not those of the checkpoint: learning will continue differently")
        self.optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._reward_normaliser.load_state_dict(state["rewards"])
        self._return_moments.load_state_dict(state["returns"])
        self._hidden = state["hidden"]
        self.num_updates = state["num_updates"]

    def _load_reference(self, weights: dict[str, Any] | None) -> None:
        if weights is None:
            self.reference = None
            return
        self.keep_reference()
        assert self.reference is not None
        self.reference.load_state_dict(weights)


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


def log_probabilities(logits: Tensor, temperatures: Tensor, epsilons: Tensor) -> Tensor:
    """Log-probabilities of the sampled policy: a softmax at a temperature, mixed with uniform exploration."""
    log_probs = torch.log_softmax(logits / temperatures[:, None], dim=1)
    if not bool(epsilons.any()):
        return log_probs
    uniform = 1.0 / logits.shape[1]
    return torch.log((1 - epsilons[:, None]) * log_probs.exp() + epsilons[:, None] * uniform)


def check_finite(rollout: Rollout) -> None:
    """NonFiniteUpdate naming the first number of a rollout that is not finite."""
    for name in ("replicas", "request", "prior_logits", "temperatures", "rewards", "action_rewards"):
        values = getattr(rollout, name)
        if values is not None and not np.all(np.isfinite(values)):
            where = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
            raise NonFiniteUpdate(f"{name}{list(where)} of the rollout is not finite: {values[where]}")


def check_same_shape(**tensors: Tensor) -> None:
    """ValueError if shapes differ: [B] against [B, 1] would broadcast to [B, B] and train a constant critic."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must agree, got {shapes}")
