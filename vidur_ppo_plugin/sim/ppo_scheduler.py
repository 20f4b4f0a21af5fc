"""`ppo_modular`: a global scheduler that learns inside the simulation.

Vidur calls `schedule` for each arrival: observe, settle the decision before, learn if a rollout is full, decide. It
never says when a run is over, but asks `is_empty` once, before it writes its output: then the run is finished here.
"""

import atexit
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from vidur.logger import init_logger
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

from vidur_ppo_plugin import __version__, checkpoint
from vidur_ppo_plugin.flags import check_scheduler, flag_name, speed_factors
from vidur_ppo_plugin.learn.alarms import CollapseAlarm, SafetyLimit
from vidur_ppo_plugin.learn.build import build_agent, build_curriculum, check_resumed
from vidur_ppo_plugin.learn.checkpoint_flags import adopt_flags
from vidur_ppo_plugin.learn.credit.analytic import DrainCost
from vidur_ppo_plugin.learn.credit.exact import ShadowTwin
from vidur_ppo_plugin.learn.guard import PolicyGuard
from vidur_ppo_plugin.learn.policy_checkpoint import is_policy_only, network_weights
from vidur_ppo_plugin.learn.ppo import NonFiniteUpdate
from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.record.progress import Progress
from vidur_ppo_plugin.record.recorder import Recorder
from vidur_ppo_plugin.record.wandb_sink import open_run
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import Observation
from vidur_ppo_plugin.routing.mixture import teacher_shares
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot
from vidur_ppo_plugin.routing.visibility import Visibility

from . import arrivals
from .credit import RewardTracker
from .ppo_statistics import RunStatistics
from .replay import RecentRequests
from .replica_source import VidurReplicaSource
from .roofline_predictor import build_roofline
from .schedulers import build_delay_model, prefill_chunk_size
from .teachers import DEMONSTRATIONS_FILE, Demonstrator
from .twin_filler import twin_config

logger = init_logger("vidur.vidur_ppo_plugin")
# What the rest of the package logs (switches of stages, alarms) belongs into Vidur's log too.
logging.getLogger("vidur_ppo_plugin").parent = logging.getLogger("vidur")
logging.getLogger("vidur_ppo_plugin").setLevel(logging.INFO)

METRICS_FILE = "ppo_metrics.csv"
CHECKPOINT_DIRECTORY = "checkpoints"


class PPOModularScheduler(BaseGlobalScheduler):
    """Observes, decides, earns rewards, learns, records and checkpoints."""

    def __init__(self, config: Any, replicas: Any) -> None:
        self._flags = config.cluster_config.global_scheduler_config
        loaded = checkpoint.load(self._flags.load_checkpoint) if self._flags.load_checkpoint else None
        if loaded is not None:
            adopt_flags(self._flags, loaded.metadata)
        check_scheduler(self._flags, len(replicas))
        super().__init__(config, replicas)
        flags = self._flags
        self._replica_ids = list(self._replica_schedulers)
        speeds = speed_factors(config.execution_time_predictor_config, len(replicas))
        self._source = VidurReplicaSource(
            list(self._replica_schedulers.values()),
            speed_factors=speeds,
            num_waiting_slots=flags.max_queue_requests_per_replica,
            on_completion=self._on_completion,
            is_compiled=True,
        )
        delay_model = build_delay_model(config)
        self.agent = build_agent(flags, num_replicas=len(replicas), delay_model=delay_model)
        roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
        cost = DrainCost.from_roofline(roofline, prefill_chunk_size(config))
        self._visibility = Visibility.from_flags(flags, len(replicas))
        self._is_learning = not (flags.inference_only or flags.demonstrate_with)
        self._shadow, credit = self._open_shadow(config)
        self._rewards = RewardTracker(flags, self._source, cost=cost, speed_factors=speeds, shadow=self._shadow)
        self._statistics = RunStatistics(num_replicas=len(replicas), has_windows=self._is_learning)
        self._alarm = CollapseAlarm(num_replicas=len(replicas), share_threshold=flags.collapse_share)
        self._limit = (
            SafetyLimit(latency_limit_s=flags.latency_limit_s, mask=flags.mask_over_limit)
            if flags.latency_limit_s
            else None
        )
        self._curriculum = build_curriculum(flags, header(len(replicas))) if flags.curriculum else None
        if self._curriculum is not None:
            arrivals.apply()
            #: Asked by arrival events, see sim/arrivals.py.
            self.arrival_clock = arrivals.ArrivalClock(lambda: self._load_factor)
        self._output_dir = Path(config.metrics_config.output_dir)
        self._checkpoints = (
            Path(flags.save_checkpoint) if flags.save_checkpoint else self._output_dir / CHECKPOINT_DIRECTORY
        )
        self._recent: RecentRequests | None = None
        self._guard: PolicyGuard | None = None
        if loaded is not None:
            self._load(loaded)
            self._open_guard(config, loaded, delay_model)
        self._demonstrator = self._build_demonstrator(delay_model) if flags.demonstrate_with else None
        self._recorder = self._open_recorder() if self._is_learning else None
        self._progress = Progress(total=getattr(config.request_generator_config, "num_requests", None))
        self._is_finished = False
        self._now_s = 0.0
        atexit.register(self.finish)
        logger.info(
            "vidur-ppo-plugin %s: global scheduler ppo_modular is active on %d replicas "
            "(%s; reward %s%s, prior %s, %d features)",
            __version__,
            len(replicas),
            self._activity(),
            flags.reward_mode,
            credit,
            flags.prior,
            self.agent.features.num_replica_features,
        )

    def _open_shadow(self, config: Any) -> tuple[ShadowTwin | None, str]:
        """What exact credit comes from, if it is wanted and can be had, and how the log calls the credit."""
        flags = self._flags
        if not self._is_learning or flags.reward_mode != "marginal_delay":
            return None, ""
        if flags.credit == "analytic":
            return None, ", credit analytic"
        is_sampled = 0 < flags.max_candidates < len(self._replica_ids)
        if flags.credit == "auto" and is_sampled:  # the twin would roll all replicas forward
            return None, ", credit analytic (max_candidates)"
        try:
            twin = twin_config(config)
        except ValueError as error:
            if flags.credit == "exact":
                name = flag_name(type(flags), "credit")
                raise ValueError(f"{name} must be auto or analytic for this cluster, got 'exact': {error}") from None
            return None, f", credit analytic ({error})"
        return ShadowTwin(twin, flags), ", credit exact"

    def _open_guard(self, config: Any, loaded: checkpoint.Checkpoint, delay_model: DelayModel) -> None:
        """Watch over learning that began from a loaded policy, in this run or in the one that it resumes."""
        flags, state = self._flags, loaded.state.get("guard")
        if not (self._is_learning and flags.guard_interval and (is_policy_only(loaded) or state)):
            return
        try:
            twin = twin_config(config)
        except ValueError as error:
            logger.info("ppo_modular: the guard goes by credit, requests are not replayed (%s)", error)
        else:
            self._recent = RecentRequests(twin, flags, delay_model=delay_model, num_requests=flags.guard_requests)
        self._guard = PolicyGuard(
            self.agent,
            self._recent,
            serves_best=self._can_serve_best(),
        )
        if self._guard.serves_best:
            logger.info("ppo_modular: the best weights so far decide, and give way to what trials prove better")
        if state:
            self._guard.load_state_dict(state)

    def _can_serve_best(self) -> bool:
        """Whether the policy that learns need not act: each action has its credit, and a trial can be held."""
        flags, ppo = self._flags, self.agent.ppo
        if self._recent is None or flags.reward_mode != "marginal_delay" or ppo.network.shape.attention_heads:
            return False
        return flags.guard_serves_best and ppo.parameters.expected_gradient

    def _activity(self) -> str:
        if self._flags.demonstrate_with:
            return f"demonstrating with {self._flags.demonstrate_with}"
        return "learning" if self._is_learning else "inference"

    def _build_demonstrator(self, delay_model: DelayModel) -> Demonstrator:
        flags = self._flags
        file = flags.demonstrations_file
        return Demonstrator(
            teacher_shares(flags),
            Path(file) if file else self._output_dir / DEMONSTRATIONS_FILE,
            features=self.agent.features,
            delay_model=delay_model,
            seed=flags.seed,
            flag=flag_name(type(flags), "demonstrations_file"),
        )

    def _open_recorder(self) -> Recorder:
        directory = Path(self._flags.metrics_dir) if self._flags.metrics_dir else self._output_dir
        directory.mkdir(parents=True, exist_ok=True)
        return Recorder(
            header(len(self._replica_ids)),
            directory / METRICS_FILE,
            wandb_run=open_run(),
            tensorboard_dir=directory / "tensorboard" if self._flags.enable_tensorboard else None,
        )

    def serving_weights(self) -> dict[str, Any]:
        """A copy of the weights that decide."""
        if self._guard is not None:
            return dict(self._guard.serving)
        return {name: tensor.clone() for name, tensor in self.agent.ppo.network.state_dict().items()}

    @property
    def _load_factor(self) -> float:
        return 1.0 if self._curriculum is None else self._curriculum.load

    # --- deciding -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[Any, Any]]:
        """Place the queued requests one after the other, each decision seeing the effect of the one before."""
        self.sort_requests()
        placements = []
        now_s = self._request_queue[-1].arrived_at if self._request_queue else self._now_s
        for request in self._request_queue:
            try:
                index = self._place(request, now_s) if self._demonstrator is None else self._demonstrate(request, now_s)
            except FloatingPointError:
                self._abandon()
                raise
            self._visibility.on_dispatch(index, request.num_prefill_tokens)
            self._source.on_dispatch(index, request)
            if self._shadow is not None:
                self._shadow.place(index, request.arrived_at, request.num_prefill_tokens, request.num_decode_tokens)
            placements.append((self._replica_ids[index], request))
        self._request_queue.clear()
        return placements

    def _place(self, request: Any, now_s: float) -> int:
        started_s = time.perf_counter()
        self._now_s = now_s
        agent, is_learning = self.agent, self._is_learning
        info = self._source.request_info(request)
        snapshot = self._source.snapshot(now_s)
        seen = self._visibility.view(snapshot)
        allowed = None if self._limit is None else self._limit.allowed(seen.oldest_wait_s)
        observation, prior_logits, observed = agent.observe(seen, info, allowed)
        learning_s = 0.0
        if is_learning:
            self._settle_last(now_s, snapshot)
            self._rewards.on_arrival(request)
            if self._recent is not None:
                self._recent.add(request)
            learning_s = self._learn_if_ready(observation, snapshot)
        index = agent.decide(observation, prior_logits, observed)
        if is_learning and self._rewards.mode == "marginal_delay":
            rewards = self._rewards.of_every_action(request, now_s, observed)
            taken = float(rewards[index if observed is None else int(np.flatnonzero(observed == index)[0])])
            self._rewards.note_marginal_delay(taken)
            agent.settle(taken, rewards)
        self._alarm.on_decision(index)
        if is_learning and self._curriculum is not None:
            self._curriculum.on_decision()
            self._rewards.penalty_scale = self._curriculum.penalty_scale
        latency_s = self._statistics.recent_latency_s
        self._progress.update(agent.num_decisions, now_s, latency_s, self._statistics.entropy)
        self._statistics.add_times(deciding_s=time.perf_counter() - started_s - learning_s, learning_s=learning_s)
        return index

    def _demonstrate(self, request: Any, now_s: float) -> int:
        """In place of `_place`: a teacher decides, and nothing is learned."""
        assert self._demonstrator is not None
        self._now_s = now_s
        info = self._source.request_info(request)
        index = self._demonstrator.decide(self._visibility.view(self._source.snapshot(now_s)), info)
        self.agent.count(index)
        self._progress.update(self.agent.num_decisions, now_s, self._statistics.recent_latency_s, None)
        return index

    def _settle_last(self, now_s: float, snapshot: ClusterSnapshot) -> None:
        if self._rewards.mode != "marginal_delay" and self.agent.awaits_reward:
            self.agent.settle(self._rewards.since_last_decision(now_s, snapshot))

    # --- learning -----------------------------------------------------------------------------------------------

    def _learn_if_ready(self, next_observation: Observation | None, snapshot: ClusterSnapshot) -> float:
        """Update if a rollout is complete; returns the seconds it took."""
        if not self.agent.is_ready_to_learn:
            return 0.0
        return self._learn(next_observation, snapshot)

    def _learn(self, next_observation: Observation | None, snapshot: ClusterSnapshot) -> float:
        started_s = time.perf_counter()
        latency_s = self._statistics.window_latency_s
        load_pressure = float(np.mean(snapshot.kv_blocks_used / snapshot.kv_blocks_total))
        latency_pressure = min(1.0, latency_s / (2.0 * self._flags.latency_threshold)) if latency_s > 0 else 0.0
        try:
            metrics = self.agent.learn(
                next_observation, metric=latency_s or None, pressure=(min(1.0, load_pressure), latency_pressure)
            )
        except NonFiniteUpdate as error:
            logger.error("ppo_modular: update skipped, the weights are those before it: %s", error)
            return time.perf_counter() - started_s
        gain = metrics.pop("gain_over_reference", None)
        if self._guard is not None:
            metrics |= self._guard.after_update(gain) | ({} if gain is None else {"gain_over_loaded": gain})
        elapsed_s = time.perf_counter() - started_s
        self._record(metrics)
        updates, interval = self.agent.ppo.num_updates, self._flags.checkpoint_interval
        if interval and updates % interval == 0:
            self._save()
        return elapsed_s

    def _record(self, metrics: dict[str, float]) -> None:
        assert self._recorder is not None
        row: dict[str, float | None] = {**metrics, **self._rewards.take_components()}
        for name in ("first_ratio_error", "epochs", "raw_reward", "latency_is_known", "latency", "throughput"):
            row.pop(name, None)
        row |= self._statistics.take_window(self._now_s, self._source, self.agent.take_action_counts())
        row |= {
            "update": self.agent.ppo.num_updates,
            "decisions": self.agent.num_decisions,
            "simulated_time": self._now_s,
            "safety_events": 0.0 if self._limit is None else float(self._limit.take_violations()),
            "collapse_alarm": float(self._alarm.active),
            "curriculum_stage": 0.0 if self._curriculum is None else float(self._curriculum.stage),
        }
        if self._curriculum is not None:
            # A metric without a value in this window counts as not reached.
            self._curriculum.on_update({name: _or_nan(row.get(name)) for name in self._curriculum.metric_names})
        self._statistics.entropy = metrics["entropy"]
        self._recorder.record(row)

    def _on_completion(self, index: int, request: Any) -> None:
        if self._is_learning:
            self._rewards.on_completion(request)
        self._statistics.add_completion(request)
        if self._limit is not None:
            self._limit.on_completion(request._completed_at - request._arrived_at)

    # --- the end of a run ---------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Asked once, when the simulation is over: finish before Vidur writes its output."""
        empty: bool = super().is_empty()
        self.finish()
        return empty

    def finish(self) -> None:
        """Settle, learn from what is left, save and report; idempotent (also called at the interpreter's exit)."""
        if self._is_finished:
            return
        self._is_finished = True
        atexit.unregister(self.finish)
        self._progress.close()
        if self._demonstrator is not None:
            self._demonstrator.finish()
        if self._is_learning:
            end_s = max(self._now_s, self._statistics.last_completion_s)
            snapshot = self._source.snapshot(end_s)
            self._now_s = end_s
            self._settle_last(end_s, snapshot)
            if self.agent.num_settled >= self._flags.minibatch_size:
                self._learn(None, snapshot)
            if self._guard is not None:
                self._guard.finish()
            self._save()
            assert self._recorder is not None
            # Vidur writes its own W&B metrics after this; the sink must outlive that, see WandbSink.
            atexit.register(self._recorder.close)
        logger.info("ppo_modular:\n%s", self._statistics.summary(self.agent))

    def _abandon(self) -> None:
        """The policy is broken: nothing of it must reach a checkpoint when the interpreter exits."""
        self._is_finished = True
        atexit.unregister(self.finish)
        self._progress.close()
        if self._recorder is not None:
            self._recorder.close()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, Any]:
        return {
            "feature_hash": self.agent.features.hash,
            "features": self.agent.features.definition,
            "network": self.agent.ppo.network.shape.to_dict(),
            "prior": self._flags.prior,
            "prior_weight": self._flags.prior_weight,
            "plugin_version": __version__,
            "num_updates": self.agent.ppo.num_updates,
            "num_decisions": self.agent.num_decisions,
        }

    def _save(self) -> None:
        state = {
            "agent": self.agent.state_dict(),
            "rewards": self._rewards.state_dict(),
            "curriculum": None if self._curriculum is None else self._curriculum.state_dict(),
            "guard": None if self._guard is None else self._guard.state_dict(),
        }
        metadata = self._metadata()
        checkpoint.save(self._checkpoints, checkpoint.LAST, state, metadata=metadata)
        latency_s = self._statistics.window_latency_s
        if latency_s > 0:
            checkpoint.save_best(self._checkpoints, state, metadata=metadata, metric=latency_s)

    def _load(self, loaded: checkpoint.Checkpoint) -> None:
        checkpoint.check_compatible(loaded.metadata, {"network": self._metadata()["network"]})
        if is_policy_only(loaded):
            self.agent.load_policy(network_weights(loaded))
            logger.info("ppo_modular: loaded the policy %s", loaded.path)
            return
        self.agent.load_state_dict(loaded.state["agent"])
        check_resumed(self.agent, self._flags)
        self._rewards.load_state_dict(loaded.state["rewards"])
        if self._curriculum is not None and loaded.state["curriculum"] is not None:
            self._curriculum.load_state_dict(loaded.state["curriculum"])
        logger.info("ppo_modular: loaded %s (%d updates)", loaded.path, self.agent.ppo.num_updates)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
