"""Where a training run is: what its checkpoints hold beside the learner, and where each slot is in its episode."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin import __version__, checkpoint
from vidur_ppo_plugin.learn.agent import Agent
from vidur_ppo_plugin.learn.credit.hybrid import HybridReward
from vidur_ppo_plugin.learn.curriculum import Curriculum
from vidur_ppo_plugin.learn.policy_checkpoint import network_weights

from .config import TrainConfig
from .episodes import Episode, draw_episode
from .evaluation import Result
from .schema import ConfigError
from .worker import SlotTask

CHECKPOINT_DIRECTORY = "checkpoints"
#: What may differ between a run and the run that it continues.
_FREE_TO_CHANGE = ("decisions", "evaluation", "record", "checkpoint_interval", "sweep")


@dataclass
class Slots:
    """Every slot's episode, and the decisions made in it: enough to go on in any process."""

    config: TrainConfig
    episodes: list[Episode] = field(default_factory=list)
    actions: list[NDArray[np.int16]] = field(default_factory=list)

    def tasks(self, load_factor: float) -> list[SlotTask]:
        """What each slot does next; an episode whose decisions are all made is followed by another."""
        for slot in range(len(self.config.slot_sizes)):
            if slot >= len(self.episodes):
                self._start(slot, 0, load_factor)
            elif self.is_over(slot):
                self._start(slot, self.episodes[slot].number + 1, load_factor)
        steps = self.config.flags.rollout_len
        return [
            SlotTask(episode, actions, self.is_over_after(slot, steps))
            for slot, (episode, actions) in enumerate(zip(self.episodes, self.actions, strict=True))
        ]

    def _start(self, slot: int, number: int, load_factor: float) -> None:
        episode = draw_episode(self.config, slot, number, load_factor=load_factor)
        self.episodes[slot : slot + 1] = [episode]
        self.actions[slot : slot + 1] = [np.empty((episode.num_clusters, 0), np.int16)]

    def advance(self, actions: Sequence[NDArray[np.integer[Any]]]) -> None:
        """Remember what was decided in each slot, [clusters, decisions]."""
        for slot, decided in enumerate(actions):
            self.actions[slot] = np.concatenate([self.actions[slot], decided.astype(np.int16)], axis=1)

    def is_over_after(self, slot: int, num_decisions: int) -> bool:
        """Whether so many decisions more end the slot's episode."""
        return bool(self.actions[slot].shape[1] + num_decisions >= self.episodes[slot].num_decisions)

    def is_over(self, slot: int) -> bool:
        """Whether all decisions of the slot's episode were made."""
        return self.is_over_after(slot, 0)

    def state_dict(self) -> dict[str, Any]:
        """Episodes and decisions of the slots, for a checkpoint."""
        return {"episodes": [asdict(episode) for episode in self.episodes], "actions": list(self.actions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.episodes = [Episode(**episode) for episode in state["episodes"]]
        self.actions = list(state["actions"])


@dataclass
class TrainingState:
    """The state of a training run that its checkpoints hold."""

    config: TrainConfig
    agent: Agent
    slots: Slots
    curriculum: Curriculum | None
    evaluations: list[Result] = field(default_factory=list)
    #: Decisions after which the next evaluation is due.
    next_evaluation: int = 0

    @property
    def best(self) -> Result | None:
        """The evaluation with the lowest score."""
        return min(self.evaluations, key=lambda result: result.score, default=None)

    @property
    def evaluations_since_best(self) -> int:
        """How many evaluations came after the best one."""
        if self.best is None:
            return 0
        return len(self.evaluations) - 1 - self.evaluations.index(self.best)

    def save(self, out: Path) -> Path:
        """Write the checkpoint `last`, which `ppo_modular` can load too."""
        return checkpoint.save(out / CHECKPOINT_DIRECTORY, checkpoint.LAST, self._state(), metadata=self._metadata())

    def save_best(self, out: Path, result: Result) -> None:
        """Write the checkpoint `best` if the result is the best so far."""
        checkpoint.save_best(out / CHECKPOINT_DIRECTORY, self._state(), metadata=self._metadata(), metric=result.score)

    def resume(self, out: Path) -> None:
        """Go on from the newest checkpoint; ConfigError if it is of another configuration."""
        loaded = checkpoint.load(out / CHECKPOINT_DIRECTORY)
        if "train" not in loaded.state:
            raise ConfigError(f"--resume: {loaded.path} is not of a training run")
        differences = [
            f"{key} (was {saved!r}, is {now!r})"
            for key, now in self._fixed_values().items()
            if (saved := loaded.metadata["config"].get(key)) != now
        ]
        if differences:
            raise ConfigError(f"--resume: {loaded.path} was begun with other values: {'; '.join(differences)}")
        state = loaded.state["train"]
        self.agent.load_state_dict(loaded.state["agent"])
        self.slots.load_state_dict(state["slots"])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(loaded.state["curriculum"])
        self.evaluations = [Result(**result) for result in state["evaluations"]]
        self.next_evaluation = state["next_evaluation"]

    def start_from(self, path: str) -> None:
        """Take the network of a checkpoint; CheckpointError if it does not fit."""
        loaded = checkpoint.load(path)
        expected = {key: self._metadata()[key] for key in ("feature_hash", "network", "prior", "prior_weight")}
        checkpoint.check_compatible(loaded.metadata, expected)
        self.agent.ppo.network.load_state_dict(network_weights(loaded))
        self.agent.ppo.keep_reference()

    def _state(self) -> dict[str, Any]:
        return {
            "agent": self.agent.state_dict(),
            # `ppo_modular` goes on with rewards of its own.
            "rewards": HybridReward(self.config.flags).state_dict(),
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "train": {
                "slots": self.slots.state_dict(),
                "evaluations": [result.to_dict() for result in self.evaluations],
                "next_evaluation": self.next_evaluation,
            },
        }

    def _fixed_values(self) -> dict[str, Any]:
        return fixed_values(self.config)

    def _metadata(self) -> dict[str, Any]:
        agent, flags = self.agent, self.config.flags
        return {
            "feature_hash": agent.features.hash,
            "features": agent.features.definition,
            "network": agent.ppo.network.shape.to_dict(),
            "prior": flags.prior,
            "prior_weight": flags.prior_weight,
            "plugin_version": __version__,
            "num_updates": agent.ppo.num_updates,
            "num_decisions": agent.num_decisions,
            "config": self._fixed_values(),
            "evaluation": None if not self.evaluations else self.evaluations[-1].to_dict(),
        }


def fixed_values(config: TrainConfig) -> dict[str, Any]:
    """What a run must keep to be continued, as plain values."""
    return {key: _plain(value) for key, value in asdict(config).items() if key not in _FREE_TO_CHANGE}


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: with lists in place of tuples."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
