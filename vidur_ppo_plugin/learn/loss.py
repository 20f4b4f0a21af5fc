"""What an update minimises: PPO's clipped objective of the policy, and the squared error of the recurrent critic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic

from .batch import Batch, Group, Segment
from .parameters import Coefficients, PPOParameters
from .preparation import log_probabilities

# Of the probability ratio of an action that nobody takes: its weight is 0, and infinity times 0 is not a number.
_MOST_LOG_RATIO = 20.0


class Loss:
    """Losses of a network's policy and critic on parts of a batch."""

    def __init__(self, network: ActorCritic, parameters: PPOParameters) -> None:
        self.network = network
        self.parameters = parameters

    def of_policy(self, batch: Batch, chosen: Tensor, coefficients: Coefficients) -> tuple[Tensor, dict[str, float]]:
        """The mean over the chosen decisions, whose groups are computed one by one."""
        terms: dict[str, Tensor] = {}
        ratio_error = 0.0
        for group, rows, share in batch.parts(chosen):
            of_group = self._policy_terms(group, rows, coefficients)
            ratio_error = max(ratio_error, float(of_group.pop("ratio_error")))
            for name, value in of_group.items():
                terms[name] = terms[name] + share * value if name in terms else share * value
        parameters, entropy = self.parameters, terms["entropy"]
        # A penalty with a real gradient: below the floor it pushes entropy up.
        floor = parameters.entropy_floor_coef * torch.relu(parameters.entropy_min - entropy)
        loss = -terms["surrogate"] - coefficients.entropy_coef * entropy + coefficients.kl_coef * terms["kl"] + floor
        if coefficients.kl_ref_coef:
            loss = loss + coefficients.kl_ref_coef * terms["kl_reference"]
        metrics = {name: float(terms[name].detach()) for name in ("entropy", "approx_kl", "clipfrac", "kl_reference")}
        return loss, {"policy_loss": float(-terms["surrogate"].detach()), **metrics, "ratio_error": ratio_error}

    def _policy_terms(self, group: Group, rows: Tensor, coefficients: Coefficients) -> dict[str, Tensor]:
        """What the loss is made of, and how far the policy has moved: means over decisions of one group."""
        clip_ratio = self.parameters.clip_ratio
        encoded = self.network.encode(group.replicas[rows], group.request[rows])
        logits = self.network.logits(encoded, group.prior_logits[rows])
        log_probs = log_probabilities(logits, group.temperatures[rows], group.epsilons[rows])
        probs, old_log_probs = log_probs.exp(), group.old_log_probs[rows]
        log_ratio = log_probs.gather(1, group.actions[rows][:, None])[:, 0] - group.old_action_log_probs[rows]
        ratio = log_ratio.exp()
        if group.action_advantages is not None:
            ratios = (log_probs - old_log_probs).clamp(max=_MOST_LOG_RATIO).exp()
            gains = _clipped_gain(ratios, group.action_advantages[rows], clip_ratio)
            surrogate = (old_log_probs.exp() * gains).sum(dim=1).mean()
        else:
            surrogate = _clipped_gain(ratio, group.advantages[rows], clip_ratio).mean()
        entropy = -(probs * log_probs).sum(dim=1).mean()
        kl = (old_log_probs.exp() * (old_log_probs - log_probs)).sum(dim=1).mean()
        kl_reference = torch.zeros(())
        if coefficients.kl_ref_coef:
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

    def of_critic(self, segments: Sequence[Segment]) -> Tensor:
        """The mean over the states of some segments; 0 without any."""
        losses = []
        for segment in segments:
            group, rows = segment.group, segment.rows
            encoded = self.network.encode(group.replicas[rows], group.request[rows])
            values, _ = self.network.values(encoded, segment.hidden)
            returns, old_values, clip = segment.returns, segment.old_values, self.parameters.value_clip
            check_same_shape(values=values, returns=returns)
            loss = (values - returns) ** 2
            if clip:
                clipped = old_values + (values - old_values).clamp(-clip, clip)
                loss = torch.max(loss, (clipped - returns) ** 2)
            losses.append(loss)
        return 0.5 * torch.cat(losses).mean() if losses else torch.zeros(())


def _clipped_gain(ratio: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """PPO's objective: what a changed probability gains, without a reward for changing it further than the limit."""
    check_same_shape(ratio=ratio, advantages=advantages)
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages)


def check_same_shape(**tensors: Tensor) -> None:
    """ValueError if shapes differ: [B] against [B, 1] would broadcast to [B, B] and train a constant critic."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must agree, got {shapes}")
