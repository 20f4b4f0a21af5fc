"""`register()`: the entry point of the group `vidur.plugins`, and the only place that touches Vidur's registries."""

import sys
from typing import Any

from vidur_ppo_plugin import _autoload

_SCHEDULER_REGISTRY = "vidur.scheduler.global_scheduler.global_scheduler_registry"
_PREDICTOR_REGISTRY = "vidur.execution_time_predictor.execution_time_predictor_registry"
_WORKLOAD_REGISTRIES = {
    "vidur.request_generator.request_length_generator_registry": "RequestLengthGeneratorRegistry",
    "vidur.request_generator.request_interval_generator_registry": "RequestIntervalGeneratorRegistry",
    "vidur.request_generator.request_generator_registry": "RequestGeneratorRegistry",
}


def register() -> None:
    """Do whatever Vidur is ready for; called after its config package and after each of its registries.

    Defines our flags (phase 1), then registers factories and applies the repairs (phase 2). The factories
    import the scheduler, and torch with it, only when Vidur builds one. Re-entrant.
    """
    # Only imported, no attribute is touched: if a user imported this module first, Vidur calls us while it
    # is still being executed.
    import vidur_ppo_plugin.sim.config_types  # noqa: F401

    if _command_line_problems not in _autoload.command_line_checks:
        _autoload.command_line_checks.append(_command_line_problems)
    schedulers = _registry(_SCHEDULER_REGISTRY, "GlobalSchedulerRegistry")
    if schedulers is not None:
        _register_schedulers(schedulers)
    predictors = _registry(_PREDICTOR_REGISTRY, "ExecutionTimePredictorRegistry")
    if predictors is not None:
        _register_predictors(predictors)
    _register_workloads()


def _registry(module_name: str, class_name: str) -> Any:
    """Vidur's registry class if its module has come that far, else None."""
    return getattr(sys.modules.get(module_name), class_name, None)


def _command_line_problems(flat_config: Any) -> list[str]:
    from vidur_ppo_plugin.sim.checks import command_line_problems

    return command_line_problems(flat_config)


def _register_schedulers(registry: Any) -> None:
    from vidur_ppo_plugin.sim import checks, repairs
    from vidur_ppo_plugin.sim.config_types import PluginGlobalSchedulerType

    # The schedulers' registry is imported after Vidur's entities and replica schedulers, which we repair.
    repairs.apply()
    checks.apply()
    for scheduler_type in PluginGlobalSchedulerType:
        registry.register(scheduler_type, _scheduler_factory(str(scheduler_type)))


def _scheduler_factory(name: str) -> Any:
    def build(config: Any, replicas: Any) -> Any:
        if name == "ppo_modular":
            from vidur_ppo_plugin.sim.ppo_scheduler import PPOModularScheduler  # imports torch

            return PPOModularScheduler(config, replicas)
        from vidur_ppo_plugin.sim.schedulers import HeuristicScheduler

        return HeuristicScheduler(config, replicas)

    return build


def _register_predictors(registry: Any) -> None:
    from vidur_ppo_plugin.sim.config_types import PluginExecutionTimePredictorType

    def build_roofline(**arguments: Any) -> Any:
        from vidur_ppo_plugin.sim.roofline_predictor import RooflineExecutionTimePredictor

        return RooflineExecutionTimePredictor(**arguments)

    registry.register(PluginExecutionTimePredictorType.ROOFLINE, build_roofline)


def _register_workloads() -> None:
    for module, registry_name in _WORKLOAD_REGISTRIES.items():
        registry = _registry(module, registry_name)
        if registry is None:
            continue  # and our types may not exist yet either, see `register`
        from vidur_ppo_plugin.sim import config_types

        for member in getattr(config_types, f"Plugin{registry_name.removesuffix('Registry')}Type"):
            registry.register(member, _build_workload)


def _build_workload(config: Any) -> Any:
    from vidur_ppo_plugin.sim.request_generators import GENERATORS

    return GENERATORS[str(config.get_type())](config)
