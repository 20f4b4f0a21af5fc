"""Rewards of `ppo_modular` from a live simulation: who completes when, and what a placement costs everybody."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.marginal_delay import DrainCost, marginal_delay
from vidur_ppo_plugin.routing.reward import HybridReward, QueueDelay
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot

from .credit import cluster_work
from .replica_source import VidurReplicaSource
from .shadow import ShadowTwin

ActionRewards = NDArray[np.float64]


class DecisionRewards:
    """The reward of each decision, by the chosen mode, and its components since the last update; knows no simulator."""

    def __init__(self, flags: PPOModularFlags) -> None:
        self.mode = flags.reward_mode
        self._flags = flags
        self._queue_delay = QueueDelay(latency_power=flags.latency_power)
        self._hybrid = HybridReward(flags)
        #: The curriculum's multiplier of the hybrid penalties.
        self.penalty_scale = 1.0
        self._completions: list[tuple[float, float]] = []
        self._components: dict[str, list[float]] = {}

    def enters(self, request_id: int, arrived_at_s: float) -> None:
        """A request entered the system."""
        if self.mode == "queue_delay":
            self._queue_delay.on_arrival(arrived_at_s, request_id)

    def leaves(self, request_id: int, arrived_at_s: float, completed_at_s: float) -> None:
        """A request left the system; in the order of times."""
        if self.mode == "queue_delay":
            self._queue_delay.on_completion(completed_at_s, request_id)
        elif self.mode == "hybrid":
            self._completions.append((completed_at_s, completed_at_s - arrived_at_s))

    def since_last_decision(self, now_s: float, snapshot: ClusterSnapshot) -> float:
        """queue_delay and hybrid: what the decision before earned until now."""
        if self.mode == "queue_delay":
            reward = self._queue_delay.take(now_s)
            self._note({"queue_delay": reward})
            return reward
        loads = snapshot.token_load
        mean = loads.mean()
        parts = self._hybrid.reward(
            now_s,
            self._completions,
            loads / mean if mean > 0 else loads,
            snapshot.outstanding_requests,
            penalty_scale=self.penalty_scale,
        )
        self._completions = []
        reward = parts.pop("total_reward")
        self._note(parts)
        return reward

    def note_marginal_delay(self, reward: float) -> None:
        """Record the reward of the action that was taken."""
        self._note({"marginal_delay": reward})

    def _note(self, components: dict[str, float]) -> None:
        for name, value in components.items():
            self._components.setdefault(name, []).append(value)

    def take_components(self) -> dict[str, float]:
        """Mean of every component since the last call."""
        means = {name: float(np.mean(values)) for name, values in self._components.items()}
        self._components = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """What carries over to the next simulation: the averages of the hybrid reward."""
        return self._hybrid.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the clock of a new simulation starts again."""
        self._hybrid.load_state_dict(state)
        self._hybrid.start_run()


class RewardTracker(DecisionRewards):
    """The same in a Vidur simulation, whose requests in flight it can look into."""

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
        if self._shadow is not None:
            increases = self._shadow.marginal_delay(request, now_s)
            return -(increases if observed is None else increases[observed])
        indices = range(self._source.num_replicas) if observed is None else observed.tolist()
        work = cluster_work([self._source.requests_in_flight(index) for index in indices], now_s)
        speeds = self._speed_factors if observed is None else self._speed_factors[observed]
        rewards: ActionRewards = -marginal_delay(
            work,
            prompt_tokens=request.num_prefill_tokens,
            decode_tokens=request.num_decode_tokens - 1,  # the end of prefill yields the first token
            speed=speeds,
            cost=self._cost,
            **self._weights,
        )
        return rewards
