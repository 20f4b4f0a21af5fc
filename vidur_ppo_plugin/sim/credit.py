"""Rewards of `ppo_modular` from a live simulation: who completes when, and what a placement costs everybody."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.credit.analytic import DrainCost, marginal_delay
from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards
from vidur_ppo_plugin.learn.credit.exact import ShadowTwin

from .replica_source import VidurReplicaSource

ActionRewards = NDArray[np.float64]


class RewardTracker(DecisionRewards):
    """The reward of each decision in a Vidur simulation, whose requests it is told of and can look into."""

    def __init__(
        self,
        flags: PPOModularFlags,
        source: VidurReplicaSource,
        *,
        cost: DrainCost,
        speed_factors: list[float],
        shadow: ShadowTwin | None = None,
    ) -> None:
        """`shadow`: where marginal delays come from; without one, from the linear model of `cost`."""
        super().__init__(flags)
        self._shadow = shadow
        self._source = source
        self._cost = cost
        self._speed_factors = np.array(speed_factors)
        self._weights = flags.credit_weights

    def on_arrival(self, request: Any) -> None:
        """A request entered the system."""
        self.enters(request.id, request.arrived_at)

    def on_completion(self, request: Any) -> None:
        """A request left the system."""
        self.leaves(request.id, request._arrived_at, request._completed_at)

    def of_every_action(self, request: Any, now_s: float, observed: NDArray[np.intp] | None) -> ActionRewards:
        """marginal_delay: the reward of placing the request on each replica (of the observed ones)."""
        prompt_tokens, decode_tokens = request.num_prefill_tokens, request.num_decode_tokens
        if self._shadow is not None:
            increases = self._shadow.marginal_delay(now_s, prompt_tokens, decode_tokens)
            return -(increases if observed is None else increases[observed])
        indices = range(self._source.num_replicas) if observed is None else observed.tolist()
        rewards: ActionRewards = -marginal_delay(
            self._source.work_left(indices, now_s),
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens - 1,  # the end of prefill yields the first token
            speed=self._speed_factors if observed is None else self._speed_factors[observed],
            cost=self._cost,
            **self._weights,
        )
        return rewards
