"""`ppo_modular`, a scheduler type that learns inside the simulation: its parts, built from Vidur's config, and its end.

What it decides and learns is in `learn/online.py`. Vidur never says when a run is over, but asks `is_empty` once,
before it writes its output: then the run is finished here.
"""

import atexit
import logging
import time
from pathlib import Path
from typing import Any

from vidur.logger import init_logger
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

from vidur_ppo_plugin import __version__, checkpoint
from vidur_ppo_plugin.clusters.drive import Run
from vidur_ppo_plugin.flags import check_scheduler, flag_name
from vidur_ppo_plugin.learn.build import build_agent, build_curriculum, check_resumed
from vidur_ppo_plugin.learn.checkpoint_flags import adopt_flags
from vidur_ppo_plugin.learn.credit.exact import ShadowTwin
from vidur_ppo_plugin.learn.curriculum import Curriculum
from vidur_ppo_plugin.learn.guard import PolicyGuard, can_serve_best
from vidur_ppo_plugin.learn.online import OnlineLearner, OnlineRouter
from vidur_ppo_plugin.learn.policy_checkpoint import is_policy_only, metadata_of, restore
from vidur_ppo_plugin.learn.replay import RecentRequests
from vidur_ppo_plugin.learn.run_statistics import RunStatistics
from vidur_ppo_plugin.learn.teachers import DEMONSTRATIONS_FILE, Demonstrator
from vidur_ppo_plugin.record import health
from vidur_ppo_plugin.record.health_sink import HealthSink
from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.record.progress import Progress
from vidur_ppo_plugin.record.recorder import Recorder
from vidur_ppo_plugin.record.wandb_sink import open_run
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.mixture import teacher_shares
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.config import TwinConfig

from . import arrivals
from .cluster import VidurCluster
from .delay_model import build_delay_model
from .schedulers import place_queued
from .twin_config import twin_config

logger = init_logger("vidur.vidur_ppo_plugin")
# What the rest of the package logs (switches of stages, alarms) belongs into Vidur's log too.
logging.getLogger("vidur_ppo_plugin").parent = logging.getLogger("vidur")
logging.getLogger("vidur_ppo_plugin").setLevel(logging.INFO)

METRICS_FILE = "ppo_metrics.csv"
CHECKPOINT_DIRECTORY = "checkpoints"


class PPOModularScheduler(BaseGlobalScheduler):
    """Learns, or decides as it learned, or demonstrates: one router in one run of the cluster."""

    def __init__(self, config: Any, replicas: Any) -> None:
        self._flags = flags = config.cluster_config.global_scheduler_config
        loaded = checkpoint.load(flags.load_checkpoint) if flags.load_checkpoint else None
        if loaded is not None:
            adopt_flags(flags, loaded.metadata)
        check_scheduler(flags, len(replicas))
        super().__init__(config, replicas)
        self._output_dir = Path(config.metrics_config.output_dir)
        self._is_learning = not (flags.inference_only or flags.demonstrate_with)
        delay_model = build_delay_model(config)
        self.agent = build_agent(flags, num_replicas=len(replicas), delay_model=delay_model)
        shadow, credit = self._open_shadow(config)
        #: The replicas, and who places requests on them.
        self.cluster = VidurCluster(
            config,
            self._replica_schedulers,
            num_waiting_slots=flags.max_queue_requests_per_replica,
            is_compiled=True,
            tells_completions=True,
            shadow=shadow,
        )
        self._curriculum = self._open_curriculum()
        if loaded is not None:
            self._load(loaded)
        self._statistics = RunStatistics(
            num_replicas=len(replicas), num_decisions=self.agent.num_decisions, has_windows=self._is_learning
        )
        self._recorder: Recorder | None = None
        self.router = self._build_router(config, loaded, delay_model)
        visibility = Visibility.from_flags(flags, len(replicas))
        self._run = Run(self.cluster, [self._statistics, self.router], visibility=visibility)
        self._progress = Progress(total=getattr(config.request_generator_config, "num_requests", None))
        self._is_finished = False
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

    def _activity(self) -> str:
        if self._flags.demonstrate_with:
            return f"demonstrating with {self._flags.demonstrate_with}"
        return "learning" if self._is_learning else "inference"

    # --- building -----------------------------------------------------------------------------------------------

    def _open_shadow(self, config: Any) -> tuple[ShadowTwin | None, str]:
        """What exact credit comes from, if it is wanted and can be had, and how the log calls the credit."""
        flags = self._flags
        if not self._is_learning or not flags.pays_at_once:
            return None, ""
        if flags.credit == "analytic":
            return None, ", credit analytic"
        is_sampled = 0 < flags.max_candidates < len(self._replica_schedulers)
        if flags.credit == "auto" and is_sampled:  # the twin would roll all replicas forward
            return None, ", credit analytic (max_candidates)"
        try:
            twin = twin_config(config)
        except ValueError as error:
            if flags.credit == "exact":
                name = flag_name(type(flags), "credit")
                raise ValueError(f"{name} must be auto or analytic for this cluster, got 'exact': {error}") from None
            return None, f", credit analytic ({error})"
        return ShadowTwin(twin), ", credit exact"

    def _open_curriculum(self) -> Curriculum | None:
        flags = self._flags
        if not flags.curriculum:
            return None
        curriculum = build_curriculum(flags, header(self.cluster.num_replicas))
        arrivals.apply()
        #: Asked by arrival events, see sim/arrivals.py.
        self.arrival_clock = arrivals.ArrivalClock(lambda: curriculum.load)
        return curriculum

    def _load(self, loaded: checkpoint.Checkpoint) -> None:
        checkpoint.check_compatible(loaded.metadata, {"network": metadata_of(self.agent)["network"]})
        restore(self.agent, loaded)
        if is_policy_only(loaded):
            logger.info("ppo_modular: loaded the policy %s", loaded.path)
            return
        check_resumed(self.agent, self._flags)
        if self._curriculum is not None and loaded.state["curriculum"] is not None:
            self._curriculum.load_state_dict(loaded.state["curriculum"])
        logger.info("ppo_modular: loaded %s (%d updates)", loaded.path, self.agent.ppo.num_updates)

    def _build_router(
        self, config: Any, loaded: checkpoint.Checkpoint | None, delay_model: DelayModel
    ) -> OnlineRouter | Demonstrator:
        if self._flags.demonstrate_with:
            return self._build_demonstrator(delay_model)
        if not self._is_learning:
            return OnlineRouter(self.agent, num_replicas=self.cluster.num_replicas)
        return self._build_learner(config, loaded, delay_model)

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

    def _build_learner(
        self, config: Any, loaded: checkpoint.Checkpoint | None, delay_model: DelayModel
    ) -> OnlineLearner:
        guard, recent = self._open_guard(config, loaded, delay_model)
        self._recorder = self._open_recorder()
        saved = self._flags.save_checkpoint
        learner = OnlineLearner(
            self.agent,
            self.cluster,
            self._statistics,
            self._recorder,
            checkpoints=Path(saved) if saved else self._output_dir / CHECKPOINT_DIRECTORY,
            curriculum=self._curriculum,
            guard=guard,
            recent=recent,
        )
        if loaded is not None and not is_policy_only(loaded):
            learner.rewards.load_state_dict(loaded.state["rewards"])
        return learner

    def _open_guard(
        self, config: Any, loaded: checkpoint.Checkpoint | None, delay_model: DelayModel
    ) -> tuple[PolicyGuard | None, RecentRequests | None]:
        """What watches over learning that began from a loaded policy, in this run or in the one that it resumes."""
        flags = self._flags
        state = None if loaded is None else loaded.state.get("guard")
        if loaded is None or not flags.guard_interval or not (is_policy_only(loaded) or state):
            return None, None
        recent: RecentRequests | None = None
        try:
            twin: TwinConfig = twin_config(config)
        except ValueError as error:
            logger.info("ppo_modular: the guard goes by credit, requests are not replayed (%s)", error)
        else:
            recent = RecentRequests(twin, flags, delay_model=delay_model, num_requests=flags.guard_requests)
        guard = PolicyGuard(self.agent, recent, serves_best=recent is not None and can_serve_best(self.agent))
        if guard.serves_best:
            logger.info("ppo_modular: the best weights so far decide, and give way to what trials prove better")
        if state:
            guard.load_state_dict(state)
        return guard, recent

    def _open_recorder(self) -> Recorder:
        directory = Path(self._flags.metrics_dir) if self._flags.metrics_dir else self._output_dir
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics_file, wandb_run = directory / METRICS_FILE, open_run()
        recorder = Recorder(
            header(self.cluster.num_replicas),
            self._metrics_file,
            wandb_run=wandb_run,
            tensorboard_dir=directory / "tensorboard" if self._flags.enable_tensorboard else None,
            others=[HealthSink(self._flags, wandb_run)],
        )
        health.save_flags(self._flags, directory)
        return recorder

    # --- running ------------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[Any, Any]]:
        """Place the queued requests."""
        started_s = time.perf_counter()
        try:
            placements = place_queued(self, self.cluster, self._run, self.router)
        except FloatingPointError:
            self._abandon()
            raise
        statistics = self._statistics
        statistics.add_deciding(time.perf_counter() - started_s)
        self._progress.update(
            statistics.num_decisions, self.cluster.now_s, statistics.recent_latency_s, statistics.entropy
        )
        return placements

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
        self._run.end()
        if self._recorder is not None:
            # Vidur writes its own W&B metrics after this; the sink must outlive that, see WandbSink.
            atexit.register(self._recorder.close)
        logger.info("ppo_modular:\n%s", self._statistics.summary(self.agent.ppo.num_updates))
        if self._recorder is not None:
            findings = health.examine(health.read(self._metrics_file))
            logger.info("ppo_modular, is it healthy? (docs/health.md)\n%s", health.format_findings(findings))

    def _abandon(self) -> None:
        """The policy is broken: nothing of it must reach a checkpoint when the interpreter exits."""
        self._is_finished = True
        atexit.unregister(self.finish)
        self._progress.close()
        if self._recorder is not None:
            self._recorder.close()
