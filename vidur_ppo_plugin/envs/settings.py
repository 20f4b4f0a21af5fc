"""What an environment is asked for, checked: the scenario with its changes, and the flags of rewards and features."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vidur_ppo_plugin._autoload import suggestion
from vidur_ppo_plugin.flags import PPOModularFlags, RewardFlags, flag_name, validate
from vidur_ppo_plugin.scenario import Scenario, ScenarioError

BACKENDS = ("twin", "vidur")
_SPEEDS = "roofline_execution_time_predictor_config_replica_speed_factors"
_NUM_REPLICAS = "cluster_config_num_replicas"
_CAPACITY_HINT = "find it with `vidur-ppo capacity`"

# Flags of `ppo_modular` that mean something here: what a decision is worth, what is seen, when an episode is lost.
_OBSERVATION_FLAGS = (
    "max_queue_requests_per_replica",
    "trend_window",
    "request_scale",
    "token_scale",
    "time_scale_s",
    "prior",
    "prior_weight",
)
# Rewards are given as they are: scaling them is the learner's business.
FLAGS = (
    *(item.name for item in dataclasses.fields(RewardFlags) if item.name != "normalize_rewards"),
    *_OBSERVATION_FLAGS,
    "latency_limit_s",
)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """ValueError with the nearest right name if `value` is none of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}{suggestion(str(value), choices)}; there are {', '.join(choices)}")


def check_at_least(name: str, value: float, low: float) -> None:
    """ValueError if a number is too small."""
    if not low <= value < math.inf:
        raise ValueError(f"{name} must be >= {low}, got {value!r}")


def ppo_flags(options: Mapping[str, Any]) -> PPOModularFlags:
    """The flags of `ppo_modular` with these values; ValueError names the one that is unknown or out of range."""
    for name in options:
        if name not in FLAGS:
            raise ValueError(f"unknown option {name!r}{suggestion(name, FLAGS)}; there are {', '.join(FLAGS)}")
    flags = PPOModularFlags(**options)
    check_choice("reward_mode", flags.reward_mode, _choices("reward_mode"))
    check_choice("prior", flags.prior, _choices("prior"))
    try:
        validate(flags)
    except ValueError as error:
        # Here they are arguments, not flags of a command line.
        raise ValueError(str(error).replace(flag_name(PPOModularFlags, ""), "")) from None
    return flags


def changed(
    scenario: Scenario,
    *,
    num_requests: int | None = None,
    load: float | None = None,
    num_replicas: int | None = None,
    replica_speeds: Sequence[float] | None = None,
) -> Scenario:
    """The scenario with other values. Its capacity grows with the replicas' speeds, so that load keeps its meaning."""
    if num_requests is not None:
        check_at_least("num_requests", num_requests, 1)
        scenario = scenario.at(num_requests=num_requests)
    if load is not None:
        if not 0 < load < 2:
            raise ValueError(f"load must be between 0 and 2 (1 is the capacity), got {load!r}")
        scenario = scenario.at(load=load)
    if num_replicas is not None or replica_speeds is not None:
        scenario = _resized(scenario, num_replicas, replica_speeds)
    if scenario.trace is None and not scenario.lengths:
        raise ScenarioError(
            f"scenario {scenario.name!r} replays a trace: pass `load_scenario({scenario.name!r}).at(trace=..., "
            f"capacity=...)` in place of its name"
        )
    if scenario.capacity is None:
        raise ScenarioError(
            f"scenario {scenario.name!r} has no capacity, which its load is relative to: {_CAPACITY_HINT}"
        )
    return scenario


def speeds_of(scenario: Scenario) -> list[float]:
    """The speed of each replica."""
    pattern = list(scenario.flags.get(_SPEEDS, [1.0]))
    return pattern * (scenario.num_replicas // len(pattern))


def _resized(scenario: Scenario, num_replicas: int | None, replica_speeds: Sequence[float] | None) -> Scenario:
    size = scenario.num_replicas if num_replicas is None else num_replicas
    check_at_least("num_replicas", size, 1)
    given = scenario.flags.get(_SPEEDS, [1.0]) if replica_speeds is None else replica_speeds
    pattern = [float(speed) for speed in given]
    if not pattern or size % len(pattern) or not all(0 < speed < math.inf for speed in pattern):
        raise ValueError(
            f"replica_speeds must be > 0, one for each of {size} replicas or a pattern whose length divides that, "
            f"got {pattern}"
        )
    for item in scenario.drained:
        if item.replica >= size:
            raise ValueError(
                f"num_replicas must be > {item.replica}, which scenario {scenario.name!r} drains, got {size}"
            )
    capacity = scenario.capacity
    if capacity is not None:
        grown = sum(pattern) * (size // len(pattern)) / sum(speeds_of(scenario))
        capacity = dataclasses.replace(capacity, qps=capacity.qps * grown)
    flags = {**scenario.flags, _NUM_REPLICAS: size, _SPEEDS: pattern}
    return scenario.at(flags=flags, capacity=capacity)


def _choices(name: str) -> Sequence[str]:
    (item,) = (item for item in dataclasses.fields(PPOModularFlags) if item.name == name)
    choices: Sequence[str] = item.metadata["choices"]
    return choices
