"""A value that a flag and a parameter class both have has one default: that of the flag."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import vidur_ppo_plugin
from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.learn.agent import Controllers
from vidur_ppo_plugin.learn.parameters import Coefficients, PPOParameters
from vidur_ppo_plugin.learn.rollout import Decision
from vidur_ppo_plugin.policy.temperature import TemperatureParams
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable
from vidur_ppo_plugin.routing.reward import HybridParams

ROOMS = ("learn", "policy", "routing")
# What an update or a decision has at a moment, after schedules and controllers: no defaults of the user's.
MOMENTARY = (Coefficients, Controllers, Decision)
# Parameter -> the flag that is named otherwise.
RENAMED = {
    (HybridParams, "window_s"): "reward_window_s",
    (FeatureScales, "requests"): "request_scale",
    (FeatureScales, "tokens"): "token_scale",
    (FeatureScales, "seconds"): "time_scale_s",
    (FeatureTable, "num_waiting_slots"): "max_queue_requests_per_replica",
    (FeatureTable, "trend_window"): "trend_window",
    (FeatureTable, "tail_preference"): "tail_preference",
}
FLAGS = {item.name: item for item in dataclasses.fields(PPOModularFlags)}


def default_of(kind: type, name: str) -> Any:
    """What a class takes for a parameter that is not given."""
    return inspect.signature(kind).parameters[name].default


def parameter_classes() -> list[type]:
    """Every dataclass of the rooms that learn, decide and reward."""
    found = set()
    for room in ROOMS:
        package = importlib.import_module(f"{vidur_ppo_plugin.__name__}.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == module.name:
                    found.add(value)
    return sorted(found - set(MOMENTARY), key=lambda kind: kind.__qualname__)


SHARED = {
    (kind, item.name): item.name
    for kind in parameter_classes()
    for item in dataclasses.fields(kind)
    if item.name in FLAGS and default_of(kind, item.name) is not inspect.Parameter.empty
} | RENAMED


@pytest.mark.parametrize(
    ("kind", "name", "flag"),
    [(kind, name, flag) for (kind, name), flag in SHARED.items()],
    ids=[f"{kind.__name__}.{name}" for kind, name in SHARED],
)
def test_the_default_is_that_of_the_flag(kind: type, name: str, flag: str) -> None:
    assert default_of(kind, name) == FLAGS[flag].default


def test_the_parameters_are_found() -> None:
    """The test above would be silent about classes that moved elsewhere."""
    assert {kind for kind, _ in SHARED} >= {PPOParameters, TemperatureParams, HybridParams, FeatureScales}
    assert len(SHARED) >= 45
