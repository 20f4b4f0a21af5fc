"""A twin beside a live simulation, told of every placement: always where Vidur is, free to look ahead."""

from typing import Any

from vidur_ppo_plugin.flags import RewardFlags
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Twin

# Placements after which completed requests are forgotten: nobody asks the shadow for them.
_FORGET_EVERY = 1024


class ShadowTwin:
    """Exact credit for placements: it knows true output lengths, so it must not feed a decision."""

    def __init__(self, config: TwinConfig, flags: RewardFlags) -> None:
        self._twin = Twin(config)
        self._options = flags.credit_weights

    def place(self, replica: int, request: Any) -> None:
        """A request was sent to a replica."""
        twin = self._twin
        twin.submit(replica, request.arrived_at, request.num_prefill_tokens, request.num_decode_tokens)
        if twin.num_submitted % _FORGET_EVERY == 0:
            twin.completions()

    def marginal_delay(self, request: Any, now_s: float) -> FloatArray:
        """What placing the request on each replica adds to everybody's latency, if nobody else arrived."""
        return self._twin.marginal_delay(now_s, request.num_prefill_tokens, request.num_decode_tokens, **self._options)
