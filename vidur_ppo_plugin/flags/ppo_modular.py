"""All flags of `ppo_modular`, and the check of any scheduler's flags."""

import math
from dataclasses import dataclass
from typing import Any

from .flag import require, validate
from .learning import (
    CurriculumFlags,
    ExplorationFlags,
    LearningFlags,
    WarmStartFlags,
    check_exploration,
    check_learning,
)
from .network import NetworkFlags, check_network
from .reward import RewardFlags, check_reward
from .routers import TieBreakingFlags, check_router
from .running import RunningFlags, check_running


@dataclass
class PPOModularFlags(
    RewardFlags,
    LearningFlags,
    ExplorationFlags,
    WarmStartFlags,
    CurriculumFlags,
    NetworkFlags,
    RunningFlags,
    TieBreakingFlags,
):
    """All flags of `ppo_modular`."""


def check_scheduler(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags are out of range or do not fit each other or the cluster."""
    validate(flags)
    if isinstance(flags, PPOModularFlags):
        _check_demonstrating(flags)
        check_exploration(flags)
        check_learning(flags, num_replicas)
        most_entropy = math.log(num_replicas)
        is_right = flags.target_entropy <= most_entropy
        require(flags, is_right, "target_entropy", f"at most log(replicas) = {most_entropy:.3f}")
        check_network(flags)
        check_reward(flags)
        check_running(flags, num_replicas)
    check_router(flags, num_replicas)


def _check_demonstrating(flags: PPOModularFlags) -> None:
    """A run with teachers does nothing else."""
    for name in ("inference_only", "warm_start_file", "load_checkpoint", "save_checkpoint", "curriculum"):
        is_right = not (flags.demonstrate_with and getattr(flags, name))
        require(flags, is_right, name, "unset with demonstrate_with")
    is_used = bool(flags.demonstrate_with) or not flags.demonstrations_file
    require(flags, is_used, "demonstrations_file", "unset without demonstrate_with")
