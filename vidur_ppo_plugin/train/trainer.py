"""The training loop: rollouts from the workers, an update, now and then an evaluation and a checkpoint."""

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.learn.build import build_agent
from vidur_ppo_plugin.learn.curriculum import Curriculum
from vidur_ppo_plugin.learn.ppo import NonFiniteUpdate
from vidur_ppo_plugin.policy.actor import Weights
from vidur_ppo_plugin.record.progress import Progress

from .clusters import Cluster
from .config import TrainConfig, replica_counts
from .engines import Engine
from .evaluation import Evaluator, Result
from .gradients import WorkerShards, weights_of
from .metrics import open_recorder, served_row, share_row
from .slots import CompletedRequests, Exploration
from .state import Slots, TrainingState
from .worker import CollectJob, CollectResult, SlotTask

logger = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.jsonl"
# What an update tells and nobody records.
_NOT_RECORDED = ("first_ratio_error", "epochs", "gain_over_reference")


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    decisions: int
    updates: int
    wall_s: float
    #: Why it ended: "decisions", "no better evaluation" or "interrupted".
    reason: str
    best: Result | None
    last: Result | None


@dataclass(frozen=True)
class CollectedRollouts:
    """Rollouts of all slots; their decisions lie with the workers."""

    #: Of each slot: what was decided, and what was completed.
    actions: Sequence[NDArray[np.integer[Any]]]
    served: Sequence[CompletedRequests]
    #: What is learned from.
    shards: WorkerShards

    @property
    def num_decisions(self) -> int:
        """Decisions of all clusters, lost ones included."""
        return sum(decided.size for decided in self.actions)


class Trainer:
    """Trains a policy; everything that is drawn follows from the configuration's seed."""

    def __init__(
        self, config: TrainConfig, clusters: dict[str, Cluster], engine: Engine, out: Path, *, num_jobs: int
    ) -> None:
        """`num_jobs`: parts that the slots are divided into, one for each worker."""
        self._config, self._flags = config, config.flags
        self._engine = engine
        self._out = out
        self._num_jobs = min(num_jobs, len(config.slot_sizes))
        self._most_replicas = replica_counts(config)[-1]
        # An update is made of rollouts of all clusters: schedules that count updates must know how long they are.
        flags = replace(self._flags, rollout_len=config.decisions_per_update)
        agent = build_agent(
            flags,
            num_replicas=self._most_replicas,
            delay_model=next(iter(clusters.values())).delay_model,
            update_options={"enable_critic": config.enable_critic},
        )
        curriculum = Curriculum.parse(config.curriculum) if config.curriculum else None
        self.state = TrainingState(config, agent, Slots(config), curriculum)
        self._evaluator = Evaluator(config, engine)
        self._is_interrupted = False
        #: Wall-clock seconds of rollouts and of updates.
        self.times_s = {"collecting": 0.0, "learning": 0.0}

    def train(self) -> TrainingResult:
        """Train until the decisions are made, evaluations get no better, or Ctrl-C; saves in each case."""
        self._out.mkdir(parents=True, exist_ok=True)
        started_s = time.perf_counter()
        self._recorder, wandb_run = open_recorder(self._config, self._out)
        self._progress = Progress(total=self._config.decisions)
        try:
            with self._on_interrupt():
                reason = self._loop()
                self.state.save(self._out)
        finally:
            self._progress.close()
            self._recorder.close()
            if wandb_run is not None:
                wandb_run.finish()
        evaluations = self.state.evaluations
        return TrainingResult(
            decisions=self.state.agent.num_decisions,
            updates=self.state.agent.ppo.num_updates,
            wall_s=time.perf_counter() - started_s,
            reason=reason,
            best=self.state.best,
            last=evaluations[-1] if evaluations else None,
        )

    @contextmanager
    def _on_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends the loop instead of breaking an update; Python gives signals to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: finish the update under way; a second one ends at once."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        logger.warning("interrupted: the update under way is finished and saved; once more to end at once")

    def _loop(self) -> str:
        agent, evaluation = self.state.agent, self._config.evaluation
        while agent.num_decisions < self._config.decisions:
            self._iterate()
            if self._is_interrupted:
                return "interrupted"
            if evaluation.patience and self.state.evaluations_since_best >= evaluation.patience:
                return "no better evaluation"
        if not self.state.evaluations or self.state.evaluations[-1].decisions != agent.num_decisions:
            self._recorder.record({**self._position(), **self._evaluate().row()})
        return "decisions"

    def _iterate(self) -> None:
        """Collect, update, and do what is due after that."""
        began_s = time.perf_counter()
        collected = self.collect()
        collected_s = time.perf_counter()
        num_decisions = collected.num_decisions
        self.state.agent.num_decisions += num_decisions
        row = self._learn(collected)
        ended_s = time.perf_counter()
        self.times_s["collecting"] += collected_s - began_s
        self.times_s["learning"] += ended_s - collected_s
        row |= self._position() | self._time_shares() | {"decisions_per_s": num_decisions / (ended_s - began_s)}
        row |= served_row(collected.served) | share_row(collected.actions, self._most_replicas)
        self._follow_curriculum(row, num_decisions)
        if self._is_evaluation_due():
            row |= self._evaluate().row()
        self._recorder.record(row)
        self._show(row)
        if self.state.agent.ppo.num_updates % self._config.checkpoint_interval == 0:
            self.state.save(self._out)

    # --- rollouts -----------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """The actor's present weights."""
        return weights_of(self.state.agent.ppo.network)

    def collect(self) -> "CollectedRollouts":
        """Collect a rollout of every slot, in the order of slots."""
        agent, curriculum = self.state.agent, self.state.curriculum
        tasks = self.state.slots.tasks(1.0 if curriculum is None else curriculum.load)
        exploration = Exploration(
            temperature=agent.temperature,
            epsilon=agent.epsilon,
            penalty_scale=1.0 if curriculum is None else curriculum.penalty_scale,
        )
        # By decisions and not by updates: an update that was skipped must not draw the same numbers again.
        iteration = agent.num_decisions // self._config.decisions_per_update
        reference = None if agent.ppo.reference is None else weights_of(agent.ppo.reference)
        jobs = [CollectJob(iteration, exploration, part, reference) for part in _split(tasks, self._num_jobs)]
        weights = self.weights()
        results: list[CollectResult] = self._engine.run(jobs, weights)
        collected = CollectedRollouts(
            actions=[actions for result in results for actions in result.actions],
            served=[served for result in results for served in result.served],
            shards=WorkerShards(self._engine, agent.ppo, jobs, weights, [result.contents for result in results]),
        )
        self.state.slots.advance(collected.actions)
        return collected

    def _learn(self, collected: "CollectedRollouts") -> dict[str, Any]:
        if not any(contents.num_decisions for contents in collected.shards.contents):
            logger.warning("every episode has been lost at latency_limit_s: nothing to learn from until new ones begin")
            return {}
        latency_s = np.concatenate([part.latency_s for part in collected.served])
        try:
            metrics = self.state.agent.learn_from(
                collected.shards,
                metric=float(latency_s.mean()) if len(latency_s) else None,
                pressure=(0.0, 0.0),
            )
        except NonFiniteUpdate as error:
            logger.error("update skipped, the weights are those before it: %s", error)
            return {}
        name = "look_ahead" if self._config.look_ahead.is_on else self._flags.reward_mode
        if name != "hybrid":
            metrics[name] = metrics["reward_mean"]
        return {name: value for name, value in metrics.items() if name not in _NOT_RECORDED}

    # --- after an update ----------------------------------------------------------------------------------------

    def _follow_curriculum(self, row: dict[str, Any], num_decisions: int) -> None:
        curriculum = self.state.curriculum
        row["curriculum_stage"] = 0.0 if curriculum is None else float(curriculum.stage)
        if curriculum is not None:
            for _ in range(num_decisions):
                curriculum.on_decision()
            curriculum.on_update({name: row.get(name, float("nan")) for name in curriculum.metric_names})

    def _is_evaluation_due(self) -> bool:
        every, state = self._config.evaluation.every_decisions, self.state
        if not every or state.agent.num_decisions < max(state.next_evaluation, every):
            return False
        state.next_evaluation = (state.agent.num_decisions // every + 1) * every
        return True

    def _evaluate(self) -> Result:
        result = self._evaluator.evaluate(self.weights(), self.state.agent.num_decisions)
        self.state.evaluations.append(result)
        self.state.save_best(self._out, result)
        with (self._out / EVALUATIONS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.to_dict()) + "\n")
        logger.info("%s", result)
        return result

    def _position(self) -> dict[str, float]:
        return {"update": self.state.agent.ppo.num_updates, "decisions": self.state.agent.num_decisions}

    def _time_shares(self) -> dict[str, float]:
        total_s = max(1e-9, sum(self.times_s.values()))
        return {
            "time_simulating_share": self.times_s["collecting"] / total_s,
            "time_learning_share": self.times_s["learning"] / total_s,
        }

    def _show(self, row: dict[str, Any]) -> None:
        best = self.state.best
        note = "" if best is None else f"best {best.score:+.1%} after {best.decisions:,}"
        self._progress.update(
            self.state.agent.num_decisions, None, row.get("latency_mean"), row.get("entropy"), note=note
        )


def _split(tasks: list[SlotTask], num_parts: int) -> list[list[SlotTask]]:
    """The tasks in contiguous parts, as even in size as possible."""
    bounds = [len(tasks) * part // num_parts for part in range(num_parts + 1)]
    return [tasks[first:last] for first, last in pairwise(bounds)]
