"""What can be compared: schedulers by name, learned policies by checkpoint, and what has to be known of each.

round_robin                       a scheduler of Vidur or of ours
ppo_modular                       learns online, from scratch, in each run
ppo_modular:CHECKPOINT            a policy that was learned before, greedy
ppo_modular:pretrained            the policy that comes with the package
ppo_modular:CHECKPOINT@0.25       either, asked for a tail_preference of 0.25
LABEL=ppo_modular:CHECKPOINT      the same under another name in tables and plots
oracle                            forward-simulates with the true output lengths: a bound, not deployable
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin._autoload import suggestion
from vidur_ppo_plugin.learn.checkpoint_flags import checkpoint_flags
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK

from .results import file_name

LEARNED = "ppo_modular"
ORACLE = "oracle"
TUNED = "size_split"
KINDS = (*STOCK, *HEURISTICS, LEARNED, ORACLE)

_NOTES = {
    "lor": "Vidur's: counts waiting requests only, ties go to the first replica",
    TUNED: "threshold and number of replicas tuned for each scenario on seeds that are not compared",
    ORACLE: "not deployable: knows the true output lengths",
}


class SchedulerError(ValueError):
    """A scheduler that does not exist or cannot be used; the message names it and says what would be right."""


@dataclass(frozen=True)
class SchedulerSpec:
    """One row of a comparison."""

    label: str
    kind: str
    #: A checkpoint of `ppo_modular`; empty where there is none.
    checkpoint: str = ""
    #: Flags of the scheduler, without the prefix of its config class.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_deployable(self) -> bool:
        """Whether a real router could do the same."""
        return self.kind != ORACLE

    @property
    def is_learning(self) -> bool:
        """Whether it learns while it is being compared."""
        return self.kind == LEARNED and not self.checkpoint

    @property
    def note(self) -> str:
        """What a reader of the table should know."""
        if self.kind == LEARNED:
            return "learns during the run, from scratch" if self.is_learning else "learned before, greedy"
        return _NOTES.get(self.kind, "")

    def vidur_flags(self, seed: int, **more: Any) -> dict[str, Any]:
        """The flags that make `python -m vidur.main` use it; `more` are flags of the scheduler itself."""
        flags: dict[str, Any] = {"global_scheduler_config_type": self.kind}
        if self.kind in STOCK:
            if more:
                raise SchedulerError(f"{self.label}: a scheduler of Vidur's own has no flags {', '.join(more)}")
            return flags
        prefix = f"{self.kind}_global_scheduler_config"
        if self.kind == LEARNED:
            prefix = "p_p_o_global_scheduler_modular_config"
        options = {"seed": seed, **self.options, **more}
        if self.checkpoint:
            options |= {"load_checkpoint": self.checkpoint, "inference_only": True}
        return flags | {f"{prefix}_{name}": value for name, value in options.items()}

    def with_options(self, **options: Any) -> "SchedulerSpec":
        """A copy of the scheduler with these flags added."""
        return dataclasses.replace(self, options={**self.options, **options})


def parse_schedulers(texts: list[str]) -> list[SchedulerSpec]:
    """The schedulers of a command line; SchedulerError names the one that is wrong."""
    specs = [_parse(text) for text in texts]
    seen: dict[str, str] = {}
    for text, spec in zip(texts, specs, strict=True):
        name = file_name(spec.label)
        if name in seen:
            raise SchedulerError(
                f"schedulers {seen[name]!r} and {text!r} have the same label {spec.label!r}: give one of them another, "
                f"LABEL={text.partition('=')[2] or text}"
            )
        seen[name] = text
    return specs


def _parse(text: str) -> SchedulerSpec:
    label, equals, rest = text.partition("=")
    if not equals:
        label, rest = "", text
    kind, colon, path = rest.partition(":")
    if kind not in KINDS:
        raise SchedulerError(f"unknown scheduler {kind!r}{suggestion(kind, KINDS)}; there are {', '.join(KINDS)}")
    if not colon:
        return SchedulerSpec(label or kind, kind)
    if kind != LEARNED:
        raise SchedulerError(f"scheduler {text!r}: only {LEARNED} takes a checkpoint")
    if not path:
        raise SchedulerError(f"scheduler {text!r}: expected {LEARNED}:CHECKPOINT, a file or directory")
    path, asked = _tail_preference(text, path)
    file = _checkpoint_file(path)
    return SchedulerSpec(label or rest, kind, checkpoint=str(file), options={**checkpoint_options(file), **asked})


def _tail_preference(text: str, path: str) -> tuple[str, dict[str, float]]:
    """The checkpoint, and the flag that what follows its last @ sets; a file may have one in its name."""
    before, at, value = path.rpartition("@")
    if not at or Path(path).exists():
        return path, {}
    try:
        preference = float(value)
    except ValueError:
        preference = math.nan
    if not before or not 0.0 <= preference <= 1.0:
        raise SchedulerError(
            f"scheduler {text!r}: expected {LEARNED}:CHECKPOINT@TAIL with a tail_preference from 0 to 1, got {value!r}"
        )
    return before, {"tail_preference": preference}


def _checkpoint_file(path: str) -> Path:
    """The file that a checkpoint's name stands for now: a training that goes on must not change the comparison."""
    try:
        return checkpoint.find(path).resolve()
    except checkpoint.CheckpointError as error:
        raise SchedulerError(f"{LEARNED}:{path}: {error}") from error


def checkpoint_options(path: Path) -> dict[str, Any]:
    """The flags of `ppo_modular` that a checkpoint was learned with and cannot be used without."""
    try:
        return checkpoint_flags(checkpoint.verify(path))
    except (checkpoint.CheckpointError, OSError) as error:
        raise SchedulerError(f"{LEARNED}:{path}: {error}") from error


def check_fits(spec: SchedulerSpec, scenario_name: str, num_replicas: int) -> None:
    """SchedulerError if a scheduler cannot run in a scenario at all."""
    if spec.checkpoint and spec.options["enable_flat_network"]:
        size = checkpoint.verify(Path(spec.checkpoint))["network"]["flat_replicas"]
        if size != num_replicas:
            raise SchedulerError(
                f"{spec.label}: its flat network is for {size} replicas, scenario {scenario_name!r} has {num_replicas}"
            )
    if spec.kind == TUNED and num_replicas < 2:
        raise SchedulerError(f"{spec.label}: needs at least 2 replicas, scenario {scenario_name!r} has {num_replicas}")
