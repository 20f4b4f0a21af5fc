"""The flags: plain dataclasses, one per scheduler or predictor, each field with its help text and its range.

`sim/config_types.py` binds them to Vidur, which turns a field `seed` of `LeastTokensGlobalSchedulerConfig`
into `--least_tokens_global_scheduler_config_seed`. Vidur's flag parser knows few types: bool, int, float, str,
Optional of those, List[int], List[float], Dict[str, float]. `X | None`, Literal, Tuple, a field without a
default, a percent sign in a help text, or `from __future__ import annotations` here would break the command
line of every Vidur run, ours or not (a test checks every field).

Vidur instantiates every config class of every run, so nothing here validates by itself: `validate` is called
when the scheduler or predictor is built.
"""

import math
from dataclasses import dataclass, make_dataclass
from typing import Any, List

from vidur_ppo_plugin.flag import flag, flag_name, validate
from vidur_ppo_plugin.ppo_flags import (
    CurriculumFlags,
    ExplorationFlags,
    LearningFlags,
    NetworkFlags,
    RewardFlags,
    RunningFlags,
    WarmStartFlags,
)
from vidur_ppo_plugin.routing.heuristics import HEURISTICS, Heuristic
from vidur_ppo_plugin.routing.mixture import parse_mixture
from vidur_ppo_plugin.routing.visibility import Visibility, parse_drains
from vidur_ppo_plugin.workload_flags import (
    LognormalLengthFlags,
    MixtureLengthFlags,
    RenewalFlags,
    ReplayFlags,
    check_workload,
)

__all__ = [
    "HEURISTIC_FLAGS",
    "LognormalLengthFlags",
    "MixtureLengthFlags",
    "PPOModularFlags",
    "RenewalFlags",
    "ReplayFlags",
    "RooflineFlags",
    "TieBreakingFlags",
    "VisibilityFlags",
    "check_scheduler",
    "check_workload",
    "flag",
    "flag_name",
    "speed_factors",
    "validate",
    "visibility",
]


@dataclass
class VisibilityFlags:
    """What the router gets to see of the replicas."""

    report_delay_s: float = flag(
        0.0,
        "Age of what replicas report when it reaches the router, in seconds; what the router itself sent is known at "
        "once. Raise it to study routers that scrape metrics, lower it for those that are told at once.",
        low=0,
        high=3600,
    )
    drained: str = flag(
        "",
        "Replicas that take no new requests for a while: REPLICA:FROM_S:TO_S, separated by commas; 1:60:120 is replica "
        "1 from second 60 to 120.",
    )


@dataclass
class TieBreakingFlags(VisibilityFlags):
    """What every heuristic scheduler has: a seed for fair, reproducible tie-breaking."""

    seed: int = flag(42, "Seed of every random choice that the scheduler makes.", low=0, high=1_000_000_000)


def _heuristic_flags(heuristic: Heuristic) -> type:
    """The flags of a heuristic's scheduler; the class of one with options of its own is called `...Flags`."""
    if not heuristic.options:
        return TieBreakingFlags
    options = [
        (option.name, type(option.default), flag(option.default, option.help, low=option.low))
        for option in heuristic.options
    ]
    return make_dataclass(
        f"{heuristic.class_name}Flags",
        options,
        bases=(TieBreakingFlags,),
        namespace={"__doc__": heuristic.options_are, "__module__": __name__},
    )


#: Of each of our heuristics, by its name.
HEURISTIC_FLAGS = {name: _heuristic_flags(heuristic) for name, heuristic in HEURISTICS.items()}


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


@dataclass
class RooflineFlags:
    """Flags of the roofline predictor beyond those of Vidur's base class."""

    replica_speed_factors: List[float] = flag(
        [1.0],
        "Speed of each replica relative to its device: 0.5 takes twice as long. One value per replica, or a "
        "pattern whose length divides the number of replicas and is repeated.",
        above=0,
    )


def check_scheduler(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags are out of range or do not fit each other or the cluster."""
    validate(flags)
    if isinstance(flags, PPOModularFlags):
        _check_ppo(flags, num_replicas)
    visibility(flags, num_replicas)
    num_long = getattr(flags, "num_long_replicas", None)
    if num_long is not None and num_long >= num_replicas:
        raise ValueError(
            f"{flag_name(type(flags), 'num_long_replicas')} must be smaller than the number of replicas "
            f"({num_replicas}), got {num_long}"
        )


def visibility(flags: Any, num_replicas: int) -> Visibility:
    """What a scheduler's flags let the router see; ValueError naming the flag."""
    try:
        drains = parse_drains(flags.drained, num_replicas)
    except ValueError as error:
        raise ValueError(f"{flag_name(type(flags), 'drained')}={flags.drained!r}: {error}") from None
    return Visibility(report_delay_s=flags.report_delay_s, drains=drains)


def _check_ppo(flags: PPOModularFlags, num_replicas: int) -> None:
    """Combinations of flags that cannot be meant; each sentence names the flags."""

    def require(is_right: bool, name: str, right: str) -> None:
        if not is_right:
            raise ValueError(f"{flag_name(type(flags), name)} must be {right}, got {getattr(flags, name)!r}")

    if flags.demonstrate_with:
        try:
            parse_mixture(flags.demonstrate_with)
        except ValueError as error:
            name = flag_name(type(flags), "demonstrate_with")
            raise ValueError(f"{name}={flags.demonstrate_with!r}: {error}") from None
    for name in ("inference_only", "warm_start_file", "load_checkpoint", "save_checkpoint", "curriculum"):
        require(not (flags.demonstrate_with and getattr(flags, name)), name, "unset with demonstrate_with")
    is_used = bool(flags.demonstrate_with) or not flags.demonstrations_file
    require(is_used, "demonstrations_file", "unset without demonstrate_with")
    most_entropy = math.log(num_replicas)
    require(flags.min_temperature <= flags.max_temperature, "min_temperature", "at most max_temperature")
    low, high = flags.min_temperature, flags.max_temperature
    require(low <= flags.base_temperature <= high, "base_temperature", f"between {low} and {high} (min and max)")
    require(flags.entropy_min <= most_entropy, "entropy_min", f"at most log(replicas) = {most_entropy:.3f}")
    require(flags.target_entropy <= most_entropy, "target_entropy", f"at most log(replicas) = {most_entropy:.3f}")
    require(not (flags.attention_heads and flags.enable_flat_network), "attention_heads", "0 with the flat network")
    heads = flags.attention_heads
    require(
        not heads or flags.hidden_size % heads == 0,
        "attention_heads",
        f"a divisor of hidden_size ({flags.hidden_size})",
    )
    require(not (flags.max_candidates and flags.enable_flat_network), "max_candidates", "0 with the flat network")
    require(flags.max_candidates != 1, "max_candidates", "0 (all) or at least 2")
    low_clip, high_clip = flags.reward_clip_low, flags.reward_clip_high
    both = low_clip is not None and high_clip is not None
    require(not both or low_clip < high_clip, "reward_clip_low", "below reward_clip_high")  # type: ignore[operator]
    require(not flags.mask_over_limit or flags.latency_limit_s > 0, "mask_over_limit", "off without latency_limit_s")
    require(flags.collapse_share > 1 / num_replicas or num_replicas == 1, "collapse_share", f"above 1 / {num_replicas}")


def speed_factors(flags: Any, num_replicas: int) -> List[float]:
    """The speed of each replica; 1.0 for predictors that know no speeds. ValueError if they do not fit."""
    pattern = getattr(flags, "replica_speed_factors", None)
    if pattern is None:
        return [1.0] * num_replicas
    validate(flags)
    if not pattern or num_replicas % len(pattern):
        raise ValueError(
            f"{flag_name(type(flags), 'replica_speed_factors')} must have one value per replica "
            f"({num_replicas}) or a pattern whose length divides that, got {len(pattern)} values: {pattern}"
        )
    return list(pattern) * (num_replicas // len(pattern))
