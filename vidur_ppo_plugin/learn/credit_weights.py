"""How much a placement's harm counts, and to whom: the weights of marginal delay, by what the operator asks for.

The one place where `tail_preference` turns into credit. Whoever computes marginal delays (a live simulation, training,
environments) takes the weights from here.
"""

from dataclasses import dataclass

from vidur_ppo_plugin.config import PPOModularFlags


@dataclass(frozen=True)
class CreditWeights:
    """The options of marginal delay; `routing.marginal_delay` says what they mean."""

    latency_power: float
    backlog_weight: float


def credit_weights(flags: PPOModularFlags, tail_preference: float | None = None) -> CreditWeights:
    """The weights at a preference, that of the flags if None; so far they are the flags, whatever the preference."""
    preference = flags.tail_preference if tail_preference is None else tail_preference
    del preference  # it does not change the weights yet
    return CreditWeights(flags.latency_power, flags.backlog_weight)
