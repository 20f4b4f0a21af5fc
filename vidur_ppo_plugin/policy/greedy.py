"""What deciding greedily means, for the agent that learns and for the exported policy alike."""

import random

import numpy as np
from numpy.typing import NDArray

from .numpy_actor import Float32Array

# Logit of a replica that must not be chosen: finite, so that arithmetic stays finite; nothing comes near it.
MASKED = np.float32(-1e9)


def masked(logits: Float32Array, allowed: NDArray[np.bool_] | None) -> Float32Array:
    """The prior's logits with replicas that must not be chosen out of the question."""
    return logits if allowed is None else np.where(allowed, logits, MASKED)


def best(logits: list[float], rng: random.Random) -> int:
    """Index of the largest; of several equal ones each is equally likely, by the given generator."""
    highest = max(logits)
    if logits.count(highest) == 1:
        return logits.index(highest)
    ties = [index for index, logit in enumerate(logits) if logit == highest]
    return ties[rng.randrange(len(ties))]
