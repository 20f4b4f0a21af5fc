"""Bad values of our flags end a run before it has begun, whichever scheduler it uses.

On the command line that is before Vidur has made an output directory; in programs that build configs
themselves, when the global scheduler is built.
"""

import dataclasses
import sys
from typing import Any

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.flags import PPOModularFlags, check_scheduler, check_workload, flag_name, speed_factors, validate
from vidur_ppo_plugin.learn.checkpoint_flags import adopt_flags
from vidur_ppo_plugin.routing.mixture import teacher_shares
from vidur_ppo_plugin.workload.lengths import length_sampler

from . import config_types


def command_line_problems(flat_config: Any) -> list[str]:
    """What is wrong with the values of the flags of the types that were chosen, a sentence each."""
    num_replicas = flat_config.cluster_config_num_replicas
    if num_replicas < 1:
        return [f"--cluster_config_num_replicas must be >= 1, got {num_replicas}"]
    checks = (
        ("global_scheduler_config", _check_scheduler),
        ("execution_time_predictor_config", speed_factors),
        ("request_generator_config", check_workload),
        ("length_generator_config", lambda flags, _: length_sampler(flags)),
        ("interval_generator_config", check_workload),
    )
    problems = []
    for field_name, check in checks:
        flags = _own_flags(flat_config, getattr(flat_config, f"{field_name}_type"))
        if flags is None:
            continue
        try:
            check(flags, num_replicas)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _check_scheduler(flags: Any, num_replicas: int) -> None:
    """Check a scheduler's flags, and the files that they name."""
    validate(flags)
    path = getattr(flags, "load_checkpoint", None)
    if path:
        try:
            adopt_flags(flags, checkpoint.verify(path), given=_given_flags(type(flags)))
        except ValueError as error:
            raise ValueError(f"{flag_name(type(flags), 'load_checkpoint')}: {error}") from None
    check_scheduler(flags, num_replicas)
    if isinstance(flags, PPOModularFlags):
        teacher_shares(flags)


def _given_flags(config_class: type) -> set[str]:
    """Flags of a class that are on the command line, also if they set what is the default."""
    written = {argument.partition("=")[0].replace("--no-", "--", 1) for argument in sys.argv}
    return {item.name for item in dataclasses.fields(config_class) if flag_name(config_class, item.name) in written}


def _own_flags(flat_config: Any, type_name: str) -> Any:
    """The config object of one of our types, made from a parsed command line; None for other types."""
    for config_class in vars(config_types).values():
        # Vidur's abstract base classes, imported there, have no type of their own.
        if not (isinstance(config_class, type) and hasattr(config_class, "get_type")):
            continue
        if str(config_class.get_type()) == type_name.lower():
            values = {
                field.name: getattr(flat_config, flag_name(config_class, field.name).removeprefix("--"))
                for field in dataclasses.fields(config_class)
            }
            return config_class(**values)
    return None


def apply() -> None:
    """Make every global scheduler, stock or ours, check the replicas' speeds when it is built; once."""
    from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler

    stock_init = BaseGlobalScheduler.__init__
    if hasattr(stock_init, "checks_speed_factors"):
        return

    def __init__(self: Any, config: Any, replicas: Any) -> None:
        speed_factors(config.execution_time_predictor_config, len(replicas))
        stock_init(self, config, replicas)

    __init__.checks_speed_factors = True  # type: ignore[attr-defined]
    BaseGlobalScheduler.__init__ = __init__
