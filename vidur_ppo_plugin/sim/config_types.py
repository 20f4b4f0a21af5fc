"""Our config classes as Vidur knows them: the groups of `flags/` bound to Vidur's base classes and type enums.

Defining a subclass is all it takes for Vidur to offer its flags, so importing this module is phase 1 of
plugin loading. It must not import anything of Vidur but `vidur.config` and `vidur.types` (see `_autoload.py`).
Vidur looks at direct bases only, hence one class per type, each derived directly from the base. Those of the heuristics
are made from their table.
"""

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from vidur.config import (
    BaseExecutionTimePredictorConfig,
    BaseGlobalSchedulerConfig,
    BaseRequestGeneratorConfig,
    BaseRequestIntervalGeneratorConfig,
    BaseRequestLengthGeneratorConfig,
)

from vidur_ppo_plugin.flags import (
    LognormalLengthFlags,
    MixtureLengthFlags,
    PPOModularFlags,
    RenewalFlags,
    ReplayFlags,
    RooflineFlags,
)
from vidur_ppo_plugin.routing.heuristics import HEURISTICS, Heuristic

if TYPE_CHECKING:
    from enum import IntEnum as BaseIntEnum  # what Vidur's is; Vidur has no types
else:
    from vidur.types import BaseIntEnum


#: Our scheduler types. IntEnums compare by value across enums: all stay far away from Vidur's 1 to 3.
_SCHEDULER_TYPES = {"PPO_MODULAR": 1001, **{name.upper(): entry.type_id for name, entry in HEURISTICS.items()}}
PluginGlobalSchedulerType = BaseIntEnum("PluginGlobalSchedulerType", _SCHEDULER_TYPES, module=__name__)  # type: ignore[misc]


class PluginExecutionTimePredictorType(BaseIntEnum):
    """Our predictor types."""

    ROOFLINE = 1001


class PluginRequestLengthGeneratorType(BaseIntEnum):
    """Our generators of request lengths."""

    LOGNORMAL = 1001
    MIXTURE = 1002


class PluginRequestIntervalGeneratorType(BaseIntEnum):
    """Our generators of gaps between arrivals."""

    RENEWAL = 1001


class PluginRequestGeneratorType(BaseIntEnum):
    """Our generators of whole requests."""

    REPLAY = 1001


@dataclass
class PPOGlobalSchedulerModularConfig(PPOModularFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type ppo_modular`."""

    @staticmethod
    def get_type() -> Any:
        return PluginGlobalSchedulerType["PPO_MODULAR"]


def _heuristic_config(heuristic: Heuristic) -> Any:
    """The config class of a heuristic's scheduler, `--global_scheduler_config_type` with its name."""
    scheduler_type = PluginGlobalSchedulerType[heuristic.name.upper()]
    namespace = {
        "__doc__": f"`--global_scheduler_config_type {heuristic.name}`.",
        "__module__": __name__,
        "get_type": staticmethod(lambda: scheduler_type),
    }
    name = f"{heuristic.class_name}GlobalSchedulerConfig"
    bases = (heuristic.flags, BaseGlobalSchedulerConfig)
    return make_dataclass(name, [], bases=bases, namespace=namespace)


globals().update({made.__name__: made for made in map(_heuristic_config, HEURISTICS.values())})


@dataclass
class RooflineExecutionTimePredictorConfig(RooflineFlags, BaseExecutionTimePredictorConfig):
    """`--execution_time_predictor_config_type roofline`."""

    @staticmethod
    def get_type() -> PluginExecutionTimePredictorType:
        return PluginExecutionTimePredictorType.ROOFLINE


@dataclass
class LognormalRequestLengthGeneratorConfig(LognormalLengthFlags, BaseRequestLengthGeneratorConfig):
    """`--length_generator_config_type lognormal`."""

    @staticmethod
    def get_type() -> PluginRequestLengthGeneratorType:
        return PluginRequestLengthGeneratorType.LOGNORMAL


@dataclass
class MixtureRequestLengthGeneratorConfig(MixtureLengthFlags, BaseRequestLengthGeneratorConfig):
    """`--length_generator_config_type mixture`."""

    @staticmethod
    def get_type() -> PluginRequestLengthGeneratorType:
        return PluginRequestLengthGeneratorType.MIXTURE


@dataclass
class RenewalRequestIntervalGeneratorConfig(RenewalFlags, BaseRequestIntervalGeneratorConfig):
    """`--interval_generator_config_type renewal`."""

    @staticmethod
    def get_type() -> PluginRequestIntervalGeneratorType:
        return PluginRequestIntervalGeneratorType.RENEWAL


@dataclass
class ReplayRequestGeneratorConfig(ReplayFlags, BaseRequestGeneratorConfig):
    """`--request_generator_config_type replay`."""

    @staticmethod
    def get_type() -> PluginRequestGeneratorType:
        return PluginRequestGeneratorType.REPLAY
