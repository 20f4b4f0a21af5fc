"""Colours of schedulers, replicas and changes, told apart by readers with any colour vision."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Okabe & Ito 2008 without black, which is the reference's, and yellow, which is too pale for a line.
_QUALITATIVE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_REFERENCE_COLOUR = "#1c1f23"
# More schedulers than colours: the same colours again with another dash.
_DASHES = ("-", "--", ":", "-.")

# The ends and the middle of the diverging scale: orange (worse), grey (no change), blue (better).
_WORSE, _NEUTRAL, _BETTER = "#e8871e", "#f1f2f4", "#3d8fd1"
# A change of this size or more has the full colour.
_FULL_CHANGE = 0.5

# Eleven steps of viridis without its palest end: an order that survives any number of replicas.
_SEQUENTIAL = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
_MOST_QUALITATIVE_REPLICAS = len(_QUALITATIVE)


@dataclass(frozen=True)
class SchedulerStyle:
    """The line of a scheduler; `slot` numbers the colours and `dash` is one of matplotlib's."""

    colour: str
    dash: str
    slot: int
    is_reference: bool


def scheduler_styles(metadata: Mapping[str, Any]) -> dict[str, SchedulerStyle]:
    """A style for each scheduler, by its place in the comparison: the same in every plot."""
    reference = metadata["reference"]
    styles = {reference: SchedulerStyle(_REFERENCE_COLOUR, "-", -1, True)}
    for index, label in enumerate(label for label in metadata["schedulers"] if label != reference):
        slot = index % len(_QUALITATIVE)
        dash = _DASHES[index // len(_QUALITATIVE) % len(_DASHES)]
        styles[label] = SchedulerStyle(_QUALITATIVE[slot], dash, slot, False)
    return styles


def replica_colours(num_replicas: int) -> list[str]:
    """A colour for each replica: distinct ones for few, steps of one scale for many."""
    if num_replicas <= _MOST_QUALITATIVE_REPLICAS:
        return list(_QUALITATIVE[:num_replicas])
    steps = np.linspace(0, len(_SEQUENTIAL) - 1, num_replicas)
    return [
        _mix(_SEQUENTIAL[int(step)], _SEQUENTIAL[min(int(step) + 1, len(_SEQUENTIAL) - 1)], step % 1) for step in steps
    ]


def change_strength(change: float) -> float:
    """How strongly a change is coloured, from 0 to 1: the root of its size, so that small ones show."""
    return math.sqrt(min(abs(change) / _FULL_CHANGE, 1.0))


def diverging_colour(goodness: float) -> str:
    """The colour of a relative change that is positive where it is an improvement."""
    return _mix(_NEUTRAL, _BETTER if goodness > 0 else _WORSE, change_strength(goodness))


def _mix(first: str, second: str, share: float) -> str:
    pairs = [(int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
