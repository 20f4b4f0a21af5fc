"""How much a placement's harm counts, and to whom: the weights of marginal delay.

They do not depend on `tail_preference`: only training that looks ahead (`train/look_ahead.py`) pays for what it asks.
"""

from dataclasses import dataclass

from vidur_ppo_plugin.flags import PPOModularFlags


@dataclass(frozen=True)
class CreditWeights:
    """The options of marginal delay; `routing.marginal_delay` says what they mean."""

    latency_power: float
    backlog_weight: float


def credit_weights(flags: PPOModularFlags) -> CreditWeights:
    """As the flags have them."""
    return CreditWeights(flags.latency_power, flags.backlog_weight)
