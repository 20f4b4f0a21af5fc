"""The router of a scheduler, as it decides in the twin: the same placements as the scheduler makes in Vidur."""

from typing import Any

from vidur_ppo_plugin.routing.routers import Router, build_router

from .schedulers import LEARNED, SchedulerSpec


def build_scheduler_router(scheduler: SchedulerSpec, config: Any, *, seed: int) -> tuple[Router, int]:
    """The router, and how many waiting requests of each replica it wants to see; `config` is Vidur's of the cell."""
    from vidur_ppo_plugin.sim.delay_model import build_delay_model

    delay_model = build_delay_model(config)
    if scheduler.kind != LEARNED:
        return build_router(scheduler.kind, seed=seed, delay_model=delay_model, options=scheduler.options), 0
    return _learned(config, delay_model)


def _learned(config: Any, delay_model: Any) -> tuple[Router, int]:
    from vidur_ppo_plugin import checkpoint
    from vidur_ppo_plugin.learn.build import build_agent  # imports torch
    from vidur_ppo_plugin.learn.policy_checkpoint import restore

    flags = config.cluster_config.global_scheduler_config
    agent = build_agent(flags, num_replicas=config.cluster_config.num_replicas, delay_model=delay_model)
    restore(agent, checkpoint.load(flags.load_checkpoint))
    return agent.policy, flags.max_queue_requests_per_replica
