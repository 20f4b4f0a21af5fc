"""The reward of each decision as it is made, by the mode that was chosen, and what it is made of, for the record."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.snapshot import FloatArray

from .hybrid import HybridReward, normalised
from .hybrid_placement import placement_rewards
from .queue_delay import QueueDelay


class DecisionRewards:
    """The reward of each decision, by the chosen mode, and its components since the last update; knows no simulator."""

    def __init__(self, flags: PPOModularFlags) -> None:
        self.mode = flags.reward_mode
        #: Whether rewards come from `of_placements`, at the decision; otherwise from `since_last_decision`.
        self.pays_at_once = flags.pays_at_once
        self._flags = flags
        self._queue_delay = QueueDelay(latency_power=flags.latency_power)
        self._hybrid = HybridReward(flags)
        #: The curriculum's multiplier of the hybrid penalties.
        self.penalty_scale = 1.0
        self._completions: list[tuple[float, float]] = []
        self._offered: dict[str, FloatArray] = {}
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

    def since_last_decision(self, now_s: float, loads: FloatArray, queue_lengths: FloatArray) -> float:
        """queue_delay and hybrid: what the decision before earned until now, as the window shows it.

        `loads`: in tokens, of each replica. To be called at every decision but the first, also where rewards are paid
        at once: those go by the window's figures.
        """
        if self.mode == "marginal_delay":
            return 0.0
        if self.mode == "queue_delay":
            reward = self._queue_delay.take(now_s)
            self._note({"queue_delay": reward})
            return reward
        parts = self._hybrid.reward(
            now_s, self._completions, normalised(loads), queue_lengths, penalty_scale=self.penalty_scale
        )
        self._completions = []
        reward = parts.pop("total_reward")
        self._note(parts)
        return reward

    def of_placements(
        self, increases_s: FloatArray, loads: FloatArray, queue_lengths: FloatArray, prompt_tokens: float
    ) -> FloatArray:
        """What placing the request on each replica is worth, given what that adds to everybody's latency."""
        if self.mode == "marginal_delay":
            self._offered = {"marginal_delay": -increases_s}
            return -increases_s
        parts = placement_rewards(
            self._hybrid.figures,
            increases_s,
            loads,
            queue_lengths,
            prompt_tokens,
            self._flags,
            penalty_scale=self.penalty_scale,
        )
        # What no placement changes is left out: how much better or worse than the mean of all replicas.
        self._offered = {f"credit_{name}": values - values.mean() for name, values in parts.items()}
        return parts["total_reward"]

    def note_placement(self, index: int) -> None:
        """Record what was offered for the placement that was chosen."""
        self._note({name: float(values[index]) for name, values in self._offered.items()})

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


@dataclass(frozen=True)
class Stretch:
    """Decisions in a row of one cluster, made at all `moments_s` but the last, at which the last one is paid.

    `loads` and `queue_lengths`, [moments, replicas], are those of every moment; `requests`, `arrived_at_s` and
    `completed_at_s` say who left the system since the first, in any order.
    """

    moments_s: FloatArray
    loads: FloatArray
    queue_lengths: FloatArray
    prompt_tokens: NDArray[np.int64]
    requests: NDArray[np.int64]
    arrived_at_s: FloatArray
    completed_at_s: FloatArray
    #: What each placement would have added to everybody's latency, [decisions, replicas]; None if that is not asked.
    increases_s: FloatArray | None


def follow(rewards: DecisionRewards, first: int, stretch: Stretch) -> tuple[list[float], FloatArray | None]:
    """What each decision earned, by rewards that know what happened before; and what every replica was worth.

    They place the requests number `first` and on.
    """
    order = np.argsort(stretch.completed_at_s, kind="stable")
    columns = stretch.requests, stretch.arrived_at_s, stretch.completed_at_s
    done = list(zip(*(column[order].tolist() for column in columns), strict=True))
    moments_s, prompts = stretch.moments_s.tolist(), stretch.prompt_tokens.tolist()
    earned: list[float] = []
    offered: list[FloatArray] = []
    at = 0
    for step, (now_s, next_s) in enumerate(pairwise(moments_s)):
        rewards.enters(first + step, now_s)
        if stretch.increases_s is not None:
            figures = stretch.increases_s[step], stretch.loads[step], stretch.queue_lengths[step], prompts[step]
            offered.append(rewards.of_placements(*figures))
        while at < len(done) and done[at][2] <= next_s:
            rewards.leaves(*done[at])
            at += 1
        earned.append(rewards.since_last_decision(next_s, stretch.loads[step + 1], stretch.queue_lengths[step + 1]))
    return earned, np.stack(offered) if offered else None
