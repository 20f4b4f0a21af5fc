"""Proximal policy optimisation (PPO, Schulman et al. 2017), to be read beside the paper from top to bottom.

1. Probabilities: the policy that acts is a softmax at a temperature, mixed with uniform exploration.
2. Advantages: generalised advantage estimation (GAE, Schulman et al. 2016), or all actions compared.
3. Losses: the clipped surrogate, entropy, KL penalties, and the clipped squared error of the critic.
4. The update: epochs over shuffled minibatches, Adam, a limit on the gradient's norm.

The decisions lie in shards (`shard.py`), which compute their advantages and gradients by the functions of parts 1 to 3,
in this process or in workers. What is about all decisions, and what is kept between updates, is in `PPO`.

Old log-probabilities are recomputed in torch, at the temperature and epsilon that were used, before the first step: the
ratio is then exactly 1, although the decisions were made by another engine.
"""

import copy
import logging
import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic

from .batch import Group, Minibatch, Normalisation, Segment, Shards, Statistics, Summary
from .normalise import Moments, RewardNormaliser
from .parameters import Coefficients, PPOParameters
from .rollout import FloatArray, IntArray
from .warm_start import DemonstrationSet

__all__ = ["PPO", "Coefficients", "NonFiniteUpdate", "PPOParameters"]

logger = logging.getLogger(__name__)

# Keeps normalised advantages finite where all decisions were worth the same.
_EPSILON = 1e-8
# Adam's own epsilon in OpenAI's implementation, in place of 1e-8 (Huang et al. 2022, detail 3).
_ADAM_EPSILON = 1e-5
# Of the probability ratio of an action that nobody takes: its weight is 0, and infinity times 0 is not a number.
_MOST_LOG_RATIO = 20.0


# --- 1. Probabilities -------------------------------------------------------------------------------------------


def log_probabilities(logits: Tensor, temperatures: Tensor, epsilons: Tensor) -> Tensor:
    """Log-probabilities of the policy that acts, [decisions, actions]."""
    log_probs = torch.log_softmax(logits / temperatures[:, None], dim=1)
    if not bool(epsilons.any()):
        return log_probs
    uniform = 1.0 / logits.shape[1]
    return torch.log((1 - epsilons[:, None]) * log_probs.exp() + epsilons[:, None] * uniform)


# --- 2. Advantages ----------------------------------------------------------------------------------------------


def generalised_advantages(
    rewards: FloatArray, values: FloatArray, next_value: float, *, gamma: float, gae_lambda: float
) -> FloatArray:
    """GAE: the sum of (gamma * lambda)^k times the temporal difference k steps later (equation 16 of its paper).

    `next_value` is the value after the last reward: the bootstrap of a rollout that ends in the middle of a run, or 0.
    """
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"rewards and values must be vectors of one length, got {rewards.shape} and {values.shape}")
    advantages = np.empty_like(rewards)
    following_value, following_advantage = next_value, 0.0
    for index in range(len(rewards) - 1, -1, -1):
        difference = rewards[index] + gamma * following_value - values[index]
        following_advantage = difference + gamma * gae_lambda * following_advantage
        advantages[index] = following_advantage
        following_value = values[index]
    return advantages


def all_action_advantages(action_rewards: FloatArray, probabilities: FloatArray) -> FloatArray:
    """The reward of every action minus the policy's mean over all: no critic, and no noise from sampling the baseline.

    [decisions, actions]. Exact only if the future does not count (gamma = 0).
    """
    if action_rewards.shape != probabilities.shape:
        raise ValueError(f"action_rewards {action_rewards.shape} and probabilities {probabilities.shape} must agree")
    advantages: FloatArray = action_rewards - (action_rewards * probabilities).sum(axis=1, keepdims=True)
    return advantages


def reward_of_best(action_rewards: FloatArray, scores: NDArray[np.floating]) -> FloatArray:
    """The reward of the highest-scoring action of every decision; of several such actions, their mean."""
    if action_rewards.shape != scores.shape:
        raise ValueError(f"action_rewards and scores must be of one shape, got {action_rewards.shape}, {scores.shape}")
    is_best = scores == scores.max(axis=1, keepdims=True)
    rewards: FloatArray = (action_rewards * is_best).sum(axis=1) / is_best.sum(axis=1)
    return rewards


# --- 3. Losses --------------------------------------------------------------------------------------------------


def policy_loss(
    network: ActorCritic,
    parts: Sequence[tuple[Group, Tensor]],
    parameters: PPOParameters,
    coefficients: Coefficients,
) -> tuple[Tensor, dict[str, float]]:
    """The mean over rows of some groups (equation 9 without the value's term, and with penalties), and the metrics."""
    size = sum(len(rows) for _, rows in parts)
    means: dict[str, Tensor] = {}
    ratio_error = 0.0
    for group, rows in parts:
        terms = _policy_terms(network, group, rows, parameters.clip_ratio, is_pulled=coefficients.kl_ref_coef != 0)
        ratio_error = max(ratio_error, float(terms.pop("ratio_error")))
        share = len(rows) / size
        for name, value in terms.items():
            means[name] = means[name] + share * value if name in means else share * value
    entropy = means["entropy"]
    # A penalty with a real gradient: below the floor it pushes entropy up.
    floor = parameters.entropy_floor_coef * torch.relu(parameters.entropy_min - entropy)
    loss = -means["surrogate"] - coefficients.entropy_coef * entropy + coefficients.kl_coef * means["kl"] + floor
    if coefficients.kl_ref_coef:
        loss = loss + coefficients.kl_ref_coef * means["kl_reference"]
    metrics = {name: float(means[name].detach()) for name in ("entropy", "approx_kl", "clipfrac", "kl_reference")}
    return loss, {"policy_loss": float(-means["surrogate"].detach()), **metrics, "ratio_error": ratio_error}


def _policy_terms(
    network: ActorCritic, group: Group, rows: Tensor, clip_ratio: float, *, is_pulled: bool
) -> dict[str, Tensor]:
    """What the loss is made of, and how far the policy has moved: means over decisions of one group."""
    encoded = network.encode(group.replicas[rows], group.request[rows])
    logits = network.logits(encoded, group.prior_logits[rows])
    log_probs = log_probabilities(logits, group.temperatures[rows], group.epsilons[rows])
    probs, old_log_probs = log_probs.exp(), group.old_log_probs[rows]
    log_ratio = log_probs.gather(1, group.actions[rows][:, None])[:, 0] - group.old_action_log_probs[rows]
    ratio = log_ratio.exp()
    if group.action_advantages is not None:
        # The expectation over actions in place of the sampled one.
        ratios = (log_probs - old_log_probs).clamp(max=_MOST_LOG_RATIO).exp()
        gains = _clipped_gain(ratios, group.action_advantages[rows], clip_ratio)
        surrogate = (old_log_probs.exp() * gains).sum(dim=1).mean()
    else:
        surrogate = _clipped_gain(ratio, group.advantages[rows], clip_ratio).mean()
    entropy = -(probs * log_probs).sum(dim=1).mean()
    kl = (old_log_probs.exp() * (old_log_probs - log_probs)).sum(dim=1).mean()
    kl_reference = torch.zeros(())
    if is_pulled:
        # The prior or the cloned policy, at the same temperature.
        reference = torch.log_softmax(group.reference_logits[rows] / group.temperatures[rows][:, None], dim=1)
        kl_reference = (reference.exp() * (reference - log_probs)).sum(dim=1).mean()
    moved = ratio.detach() - 1
    return {
        "surrogate": surrogate,
        "entropy": entropy,
        "kl": kl,
        "kl_reference": kl_reference,
        # Schulman's low-variance, non-negative estimator (http://joschu.net/blog/kl-approx.html).
        "approx_kl": (moved - log_ratio.detach()).mean(),
        "clipfrac": (moved.abs() > clip_ratio).float().mean(),
        "ratio_error": moved.abs().max(),
    }


def _clipped_gain(ratio: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """What a changed probability gains, without a reward for changing it further than the limit (equation 7)."""
    check_same_shape(ratio=ratio, advantages=advantages)
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages)


def value_loss(network: ActorCritic, segments: Sequence[Segment], value_clip: float) -> Tensor:
    """The mean squared error of the critic over the states of some segments; 0 without any.

    Clipped like the ratio: a value that moved further than `value_clip` does not profit from it.
    """
    losses = []
    for segment in segments:
        group, rows = segment.group, segment.rows
        values, _ = network.values(network.encode(group.replicas[rows], group.request[rows]), segment.hidden)
        returns, old_values = segment.returns, segment.old_values
        check_same_shape(values=values, returns=returns)
        loss = (values - returns) ** 2
        if value_clip:
            clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
            loss = torch.max(loss, (clipped - returns) ** 2)
        losses.append(loss)
    return 0.5 * torch.cat(losses).mean() if losses else torch.zeros(())


def check_same_shape(**tensors: Tensor) -> None:
    """ValueError if shapes differ: [B] against [B, 1] would broadcast to [B, B] and train a constant critic."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must agree, got {shapes}")


# --- 4. The update ----------------------------------------------------------------------------------------------


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
        self._rewards = RewardNormaliser(parameters.gamma)
        self._returns = Moments()
        # The critic's memory at the next decision of each stream; none of a stream that begins.
        self._hiddens: dict[int, Tensor] = {}
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

    def update(self, shards: Shards, coefficients: Coefficients) -> dict[str, float]:
        """Learn from the decisions of some shards; returns what happened. NonFiniteUpdate leaves all as it was."""
        before = _copied(self.state_dict())
        try:
            metrics = self._update(shards, coefficients)
        except NonFiniteUpdate:
            self.load_state_dict(before)
            raise
        self.num_updates += 1
        return metrics

    def _update(self, shards: Shards, coefficients: Coefficients) -> dict[str, float]:
        """Algorithm 1: some epochs over minibatches of all decisions, in random order."""
        parameters = self.parameters
        for group in self.optimizer.param_groups:
            group["lr"] = coefficients.learning_rate
        summaries, normalisation, state_metrics = self._prepare(shards)
        sizes = [contents.num_decisions for contents in shards.contents]
        # Few large minibatches rather than a tiny rest.
        num_minibatches = max(1, round(sum(sizes) / parameters.minibatch_size))
        segments = [np.array_split(np.arange(len(s.segment_lengths)), num_minibatches) for s in summaries]
        steps: list[dict[str, float]] = []
        epochs_done = 0
        for _ in range(parameters.epochs):
            order = torch.randperm(sum(sizes), generator=self._generator)
            for part, chosen in enumerate(torch.tensor_split(order, num_minibatches)):
                minibatches = _parts(chosen.numpy(), sizes, [its[part] for its in segments], summaries)
                steps.append(self._step(shards, minibatches, normalisation, coefficients))
            epochs_done += 1
            most_kl = parameters.early_stop_kl_factor * parameters.target_kl
            if parameters.early_stop_kl_factor and steps[-1]["approx_kl"] > most_kl:
                break
        metrics = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        # Divergence and clipping as they are at the end of the update, not averaged over its beginning.
        for name in ("approx_kl", "clipfrac", "entropy"):
            metrics[name] = float(np.mean([step[name] for step in steps[-num_minibatches:]]))
        metrics["first_ratio_error"] = steps[0]["ratio_error"]
        del metrics["ratio_error"]
        return {**metrics, **state_metrics, "epochs": float(epochs_done)}

    def _prepare(self, shards: Shards) -> tuple[Sequence[Summary], Normalisation, dict[str, float]]:
        """Have advantages and returns computed, by the statistics so far; how good policy and critic were before.

        Advances the statistics and the critic's memory.
        """
        for contents in shards.contents:
            if contents.not_finite:
                raise NonFiniteUpdate(contents.not_finite)
            for stream, rewards in contents.rewards:
                if self.parameters.normalize_rewards:
                    self._rewards.observe(rewards, stream)
        summaries = shards.prepare(
            Statistics(
                reward_scale=self._rewards.factor if self.parameters.normalize_rewards else 1.0,
                return_mean=self._returns.mean,
                return_scale=self._returns.scale,
                hiddens={stream: hidden.numpy() for stream, hidden in self._hiddens.items()},
            )
        )
        for stream, hidden in (pair for summary in summaries for pair in summary.hiddens.items()):
            if hidden is None:
                self._hiddens.pop(stream, None)
            else:
                self._hiddens[stream] = torch.tensor(hidden)
        size = sum(contents.num_decisions for contents in shards.contents)
        metrics = {**summaries[0].attention, **_gains(summaries, size)}
        if self.parameters.enable_critic:
            returns = reduce(add, (summary.returns for summary in summaries))
            residuals = reduce(add, (summary.residuals for summary in summaries))
            # 1 of a perfect critic, 0 of a constant; not a number where there was nothing to explain.
            unexplained = residuals.variance / returns.variance if returns.variance else float("nan")
            metrics["explained_variance"] = 1.0 - unexplained
            self._returns += returns
        return summaries, self._normalisation(summaries, size), metrics

    def _normalisation(self, summaries: Sequence[Summary], size: int) -> Normalisation:
        """Advantages of mean 0 and deviation 1 over all decisions; those of every action have mean 0 already."""
        returns = {"return_mean": self._returns.mean, "return_scale": self._returns.scale}
        if not self.parameters.normalize_advantages:
            return Normalisation(**returns)
        advantages = reduce(add, (summary.advantages for summary in summaries))
        square = sum(summary.action_advantages_square for summary in summaries)
        return Normalisation(
            advantage_mean=advantages.mean,
            advantage_deviation=math.sqrt(advantages.variance) + _EPSILON,
            action_advantage_deviation=math.sqrt(square / size) + _EPSILON,
            **returns,
        )

    def _step(
        self,
        shards: Shards,
        minibatches: Sequence[Minibatch],
        normalisation: Normalisation,
        coefficients: Coefficients,
    ) -> dict[str, float]:
        """One gradient step: the policy on randomly chosen decisions, the recurrent critic on stretches of time."""
        self.optimizer.zero_grad()
        metrics = shards.backward(minibatches, normalisation, coefficients)
        if coefficients.bc_coef and self.demonstrations is not None:
            size = sum(len(minibatch.rows) for minibatch in minibatches)
            bc_loss = self.demonstrations.loss(self.network, size=size, generator=self._generator)
            (coefficients.bc_coef * bc_loss).backward()  # type: ignore[no-untyped-call]
            metrics["bc_loss"] = bc_loss.item()
        losses = {name: metrics[name] for name in ("policy_loss", "value_loss", "bc_loss") if name in metrics}
        if not all(map(math.isfinite, losses.values())):
            raise NonFiniteUpdate(f"the loss is not finite: {losses}")
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self.parameters.max_grad_norm)
        if not torch.isfinite(norm):
            gradients = {name: weight.grad for name, weight in self.network.named_parameters()}
            names = [name for name, grad in gradients.items() if grad is not None and not grad.isfinite().all()]
            raise NonFiniteUpdate(f"the gradient is not finite in {', '.join(names)}")
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        return {
            "network": self.network.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "demonstrations": self.cloned_from if self.demonstrations is None else self.demonstrations.digest,
            "optimizer": self.optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "preparation": {
                "rewards": self._rewards.state_dict(),
                "returns": self._returns.state_dict(),
                "hiddens": dict(self._hiddens),
            },
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.network.load_state_dict(state["network"])
        self.reference = None
        if state["reference"] is not None:
            self.keep_reference()
            self.reference.load_state_dict(state["reference"])  # type: ignore[attr-defined]
        if self.demonstrations is not None and state["demonstrations"] not in (None, self.demonstrations.digest):
            logger.warning("the demonstrations are not those of the checkpoint: learning will continue differently")
        self.cloned_from = state["demonstrations"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        statistics = state["preparation"]
        self._rewards.load_state_dict(statistics["rewards"])
        self._returns = Moments(**statistics["returns"])
        self._hiddens = dict(statistics["hiddens"])
        self.num_updates = state["num_updates"]


def _parts(
    chosen: IntArray, sizes: Sequence[int], segments: Sequence[IntArray], summaries: Sequence[Summary]
) -> list[Minibatch]:
    """The part of a minibatch that lies in each shard; decisions are numbered through the shards."""
    states = [sum(its.segment_lengths[i] for i in own) for its, own in zip(summaries, segments, strict=True)]
    parts, first = [], 0
    for size, own, num_states in zip(sizes, segments, states, strict=True):
        rows = chosen[(chosen >= first) & (chosen < first + size)] - first
        parts.append(Minibatch(rows, len(rows) / len(chosen), own, num_states / max(1, sum(states))))
        first += size
    return parts


def _gains(summaries: Sequence[Summary], size: int) -> dict[str, float]:
    """Relative gain in reward of the greedy policy over the choices of its prior and over those of the reference."""
    names = set.intersection(*(set(summary.best_rewards) for summary in summaries))
    best = {name: sum(summary.best_rewards[name] for summary in summaries) / size for name in names}
    return {
        f"gain_over_{name}": (best["own"] - best[name]) / max(abs(best[name]), 1e-12)
        for name in ("prior", "reference")
        if name in best
    }


def _adam(network: ActorCritic, lr: float) -> torch.optim.Adam:
    try:  # one operator instead of dozens; on the CPU since torch 2.4
        return torch.optim.Adam(network.parameters(), lr=lr, eps=_ADAM_EPSILON, fused=True)
    except RuntimeError:
        return torch.optim.Adam(network.parameters(), lr=lr, eps=_ADAM_EPSILON)


def _copied(state: Any) -> Any:
    """A copy of nested dictionaries and lists with tensors; several times as fast as `copy.deepcopy`."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state
