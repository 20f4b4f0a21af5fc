"""Every flag once: its name, default, range, and help that says when to raise it and when to lower it.

The lowest room: standard library only, and nothing of this package above it. The groups (`RewardFlags`,
`LearningFlags`, ...) are the parameters that the code takes; `PPOModularFlags`, all of them in one, is what
`sim/config_types.py` binds to Vidur, what `train` reads from `policy` in its YAML, and what docs/flags.md is made from.

To add a flag, write one field in its group and read it where it acts, as `flags.<name>`. Then change it in
tests/sim/test_no_dead_flags.py, and write the documentation anew (`python -m vidur_ppo_plugin.sim.flag_docs`). What
follows from several flags is a property of the group; a combination that cannot be meant is refused by the check below
the group.

Vidur turns a field `seed` of `LeastTokensGlobalSchedulerConfig` into `--least_tokens_global_scheduler_config_seed`. Its
flag parser knows few types: bool, int, float, str, Optional of those, List[int], List[float], Dict[str, float].
`X | None`, Literal, Tuple, a field without a default, a percent sign in a help text, or
`from __future__ import annotations` here would break the command line of every Vidur run, ours or not (a test checks
every field). Vidur also instantiates every config class in every run, so a group validates nothing when it is made: the
checks are called when the scheduler or predictor is built.
"""

from .flag import flag, flag_name, range_problem, require_value, validate
from .learning import CurriculumFlags, ExplorationFlags, LearningFlags, WarmStartFlags, check_exploration
from .network import NetworkFlags
from .ppo_modular import PPOModularFlags, check_scheduler
from .reward import BALANCED, COMPONENT_FLAGS, HYBRID_COMPONENTS, HybridComponent, RewardFlags, check_reward
from .roofline import RooflineFlags, speed_factors
from .routers import (
    Drain,
    TieBreakingFlags,
    VisibilityFlags,
    drains_of,
    format_drains,
    parse_drains,
)
from .running import RunningFlags
from .workload import (
    LengthFlags,
    LognormalLengthFlags,
    MixtureLengthFlags,
    RenewalFlags,
    ReplayFlags,
    check_workload,
)

__all__ = [
    "BALANCED",
    "COMPONENT_FLAGS",
    "HYBRID_COMPONENTS",
    "CurriculumFlags",
    "Drain",
    "ExplorationFlags",
    "HybridComponent",
    "LearningFlags",
    "LengthFlags",
    "LognormalLengthFlags",
    "MixtureLengthFlags",
    "NetworkFlags",
    "PPOModularFlags",
    "RenewalFlags",
    "ReplayFlags",
    "RewardFlags",
    "RooflineFlags",
    "RunningFlags",
    "TieBreakingFlags",
    "VisibilityFlags",
    "WarmStartFlags",
    "check_exploration",
    "check_reward",
    "check_scheduler",
    "check_workload",
    "drains_of",
    "flag",
    "flag_name",
    "format_drains",
    "parse_drains",
    "range_problem",
    "require_value",
    "speed_factors",
    "validate",
]
