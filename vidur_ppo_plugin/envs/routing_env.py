"""`RoutingEnv`: a step is the placement of a request on a replica, an episode the requests of a seed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.clusters.drive import Arrival, Run
from vidur_ppo_plugin.flags import RewardFlags
from vidur_ppo_plugin.learn.alarms import SafetyLimit
from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards
from vidur_ppo_plugin.routing.heuristics import available_cost
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.scenario import Scenario

from .observations import Observation
from .setup import EnvSetup
from .summary import CLASSES, EpisodeLog


class RoutingEnv(gymnasium.Env[Observation, np.int64]):
    """Places the requests of a scenario one by one; docs/environment.md explains observations, rewards and infos."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (as Gymnasium declares it)

    def __init__(
        self,
        scenario: str | Path | Scenario = "mixed_long",
        *,
        backend: str = "twin",
        reward_mode: str = RewardFlags.reward_mode,
        num_requests: int | None = None,
        load: float | None = None,
        num_replicas: int | None = None,
        replica_speeds: Sequence[float] | None = None,
        max_steps: int | None = None,
        flatten: bool = False,
        latency_limit_penalty: float = 100.0,
        render_mode: str | None = None,
        **flags: Any,
    ) -> None:
        """`scenario`: a name, a YAML file or a `Scenario`; the next few change it.

        `backend`: the compiled twin, or Vidur itself; they behave the same. `max_steps`: truncate there. `flatten`: one
        vector as observation. `flags`: of `ppo_modular`, those that say what a decision is worth and what is seen; with
        `latency_limit_s`, a request that takes longer ends the episode and costs `latency_limit_penalty`.
        """
        self._setup = EnvSetup(
            scenario,
            backend=backend,
            reward_mode=reward_mode,
            num_requests=num_requests,
            load=load,
            num_replicas=num_replicas,
            replica_speeds=replica_speeds,
            max_steps=max_steps,
            flatten=flatten,
            latency_limit_penalty=latency_limit_penalty,
            render_mode=render_mode,
            **flags,
        )
        self.render_mode = None
        #: The scenario with its changes.
        self.scenario = self._setup.scenario
        self._observer = self._setup.build_observer()
        self._limit = SafetyLimit(latency_limit_s=self._setup.flags.latency_limit_s)
        self.observation_space = self._observer.space
        self.action_space = spaces.Discrete(self.scenario.num_replicas)
        self._is_running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the episode of a seed, or of one drawn at random."""
        super().reset(seed=seed)
        self._workload_seed = self._setup.pick_seed(seed, self.np_random)
        requests = self.scenario.requests(self._workload_seed)
        self._is_long = requests.prompt_tokens > self.scenario.class_boundary_tokens
        self._cluster = self._setup.start(self._workload_seed, requests)
        self._rewards = DecisionRewards(self._setup.flags)
        self._log = EpisodeLog(self.scenario.num_replicas)
        visibility = Visibility(report_delay_s=self.scenario.report_delay_s, drains=self.scenario.drains(requests))
        self._run = Run(self._cluster, [self._log], visibility=visibility)
        self._observer.reset()
        self._num_steps = 0
        self._is_running = True
        arrival = self._run.next_arrival()
        assert arrival is not None  # a scenario has at least one request
        observation = self._observe(arrival)
        return observation, self._info([])

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Place the request, and go on to the next; after the last one, until all are completed."""
        if not self._is_running:
            raise RuntimeError("the episode is over, or none has begun: call reset() first")
        if not self.action_space.contains(action):
            raise ValueError(f"action must be a replica in 0 ... {self.scenario.num_replicas - 1}, got {action!r}")
        replica, action_rewards = self._place(int(action))
        arrival = self._run.next_arrival()
        completions = self._log.take_completions()
        is_over_limit = self._complete(completions)
        snapshot = self._cluster.snapshot() if arrival is None else arrival.snapshot
        loads, queue_lengths = snapshot.token_load, snapshot.outstanding_requests
        reward = self._rewards.since_last_decision(self._cluster.now_s, loads, queue_lengths)
        if action_rewards is not None:
            reward = float(action_rewards[replica])
        if is_over_limit:
            reward -= self._setup.latency_limit_penalty
        terminated = is_over_limit or arrival is None
        truncated = not terminated and self._num_steps == self._setup.max_steps
        self._is_running = not (terminated or truncated)
        observation = self._observer.nothing() if terminated or arrival is None else self._observe(arrival)
        info = {**self._info(completions, is_last=terminated), "replica": replica}
        if action_rewards is not None:
            info["action_rewards"] = action_rewards
        if not self._is_running:
            info["summary"] = {**self._log.summary(self._is_long), "is_over_limit": is_over_limit}
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which replicas take new requests, as sb3-contrib's MaskablePPO asks for it."""
        available = self._arrival.seen.available
        return np.ones(self.scenario.num_replicas, np.bool_) if available is None else available.copy()

    def _place(self, action: int) -> tuple[int, FloatArray | None]:
        """Where the request went, and what each replica would have been worth if that is known at once."""
        replica = action
        if not self.action_masks()[action]:
            # A drained replica turns the request away, and the others share it as `least_tokens` would.
            seen = self._arrival.seen
            replica = int(np.argmin(available_cost(seen.token_load, seen)))
        action_rewards = None
        if self._rewards.pays_at_once:
            snapshot, request = self._arrival.snapshot, self._arrival.request
            action_rewards = self._rewards.of_placements(
                self._cluster.marginal_delay(**self._setup.flags.credit_weights),
                snapshot.token_load,
                snapshot.outstanding_requests,
                request.prompt_tokens,
            )
        self._run.place(self._arrival, replica)
        self._num_steps += 1
        return replica, action_rewards

    def _complete(self, completions: list[Completion]) -> bool:
        """Requests were completed; whether one of them took too long."""
        for done in completions:
            self._rewards.leaves(done.request, done.arrived_at_s, done.completed_at_s)
        return any([self._limit.on_completion(done.latency_s) for done in completions])

    def _observe(self, arrival: Arrival) -> Observation:
        """See the request that has to be placed, which thereby enters the system."""
        self._arrival = arrival
        self._rewards.enters(arrival.number, arrival.request.arrived_at_s)
        return self._observer.observe(arrival.seen, arrival.request)

    def _info(self, completions: list[Completion], *, is_last: bool = False) -> dict[str, Any]:
        # Tuples where lengths vary: Gymnasium's vector environments stack arrays.
        info: dict[str, Any] = {
            "time_s": self._cluster.now_s,
            "workload_seed": self._workload_seed,
            "completed": tuple(done.request for done in completions),
            "latencies_s": tuple(done.latency_s for done in completions),
            "ttfts_s": tuple(done.ttft_s for done in completions),
            "action_mask": self.action_masks().astype(np.int8),
        }
        if not is_last:
            info["request"] = self._arrival.number
            info["request_class"] = CLASSES[int(self._is_long[self._arrival.number])]
        return info
