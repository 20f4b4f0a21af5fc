"""What an update learns from: decisions of one or more streams as tensors, with all that is fixed during the update."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Group:
    """Decisions among the same number of replicas: others cannot share a tensor with them."""

    replicas: Tensor
    request: Tensor
    prior_logits: Tensor
    reference_logits: Tensor
    actions: Tensor
    temperatures: Tensor
    epsilons: Tensor
    old_log_probs: Tensor
    old_action_log_probs: Tensor
    advantages: Tensor
    #: Of every action, where the update takes the expectation over them; else None.
    action_advantages: Tensor | None

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of time of one stream, for the recurrent critic: rows of a group, and the memory before the first."""

    group: Group
    rows: Tensor
    hidden: Tensor
    old_values: Tensor
    returns: Tensor


class Batch:
    """All decisions of an update, numbered through the groups, and the critic's segments."""

    def __init__(self, groups: list[Group], segments: list[Segment]) -> None:
        self.groups = groups
        self.segments = segments
        self._firsts = [sum(len(group) for group in groups[:index]) for index in range(len(groups))]

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def parts(self, chosen: Tensor) -> Iterator[tuple[Group, Tensor, float]]:
        """The chosen decisions group by group: the group, its rows, and their share of the chosen ones."""
        if len(self.groups) == 1:
            yield self.groups[0], chosen, 1.0
            return
        for group, first in zip(self.groups, self._firsts, strict=True):
            rows = chosen[(chosen >= first) & (chosen < first + len(group))] - first
            if len(rows):
                yield group, rows, len(rows) / len(chosen)

    def segments_of(self, part: int, num_parts: int) -> list[Segment]:
        """The segments that go with one of so many minibatches."""
        indices = torch.tensor_split(torch.arange(len(self.segments)), num_parts)[part]
        return [self.segments[index] for index in indices.tolist()]
