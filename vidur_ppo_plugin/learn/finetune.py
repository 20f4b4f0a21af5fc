"""Conservative fine-tuning on recorded decisions: a small step away from a policy, taken only if it pays.

The gradient is that of the doubly robust estimate of the policy's cost (`off_policy`), so every replica of every
recorded state counts, not only the one that was taken. A penalty keeps the policy near the one it starts from, and a
limit on their divergence ends the learning. The last part of the record is held out: the new policy is only accepted
if its estimated cost there is lower than the old one's, beyond the noise.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidur_ppo_plugin.policy.network import ActorCritic
from vidur_ppo_plugin.policy.policy import Observer
from vidur_ppo_plugin.routing.features import FeatureTable, Observation
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.snapshot import FloatArray

from .off_policy import (
    LEAST_EFFECTIVE_SIZE,
    MOST_WEIGHT,
    LoggedDecisions,
    block_interval,
    effective_size,
    importance_weights,
    modelled_costs,
    robust_values,
)

logger = logging.getLogger(__name__)

_HELD_OUT = 0.3
# Advantages beyond so many standard deviations say more about noise than about the action.
_MOST_ADVANTAGE = 5.0
# Of a gain on decisions that were not learned from. Weights are skewed, so more is asked than the usual 0.95.
_CONFIDENCE = 0.99
# Steps that went too far: each is undone and halves the learning rate; after so many the limit is reached.
_MOST_UNDONE = 6
# A policy that sends this share to one replica, where the old one did not, has collapsed.
_COLLAPSED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class FinetuneParameters:
    """Parameters of a fine-tuning; `most_kl`: the mean KL divergence from the old policy at which learning ends."""

    lr: float
    epochs: int
    minibatch_size: int
    kl_coef: float
    most_kl: float
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a fine-tuning; costs are doubly robust estimates on the decisions that were held out."""

    is_accepted: bool
    why: str
    num_learned: int
    num_held_out: int
    recorded_cost: float
    old_cost: float
    new_cost: float
    #: New minus old, and its 99 % interval.
    difference: float
    low: float
    high: float
    kl: float
    #: Share of held-out decisions that the two make alike.
    agreement: float


@dataclass(frozen=True)
class _Group:
    """Decisions among equally many replicas, as tensors; `rows` are their places in the record."""

    rows: Tensor
    replicas: Tensor
    request: Tensor
    prior_logits: Tensor
    advantages: Tensor
    old_log_probs: Tensor


def finetune(
    network: ActorCritic, features: FeatureTable, prior: Prior, logged: LoggedDecisions, parameters: FinetuneParameters
) -> FinetuneResult:
    """Change the network in place; put it back to what it was if the change is not accepted."""
    torch.set_num_threads(1)
    first_held_out = round((1.0 - _HELD_OUT) * len(logged))
    seen = _observed(features, prior, logged)
    learned, held_out = logged.part(0, first_held_out), logged.part(first_held_out, len(logged))
    old = copy.deepcopy(network).requires_grad_(False)
    kl = _learn(network, old, seen[:first_held_out], learned, parameters)
    result = _judge(network, old, seen[first_held_out:], held_out, learned, kl)
    if not result.is_accepted:
        network.load_state_dict(old.state_dict())
    return result


_Seen = Sequence[tuple[Observation, FloatArray]]


def _observed(features: FeatureTable, prior: Prior, logged: LoggedDecisions) -> _Seen:
    """What the policy sees at each decision, and the prior's logits; trends go on from one to the next."""
    observer, members = Observer(features, prior), None
    seen = []
    for decision in logged.decisions:
        if decision.backends != members:
            members = decision.backends
            observer.reset()
        observed = observer.observe(decision.snapshot, decision.request)
        seen.append((observed.observation, observed.prior_logits.astype(np.float64)))
    return seen


# --- Learning ---


def _learn(
    network: ActorCritic, old: ActorCritic, seen: _Seen, logged: LoggedDecisions, parameters: FinetuneParameters
) -> float:
    """Some epochs over the decisions; the divergence at the end. FloatingPointError if a loss is not finite."""
    groups = _groups(old, seen, _advantages(old, seen, logged))
    optimizer = torch.optim.Adam(network.parameters(), lr=parameters.lr, eps=1e-5)
    generator = torch.Generator().manual_seed(parameters.seed)
    num_undone = 0
    for _ in range(parameters.epochs):
        for group in groups:
            for rows in torch.split(torch.randperm(len(group.rows), generator=generator), parameters.minibatch_size):
                last_good = {name: value.clone() for name, value in network.state_dict().items()}
                loss = _loss(network, group, rows, parameters.kl_coef)
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"the loss of fine-tuning is not finite: {loss.item()}")
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(network.parameters(), parameters.max_grad_norm)
                optimizer.step()
                if _divergence(network, groups) > parameters.most_kl:
                    network.load_state_dict(last_good)
                    num_undone += 1
                    for parameter_group in optimizer.param_groups:
                        parameter_group["lr"] /= 2.0
                if num_undone > _MOST_UNDONE:
                    return _divergence(network, groups)
    return _divergence(network, groups)


def _advantages(old: ActorCritic, seen: _Seen, logged: LoggedDecisions) -> list[FloatArray]:
    """Minus the doubly robust cost of each replica, relative to the old policy's, in standard deviations."""
    modelled = modelled_costs(logged)
    weights = np.minimum(1.0 / logged.probabilities, MOST_WEIGHT)
    shares = [np.exp(_log_probs(old, *one)[0].numpy().astype(np.float64)) for one in seen]
    result = []
    for index, (costs, share) in enumerate(zip(modelled, shares, strict=True)):
        action = logged.actions[index]
        robust = costs.copy()
        robust[action] += weights[index] * (logged.costs[index] - costs[action])
        result.append(float(share @ robust) - robust)
    scale = max(float(np.concatenate(result).std()), 1e-9)
    return [np.clip(one / scale, -_MOST_ADVANTAGE, _MOST_ADVANTAGE) for one in result]


def _groups(old: ActorCritic, seen: _Seen, advantages: Sequence[FloatArray]) -> list[_Group]:
    by_size: dict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(advantages):
        by_size[len(one)].append(index)
    groups = []
    for rows in by_size.values():
        replicas, request, prior_logits = _stacked([seen[index] for index in rows])
        with torch.no_grad():
            old_log_probs = torch.log_softmax(old.logits(old.encode(replicas, request), prior_logits), dim=1)
        chosen = torch.tensor(np.stack([advantages[index] for index in rows]), dtype=torch.float32)
        groups.append(_Group(torch.tensor(rows), replicas, request, prior_logits, chosen, old_log_probs))
    return groups


def _loss(network: ActorCritic, group: _Group, rows: Tensor, kl_coef: float) -> Tensor:
    encoded = network.encode(group.replicas[rows], group.request[rows])
    log_probs = torch.log_softmax(network.logits(encoded, group.prior_logits[rows]), dim=1)
    probs = log_probs.exp()
    gain = (probs * group.advantages[rows]).sum(dim=1).mean()
    kl = (probs * (log_probs - group.old_log_probs[rows])).sum(dim=1).mean()
    return kl_coef * kl - gain


@torch.no_grad()
def _divergence(network: ActorCritic, groups: Sequence[_Group]) -> float:
    """Mean KL divergence of the new policy from the old one."""
    total = 0.0
    for group in groups:
        logits = network.logits(network.encode(group.replicas, group.request), group.prior_logits)
        log_probs = torch.log_softmax(logits, dim=1)
        total += float((group.old_log_probs.exp() * (group.old_log_probs - log_probs)).sum())
    return total / sum(len(group.rows) for group in groups)


def _stacked(seen: _Seen) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.from_numpy(np.stack([observation.replicas for observation, _ in seen])),
        torch.from_numpy(np.stack([observation.request for observation, _ in seen])),
        torch.tensor(np.stack([logits for _, logits in seen]), dtype=torch.float32),
    )


@torch.no_grad()
def _log_probs(network: ActorCritic, observation: Observation, prior_logits: FloatArray) -> Tensor:
    replicas, request, logits = _stacked([(observation, prior_logits)])
    return torch.log_softmax(network.logits(network.encode(replicas, request), logits), dim=1)


# --- Judging ---


def _judge(
    network: ActorCritic, old: ActorCritic, seen: _Seen, held_out: LoggedDecisions, learned: LoggedDecisions, kl: float
) -> FinetuneResult:
    """Compare the greedy policies, before and after, where neither has learned."""
    shares = {name: [_greedy(net, *one) for one in seen] for name, net in (("old", old), ("new", network))}
    modelled = modelled_costs(held_out)
    values = {name: robust_values(held_out, modelled, given) for name, given in shares.items()}
    difference = values["new"] - values["old"]
    low, high = block_interval(difference, level=_CONFIDENCE)
    worth = effective_size(importance_weights(held_out, shares["new"]))
    agreement = float(np.mean([np.array_equal(*pair) for pair in zip(shares["new"], shares["old"], strict=True)]))
    largest = {name: _largest_share(given) for name, given in shares.items()}
    is_collapsed = largest["new"] > _COLLAPSED_SHARE >= largest["old"]
    why = "the held-out decisions show a gain"
    if agreement == 1.0:
        why = "the new policy decides like the old one"
    elif is_collapsed:
        why = f"the new policy sends {100 * largest['new']:.0f} % to one replica"
    elif worth < LEAST_EFFECTIVE_SIZE:
        why = (
            f"the held-out decisions are worth {worth:.0f} for the new policy, at least {LEAST_EFFECTIVE_SIZE:.0f} are "
            "needed: record more, or with a larger --explore"
        )
    elif high >= 0.0:
        why = "the held-out decisions show no gain beyond the noise"
    return FinetuneResult(
        is_accepted=agreement < 1.0 and not is_collapsed and worth >= LEAST_EFFECTIVE_SIZE and high < 0.0,
        why=why,
        num_learned=len(learned),
        num_held_out=len(held_out),
        recorded_cost=float(held_out.costs.mean()),
        old_cost=float(values["old"].mean()),
        new_cost=float(values["new"].mean()),
        difference=float(difference.mean()),
        low=low,
        high=high,
        kl=kl,
        agreement=agreement,
    )


def _greedy(network: ActorCritic, observation: Observation, prior_logits: FloatArray) -> FloatArray:
    log_probs = _log_probs(network, observation, prior_logits)[0].numpy()
    best: FloatArray = (log_probs == log_probs.max()).astype(np.float64)
    return best / best.sum()  # type: ignore[no-any-return]


def _largest_share(shares: Sequence[FloatArray]) -> float:
    size = max(len(one) for one in shares)
    total = np.zeros(size)
    for one in shares:
        total[: len(one)] += one
    return float(total.max() / len(shares)) if size > 1 else 0.0
