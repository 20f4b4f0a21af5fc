"""`ppo_modular` in a run: the policy as a router, and as a router that learns from what its decisions lead to.

Both are driven by `clusters.drive`, and know the cluster by its protocol only: Vidur, or its twin.
"""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.clusters.cluster import Cluster, Completion
from vidur_ppo_plugin.clusters.drive import Arrival, Listener
from vidur_ppo_plugin.policy.policy import Observed
from vidur_ppo_plugin.record.recorder import Recorder
from vidur_ppo_plugin.routing.features import Observation
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from .agent import Agent
from .alarms import CollapseAlarm, SafetyLimit
from .credit.decision_rewards import DecisionRewards
from .curriculum import Curriculum
from .guard import PolicyGuard
from .policy_checkpoint import metadata_of
from .ppo import NonFiniteUpdate
from .replay import RecentRequests
from .run_statistics import RunStatistics

logger = logging.getLogger(__name__)

# Of the metrics of an update and of its rewards: what has no column of its own.
_NOT_RECORDED = ("first_ratio_error", "epochs", "raw_reward", "latency_is_known", "latency", "throughput")


class OnlineRouter(Listener):
    """The agent decides, within the safety limit, and is watched for collapse."""

    def __init__(self, agent: Agent, *, num_replicas: int) -> None:
        flags = agent.flags
        self.agent = agent
        self._alarm = CollapseAlarm(num_replicas=num_replicas, share_threshold=flags.collapse_share)
        self._limit: SafetyLimit | None = None
        if flags.latency_limit_s:
            self._limit = SafetyLimit(latency_limit_s=flags.latency_limit_s, mask=flags.mask_over_limit)

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> int:
        return self.agent.decide(*self._observe(seen, request))

    def _observe(self, seen: ClusterSnapshot, request: RequestInfo) -> Observed:
        allowed = None if self._limit is None else self._limit.allowed(seen.oldest_wait_s)
        return self.agent.observe(seen, request, allowed)

    def on_completions(self, completions: Sequence[Completion]) -> None:
        """Requests were completed: some may have been above the limit."""
        if self._limit is not None:
            for done in completions:
                self._limit.on_completion(done.latency_s)

    def on_decision(self, arrival: Arrival, replica: int) -> None:
        """A request was placed."""
        self._alarm.on_decision(replica)


class OnlineLearner(OnlineRouter):
    """Earns a reward for each decision, and updates the policy when a rollout is full."""

    def __init__(
        self,
        agent: Agent,
        cluster: Cluster,
        statistics: RunStatistics,
        recorder: Recorder,
        *,
        checkpoints: Path,
        curriculum: Curriculum | None = None,
        guard: PolicyGuard | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        """`statistics` must hear of what happens before the learner does. `checkpoints`: the directory for them.

        `recent`: what the guard replays, if it replays.
        """
        super().__init__(agent, num_replicas=cluster.num_replicas)
        self._flags = agent.flags
        self._cluster = cluster
        self._statistics = statistics
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._curriculum = curriculum
        self._guard = guard
        self._recent = recent
        self.rewards = DecisionRewards(agent.flags)
        self._now_s = 0.0
        self._has_decided = False

    # --- deciding and earning -----------------------------------------------------------------------------------

    def on_completions(self, completions: Sequence[Completion]) -> None:
        """Requests were completed."""
        super().on_completions(completions)
        for done in completions:
            self.rewards.leaves(done.request, done.arrived_at_s, done.completed_at_s)

    def on_arrival(self, arrival: Arrival) -> None:
        """The decision before has led to this."""
        self._now_s, self._snapshot = arrival.snapshot.now_s, arrival.snapshot
        self._settle_last()
        self.rewards.enters(arrival.number, arrival.request.arrived_at_s)
        if self._recent is not None:
            self._recent.add(arrival.request.arrived_at_s, *self._cluster.lengths())

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> int:
        self._observed = self._observe(seen, request)
        if self.agent.is_ready_to_learn:
            self._learn(self._observed.observation)
        return self.agent.decide(*self._observed)

    def on_decision(self, arrival: Arrival, replica: int) -> None:
        """What the placement costs everybody is known at once, where that is the reward."""
        if self.rewards.pays_at_once:
            self._pay(arrival, replica)
        super().on_decision(arrival, replica)
        self._has_decided = True
        if self._curriculum is not None:
            self._curriculum.on_decision()
            self.rewards.penalty_scale = self._curriculum.penalty_scale

    def _pay(self, arrival: Arrival, replica: int) -> None:
        snapshot, chosen = arrival.snapshot, self._observed.chosen
        increases_s = self._cluster.marginal_delay(chosen, **self._flags.credit_weights)
        loads, queue_lengths = snapshot.token_load, snapshot.outstanding_requests
        if chosen is not None:
            loads, queue_lengths = loads[chosen], queue_lengths[chosen]
        rewards = self.rewards.of_placements(increases_s, loads, queue_lengths, arrival.request.prompt_tokens)
        index = replica if chosen is None else int(np.flatnonzero(chosen == replica)[0])
        self.rewards.note_placement(index)
        self.agent.settle(float(rewards[index]), rewards)

    def on_end(self, now_s: float, snapshot: ClusterSnapshot) -> None:
        """Settle, learn from what is left, and save."""
        self._now_s, self._snapshot = now_s, snapshot
        self._settle_last()
        if self.agent.num_settled >= self._flags.minibatch_size:
            self._learn(None)
        if self._guard is not None:
            self._guard.finish()
        self.save()

    def _settle_last(self) -> None:
        """What the decision before has led to, unless this is the first."""
        if not self._has_decided:
            return
        snapshot = self._snapshot
        reward = self.rewards.since_last_decision(self._now_s, snapshot.token_load, snapshot.outstanding_requests)
        if self.agent.awaits_reward:
            self.agent.settle(reward)

    # --- learning -----------------------------------------------------------------------------------------------

    def _learn(self, next_observation: Observation | None) -> None:
        """Update the policy on the rollout."""
        started_s = time.perf_counter()
        try:
            metrics = self._update(next_observation)
        except NonFiniteUpdate as error:
            logger.error("ppo_modular: update skipped, the weights are those before it: %s", error)
            self._statistics.add_update(time.perf_counter() - started_s)
            return
        self._statistics.add_update(time.perf_counter() - started_s)
        self._record(metrics)
        updates, interval = self.agent.ppo.num_updates, self._flags.checkpoint_interval
        if interval and updates % interval == 0:
            self.save()

    def _update(self, next_observation: Observation | None) -> dict[str, float]:
        latency_s = self._statistics.window_latency_s
        load_pressure = float(np.mean(self._snapshot.kv_blocks_used / self._snapshot.kv_blocks_total))
        latency_pressure = min(1.0, latency_s / (2.0 * self._flags.latency_threshold)) if latency_s > 0 else 0.0
        metrics = self.agent.learn(
            next_observation, metric=latency_s or None, pressure=(min(1.0, load_pressure), latency_pressure)
        )
        gain = metrics.pop("gain_over_reference", None)
        if self._guard is not None:
            metrics |= self._guard.after_update(gain) | ({} if gain is None else {"gain_over_loaded": gain})
        return metrics

    def _record(self, metrics: dict[str, float]) -> None:
        row: dict[str, float | None] = {**metrics, **self.rewards.take_components()}
        for name in _NOT_RECORDED:
            row.pop(name, None)
        row |= self._statistics.take_window(self._now_s, self._cluster.batch_counts)
        row |= {
            "update": self.agent.ppo.num_updates,
            "decisions": self.agent.num_decisions,
            "simulated_time": self._now_s,
            "load_spread": float(self._snapshot.outstanding_requests.std()),
            "safety_events": 0.0 if self._limit is None else float(self._limit.take_violations()),
            "collapse_alarm": float(self._alarm.active),
            "curriculum_stage": 0.0 if self._curriculum is None else float(self._curriculum.stage),
        }
        if self._curriculum is not None:
            # A metric without a value in this window counts as not reached.
            self._curriculum.on_update({name: _or_nan(row.get(name)) for name in self._curriculum.metric_names})
        self._statistics.entropy = metrics["entropy"]
        self._recorder.record(row)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that the next run depends on; also as the best, if it is."""
        state = {
            "agent": self.agent.state_dict(),
            "rewards": self.rewards.state_dict(),
            "curriculum": None if self._curriculum is None else self._curriculum.state_dict(),
            "guard": None if self._guard is None else self._guard.state_dict(),
        }
        metadata = metadata_of(self.agent)
        checkpoint.save(self._checkpoints, checkpoint.LAST, state, metadata=metadata)
        latency_s = self._statistics.window_latency_s
        if latency_s > 0:
            checkpoint.save_best(self._checkpoints, state, metadata=metadata, metric=latency_s)

    def serving_weights(self) -> dict[str, Any]:
        """A copy of the weights that decide."""
        if self._guard is not None:
            return dict(self._guard.serving)
        return {name: tensor.clone() for name, tensor in self.agent.ppo.network.state_dict().items()}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
