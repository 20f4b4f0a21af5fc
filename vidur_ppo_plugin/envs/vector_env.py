"""`VectorRoutingEnv`: many clusters in step, for one forward pass of a policy over all of them.

It gives what `gymnasium.vector.SyncVectorEnv` gives of as many `RoutingEnv`s, several times as fast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.learn.credit.decision_rewards import DecisionRewards
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.twin.cluster import each_completion
from vidur_ppo_plugin.twin.vector import VectorTwin

from .observations import Observation, stacked
from .setup import EnvSetup
from .summary import CLASSES, EpisodeLog

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_WAY_OUT = "use vectorization_mode='sync' or 'async'"


class VectorRoutingEnv(VectorEnv[Observation, Ints, NDArray[Any]]):
    """Clusters of one scenario, each with the requests of its own seed; episodes begin and end together."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, scenario: str | Path | Scenario = "mixed_long", **options: Any) -> None:
        """`options`: those of `RoutingEnv`, without Vidur as backend and without a latency limit."""
        if num_envs < 1:
            raise ValueError(f"num_envs must be >= 1, got {num_envs}")
        setup = EnvSetup(scenario, **options)
        if setup.backend != "twin" or setup.twin is None:
            raise ValueError(f"backend must be 'twin' for clusters in step, got {setup.backend!r}: {_WAY_OUT}")
        if setup.flags.latency_limit_s:
            limit_s = setup.flags.latency_limit_s
            raise ValueError(f"latency_limit_s must be 0 where episodes end together, got {limit_s}: {_WAY_OUT}")
        self._setup = setup
        #: The scenario with its changes.
        self.scenario = setup.scenario
        self.num_envs = num_envs
        self.render_mode = None
        self._observers = [setup.build_observer() for _ in range(num_envs)]
        self.single_observation_space = self._observers[0].space
        self.single_action_space = spaces.Discrete(self.scenario.num_replicas)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators = [np_random()[0] for _ in range(num_envs)]
        no_requests = [self.scenario.requests(setup.any_seed, 1)] * num_envs
        self._twin = VectorTwin(setup.twin, no_requests, features=self._observers[0].features)
        self._rows = np.arange(num_envs)
        self._has_begun = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in every cluster; `seed` is that of the first, the next has the next, or one for each."""
        if options is not None and "reset_mask" in options:
            raise ValueError(f"options['reset_mask'] does not work where episodes begin together: {_WAY_OUT}")
        for index, given in enumerate(seeds := self._seeds(seed)):
            if given is not None:
                self._generators[index] = np_random(given)[0]
        scenario, pairs = self.scenario, zip(seeds, self._generators, strict=True)
        self._workload_seeds = np.array([self._setup.pick_seed(given, generator) for given, generator in pairs])
        requests = [scenario.requests(int(workload_seed)) for workload_seed in self._workload_seeds]
        self._arrived_at_s = np.array([part.arrived_at_s for part in requests])
        self._prompt_tokens = np.array([part.prompt_tokens for part in requests])
        self._decode_tokens = np.array([part.decode_tokens for part in requests])
        self._is_long = self._prompt_tokens > scenario.class_boundary_tokens
        self._twin.reset(requests)
        self._rewards = [DecisionRewards(self._setup.flags) for _ in requests]
        self._visibilities = [
            Visibility(report_delay_s=scenario.report_delay_s, drains=scenario.drains(part)) for part in requests
        ]
        self._logs = [EpisodeLog(scenario.num_replicas) for _ in requests]
        for observer in self._observers:
            observer.reset()
        self._num_steps = 0
        self._has_begun, self._is_last, self._is_over = True, False, False
        self._now_s = self._arrived_at_s[:, 0].copy()
        return self._observe(), self._infos([[] for _ in requests])

    def step(self, actions: Ints) -> tuple[Observation, FloatArray, Bools, Bools, dict[str, Any]]:
        """Place the request of every cluster; after the end of the episodes, begin new ones instead."""
        if not self._has_begun:
            raise RuntimeError("no episode has begun: call reset() first")
        if self._is_over:
            observation, infos = self.reset()
            return observation, np.zeros(self.num_envs), self._all(False), self._all(False), infos
        replicas = self._open_replicas(self._checked(actions))
        action_rewards = self._place(replicas)
        self._is_last = self._num_steps == self._arrived_at_s.shape[1]
        self._is_over = self._is_last or self._num_steps == self._setup.max_steps
        completions = self._go_on()
        rewards = self._earned(completions)
        if action_rewards is not None:
            rewards = action_rewards[self._rows, replicas]
        observation = stacked([one.nothing() for one in self._observers]) if self._is_last else self._observe()
        infos = self._infos(completions)
        self._add_step_infos(infos, replicas, action_rewards)
        is_cut = self._is_over and not self._is_last
        return observation, rewards, self._all(self._is_last), self._all(is_cut), infos

    def action_masks(self) -> Bools:
        """Which replicas take new requests, for each cluster."""
        return self._available.copy()

    # --- placing ------------------------------------------------------------------------------------------------

    def _checked(self, actions: Any) -> Ints:
        array = np.asarray(actions)
        if array.shape != (self.num_envs,) or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"actions must be {self.num_envs} whole numbers, got {actions!r}")
        if array.min() < 0 or array.max() >= self.scenario.num_replicas:
            raise ValueError(f"actions must be replicas in 0 ... {self.scenario.num_replicas - 1}, got {actions!r}")
        return array.astype(np.int64)

    def _open_replicas(self, actions: Ints) -> Ints:
        """The actions, replaced as in `RoutingEnv` where a replica is drained."""
        is_open = self._available[self._rows, actions]
        if is_open.all():
            return actions
        return np.where(is_open, actions, np.where(self._available, self._seen_load, np.inf).argmin(axis=1))

    def _place(self, replicas: Ints) -> FloatArray | None:
        """Returns what every replica would have been worth, if that is known at once."""
        flags, action_rewards = self._setup.flags, None
        prompt_tokens = self._prompt_tokens[:, self._num_steps].tolist()
        if flags.pays_at_once:
            action_rewards = self._worth(self._twin.marginal_delay(**flags.credit_weights), prompt_tokens)
        self._twin.act(replicas)
        for cluster, replica in enumerate(replicas.tolist()):
            self._visibilities[cluster].on_dispatch(replica, prompt_tokens[cluster])
            self._logs[cluster].count(replica)
        self._num_steps += 1
        return action_rewards

    def _worth(self, increases_s: FloatArray, prompt_tokens: list[int]) -> FloatArray:
        """What every replica would be worth, given what a placement there adds to everybody's latency."""
        if self._setup.flags.reward_mode == "marginal_delay":
            return -increases_s
        seen = self._twin.observe()
        columns = self._rewards, increases_s, seen.token_load, seen.outstanding, prompt_tokens
        return np.stack([tracker.of_placements(*row) for tracker, *row in zip(*columns, strict=True)])

    def _go_on(self) -> list[list[Completion]]:
        """To the next requests, or until everything is completed; what was completed on the way in each cluster."""
        if self._is_last:
            self._twin.drain()
        else:
            self._twin.observe()
        clusters, done = self._twin.completions()
        completions: list[list[Completion]] = [[] for _ in self._logs]
        decode_tokens = self._decode_tokens[clusters, done.index].tolist()
        for cluster, one in zip(clusters.tolist(), each_completion(done, decode_tokens), strict=True):
            completions[cluster].append(one)
        for log, part in zip(self._logs, completions, strict=True):
            part.sort()
            log.on_completions(part)
        if self._is_last:
            self._check_drained()
            self._now_s = np.array([part[-1].completed_at_s for part in completions])
        else:
            self._now_s = self._arrived_at_s[:, self._num_steps].copy()
        return completions

    def _check_drained(self) -> None:
        left = [self._num_steps - log.num_completed for log in self._logs]
        if any(left):
            raise ValueError(
                f"{sum(left)} requests can never run: they are too long for the replicas' memory or batches"
            )

    def _earned(self, completions: list[list[Completion]]) -> FloatArray:
        """queue_delay and hybrid: what each cluster earned since the decision before, by what the window shows."""
        rewards = np.zeros(self.num_envs)
        mode = self._setup.flags.reward_mode
        if mode == "marginal_delay":
            return rewards
        # At the end nothing is in flight, and queue_delay does not look.
        loads = queue_lengths = np.zeros((self.num_envs, self.scenario.num_replicas))
        if mode == "hybrid" and not self._is_last:
            seen = self._twin.observe()
            loads, queue_lengths = seen.token_load, seen.outstanding
        for cluster, (tracker, part) in enumerate(zip(self._rewards, completions, strict=True)):
            for one in part:
                tracker.leaves(one.request, one.arrived_at_s, one.completed_at_s)
            now_s = float(self._now_s[cluster])
            rewards[cluster] = tracker.since_last_decision(now_s, loads[cluster], queue_lengths[cluster])
        return rewards

    # --- showing ------------------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        """See the requests that have to be placed, which thereby enter the systems."""
        for tracker, now_s in zip(self._rewards, self._now_s.tolist(), strict=True):
            tracker.enters(self._num_steps, now_s)
        if self.scenario.report_delay_s or not self._observers[0].sees_many:
            return self._observe_one_by_one()
        seen = self._twin.observe()
        self._seen_load = seen.token_load
        self._available = np.ones(self._seen_load.shape, np.bool_)
        for cluster, now_s in enumerate(self._now_s.tolist() if self.scenario.drained else ()):
            available = self._visibilities[cluster].available(now_s, self.scenario.num_replicas)
            if available is not None:
                self._available[cluster] = available
        return self._observers[0].observe_many(seen, self._available)

    def _observe_one_by_one(self) -> Observation:
        """Where what the twin shows is not what the router sees, or not all of it."""
        self._available = np.ones((self.num_envs, self.scenario.num_replicas), np.bool_)
        self._seen_load = np.empty(self._available.shape)
        observations = []
        for cluster, (observer, visibility) in enumerate(zip(self._observers, self._visibilities, strict=True)):
            snapshot, request = self._twin.snapshot(cluster)
            seen = visibility.view(snapshot)
            self._seen_load[cluster] = seen.token_load
            if seen.available is not None:
                self._available[cluster] = seen.available
            observations.append(observer.observe(seen, request))
        return stacked(observations)

    def _infos(self, completions: list[list[Completion]]) -> dict[str, Any]:
        values: dict[str, Any] = {
            "time_s": self._now_s.copy(),
            "workload_seed": self._workload_seeds.copy(),
            "completed": [tuple(one.request for one in part) for part in completions],
            "latencies_s": [tuple(one.completed_at_s - one.arrived_at_s for one in part) for part in completions],
            "ttfts_s": [tuple(one.first_token_at_s - one.arrived_at_s for one in part) for part in completions],
            "action_mask": self._available.astype(np.int8),
        }
        if not self._is_last:
            values["request"] = np.full(self.num_envs, self._num_steps)
            values["request_class"] = [CLASSES[int(is_long)] for is_long in self._is_long[:, self._num_steps]]
        infos: dict[str, Any] = {}
        for name, value in values.items():
            self._add(infos, name, value)
        return infos

    def _add_step_infos(self, infos: dict[str, Any], replicas: Ints, action_rewards: FloatArray | None) -> None:
        self._add(infos, "replica", replicas.copy())
        if action_rewards is not None:
            self._add(infos, "action_rewards", action_rewards)
        if self._is_over:
            for cluster, log in enumerate(self._logs):
                summary = {**log.summary(self._is_long[cluster]), "is_over_limit": False}
                self._add_info(infos, {"summary": summary}, cluster)

    def _add(self, infos: dict[str, Any], name: str, value: Any) -> None:
        """Add an info that every cluster has, in the form of Gymnasium's vector environments."""
        if isinstance(value, list):
            objects = np.empty(self.num_envs, object)
            for cluster, item in enumerate(value):  # one by one: a tuple is an object here, not a row
                objects[cluster] = item
            value = objects
        infos[name], infos[f"_{name}"] = value, self._all(True)

    def _all(self, value: bool) -> Bools:
        return np.full(self.num_envs, value)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int):
            return [seed + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed must be one number or {self.num_envs}, one for each cluster, got {len(seed)}")
        return list(seed)
