"""Exact marginal delay: a twin beside a live cluster, always where the cluster is, and free to look ahead."""

from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Twin

# Placements after which completed requests are forgotten: nobody asks the shadow for them.
_FORGET_EVERY = 1024


class ShadowTwin:
    """Told of every placement, it says what another one would do to everybody.

    It knows true output lengths, so it must not feed a decision.
    """

    def __init__(self, config: TwinConfig) -> None:
        self._twin = Twin(config)

    def place(self, replica: int, arrived_at_s: float, prompt_tokens: int, decode_tokens: int) -> None:
        """A request was sent to a replica."""
        twin = self._twin
        twin.submit(replica, arrived_at_s, prompt_tokens, decode_tokens)
        if twin.num_submitted % _FORGET_EVERY == 0:
            twin.completions()

    def marginal_delay(
        self,
        now_s: float,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        latency_power: float = 1.0,
        backlog_weight: float = 0.0,
    ) -> FloatArray:
        """What placing a request on each replica adds to everybody's latency, if nobody else arrived."""
        return self._twin.marginal_delay(
            now_s, prompt_tokens, decode_tokens, latency_power=latency_power, backlog_weight=backlog_weight
        )
