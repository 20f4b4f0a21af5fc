"""The reward of each decision as it is made, by the mode that was chosen, and what it is made of, for the record."""

from typing import Any

import numpy as np

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot

from .hybrid import HybridReward
from .queue_delay import QueueDelay


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
