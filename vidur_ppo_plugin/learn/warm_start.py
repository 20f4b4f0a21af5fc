"""Warm start: clone the actor from demonstrations before the run, and keep it near them while learning begins.

Behaviour cloning is a classification of replicas: cross-entropy between the policy at temperature 1 and what the
teacher chose. Decisions among different numbers of replicas cannot share a tensor, so they are grouped by that number.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.policy.network import ActorCritic
from vidur_ppo_plugin.routing.prior import Prior

from .demonstrations import Demonstrations

logger = logging.getLogger(__name__)

# Of ten decisions one is never trained on, and tells how well the others were understood.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class CloningReport:
    """Losses and accuracies of the cloning; accuracies are on decisions that were not trained on."""

    train_loss: float
    accuracy: float
    prior_accuracy: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Decisions among the same number of replicas."""

    replicas: Tensor
    request: Tensor
    prior_logits: Tensor
    actions: Tensor

    def __len__(self) -> int:
        return len(self.actions)

    def logits(self, network: ActorCritic, chosen: Tensor) -> Tensor:
        encoded = network.encode(self.replicas[chosen], self.request[chosen])
        return network.logits(encoded, self.prior_logits[chosen])

    def loss(self, network: ActorCritic, chosen: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.logits(network, chosen), self.actions[chosen])


class DemonstrationSet:
    """Demonstrations as tensors, with the logits of the prior that the network is a residual of."""

    def __init__(
        self, demonstrations: Demonstrations, prior: Prior, decisions: NDArray[np.int64] | None = None
    ) -> None:
        """Take all demonstrations, or only the given decisions."""
        chosen = np.arange(len(demonstrations)) if decisions is None else np.sort(decisions)
        sizes = demonstrations.num_replicas[chosen]
        self._groups = [_group(demonstrations, prior, chosen[sizes == size]) for size in np.unique(sizes)]
        self._ends = np.cumsum([len(group) for group in self._groups])
        self.digest = demonstrations.digest

    def __len__(self) -> int:
        return int(self._ends[-1])

    def loss(self, network: ActorCritic, *, size: int, generator: torch.Generator) -> Tensor:
        """Cross-entropy on a random minibatch, of one group: groups are drawn by their number of decisions."""
        drawn = int(torch.randint(len(self), (), generator=generator))
        group = self._groups[int(np.searchsorted(self._ends, drawn, side="right"))]
        return group.loss(network, torch.randint(len(group), (size,), generator=generator))

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[tuple[_Group, Tensor]]:
        """Every decision once, in random order; each minibatch is of one group."""
        parts = []
        for group in self._groups:
            order = torch.randperm(len(group), generator=generator)
            parts += [(group, part) for part in torch.tensor_split(order, max(1, round(len(group) / size)))]
        for index in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[index]

    def accuracy(self, network: ActorCritic | None = None) -> float:
        """Share of decisions in which the policy's best replica is the teacher's; without a network, the prior's.

        Ties count as the fair draw that they are broken by: among k equally good replicas, 1 / k.
        """
        hits = 0.0
        with torch.no_grad():
            for group in self._groups:
                everything = torch.arange(len(group))
                logits = group.prior_logits if network is None else group.logits(network, everything)
                is_best = logits == logits.amax(dim=1, keepdim=True)
                is_hit = is_best.gather(1, group.actions[:, None])[:, 0]
                hits += float((is_hit / is_best.sum(dim=1)).sum())
        return hits / len(self)


def _group(demonstrations: Demonstrations, prior: Prior, decisions: NDArray[np.int64]) -> _Group:
    starts, size = demonstrations.offsets[decisions], demonstrations.num_replicas[decisions[0]]
    return _Group(
        replicas=torch.tensor(demonstrations.replicas[starts[:, None] + np.arange(size)]),
        request=torch.tensor(demonstrations.request[decisions]),
        prior_logits=torch.tensor(np.stack([demonstrations.prior_logits(int(index), prior) for index in decisions])),
        actions=torch.tensor(demonstrations.actions[decisions]),
    )


def split(num_decisions: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decisions to train on and to validate on, by seed; a single decision has to do for both."""
    order = np.random.default_rng(seed).permutation(num_decisions)
    num_validation = max(1, round(VALIDATION_SHARE * num_decisions))
    return (order[num_validation:] if num_decisions > 1 else order), order[:num_validation]


def clone(network: ActorCritic, demonstrations: Demonstrations, prior: Prior, flags: PPOModularFlags) -> CloningReport:
    """Train the network's actor, in place, to do as the teachers did."""
    training, validation = (
        DemonstrationSet(demonstrations, prior, decisions) for decisions in split(len(demonstrations), flags.seed)
    )
    # The critic is not trained (nobody has rewards yet), and without a gradient Adam leaves its weights alone.
    optimizer = torch.optim.Adam(network.parameters(), lr=flags.bc_lr, eps=1e-5)
    generator = torch.Generator().manual_seed(flags.seed)
    prior_accuracy, train_loss = validation.accuracy(), float("nan")
    for epoch in range(flags.bc_epochs):
        losses = []
        for group, chosen in training.minibatches(flags.minibatch_size, generator):
            loss = group.loss(network, chosen)
            if not torch.isfinite(loss):
                raise ValueError(f"behaviour cloning: the loss of epoch {epoch + 1} is {loss.item()}; lower bc_lr")
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), flags.max_grad_norm)
            optimizer.step()
            losses.append(loss.item() * len(chosen))
        train_loss = sum(losses) / len(training)
        # The first epoch already shows whether the teacher can be understood at all.
        if epoch in (0, flags.bc_epochs - 1):
            logger.info(
                "behaviour cloning: epoch %d of %d, train loss %.3f, validation accuracy %.1f%% "
                "(the prior's best: %.1f%%; %d decisions, %d of them for validation)",
                *(epoch + 1, flags.bc_epochs, train_loss, 100 * validation.accuracy(network)),
                *(100 * prior_accuracy, len(demonstrations), len(validation)),
            )
    accuracy = validation.accuracy(network)
    if accuracy < prior_accuracy:
        logger.warning("behaviour cloning: the prior alone agrees more often; lower bc_epochs or bc_lr, or go without")
    return CloningReport(train_loss=train_loss, accuracy=accuracy, prior_accuracy=prior_accuracy)
