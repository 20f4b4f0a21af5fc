"""Our config classes as Vidur knows them: the groups of `flags/` bound to Vidur's base classes and type enums.

Defining a subclass is all it takes for Vidur to offer its flags, so importing this module is phase 1 of
plugin loading. It must not import anything of Vidur but `vidur.config` and `vidur.types` (see `_autoload.py`).
Vidur looks at direct bases only, hence one class per type, each derived directly from the base.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vidur.config import (
    BaseExecutionTimePredictorConfig,
    BaseGlobalSchedulerConfig,
    BaseRequestGeneratorConfig,
    BaseRequestIntervalGeneratorConfig,
    BaseRequestLengthGeneratorConfig,
)

from vidur_ppo_plugin.flags import (
    LeastTokensFlags,
    LognormalLengthFlags,
    MixtureLengthFlags,
    PPOModularFlags,
    RenewalFlags,
    ReplayFlags,
    RooflineFlags,
    ShortestDelayFlags,
    SizeSplitFlags,
    TieBreakingFlags,
)

if TYPE_CHECKING:
    from enum import IntEnum as BaseIntEnum  # what Vidur's is; Vidur has no types
else:
    from vidur.types import BaseIntEnum


class PluginGlobalSchedulerType(BaseIntEnum):
    """Our scheduler types. IntEnums compare by value across enums: stay far away from Vidur's 1 to 3."""

    PPO_MODULAR = 1001
    LEAST_OUTSTANDING = 1002
    POWER_OF_TWO = 1003
    LEAST_KV = 1004
    LEAST_TOKENS = 1005
    SHORTEST_DELAY = 1006
    SIZE_SPLIT = 1007
    LEAST_WORK = 1008


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
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.PPO_MODULAR


@dataclass
class LeastOutstandingGlobalSchedulerConfig(TieBreakingFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type least_outstanding`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.LEAST_OUTSTANDING


@dataclass
class PowerOfTwoGlobalSchedulerConfig(TieBreakingFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type power_of_two`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.POWER_OF_TWO


@dataclass
class LeastKvGlobalSchedulerConfig(TieBreakingFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type least_kv`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.LEAST_KV


@dataclass
class LeastTokensGlobalSchedulerConfig(LeastTokensFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type least_tokens`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.LEAST_TOKENS


@dataclass
class LeastWorkGlobalSchedulerConfig(TieBreakingFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type least_work`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.LEAST_WORK


@dataclass
class ShortestDelayGlobalSchedulerConfig(ShortestDelayFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type shortest_delay`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.SHORTEST_DELAY


@dataclass
class SizeSplitGlobalSchedulerConfig(SizeSplitFlags, BaseGlobalSchedulerConfig):
    """`--global_scheduler_config_type size_split`."""

    @staticmethod
    def get_type() -> PluginGlobalSchedulerType:
        return PluginGlobalSchedulerType.SIZE_SPLIT


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
