"""Builds an agent from the flags of `ppo_modular`: the one place where flags become objects."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vidur_ppo_plugin.flags import PPOModularFlags, flag_name
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.policy.policy import Observer
from vidur_ppo_plugin.policy.temperature import TemperatureController
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior

from .agent import Agent, Controllers
from .curriculum import Curriculum
from .demonstrations import load
from .features import build_features
from .parameters import ppo_parameters
from .ppo import PPO
from .schedules import KlAdaptiveLearningRate, KlController, Schedule
from .warm_start import DemonstrationSet, clone


def build_agent(
    flags: PPOModularFlags,
    *,
    num_replicas: int,
    delay_model: DelayModel,
    update_options: Mapping[str, Any] | None = None,
) -> Agent:
    """An agent, untrained or cloned from demonstrations; every random choice follows from `flags.seed`.

    `update_options`: parameters of an update that no flag of `ppo_modular` sets.
    """
    # The networks are tiny: a second thread costs more than it brings, and adds up in another order.
    torch.set_num_threads(1)
    features = build_features(flags)
    shape = NetworkShape(
        num_replica_features=features.num_replica_features,
        num_request_features=features.num_request_features,
        feature_projection_dim=flags.feature_projection_dim,
        hidden_size=flags.hidden_size,
        critic_gru_layers=flags.critic_gru_layers,
        attention_heads=flags.attention_heads,
        decoupled=flags.enable_decoupled_ac,
        flat_replicas=num_replicas if flags.enable_flat_network else 0,
    )
    prior = Prior(flags.prior, weight=flags.prior_weight, delay_model=delay_model)
    parameters = replace(ppo_parameters(flags), **(update_options or {}))
    ppo = PPO(ActorCritic(shape, flags.seed), parameters, seed=flags.seed)
    if flags.warm_start_file:
        _warm_start(ppo, flags, features, prior)
    return Agent(
        observer=Observer(features, prior),
        ppo=ppo,
        controllers=_controllers(flags),
        flags=flags,
    )


def build_curriculum(flags: PPOModularFlags, metric_names: list[str]) -> Curriculum:
    """The curriculum of the flag; ValueError naming it if a stage is wrong or waits for an unknown metric."""
    flag = flag_name(type(flags), "curriculum")
    curriculum = Curriculum.parse(flags.curriculum, flag=flag)
    unknown = [name for name in curriculum.metric_names if name not in metric_names]
    if unknown:
        raise ValueError(f"{flag}={flags.curriculum!r}: {unknown[0]!r} is not recorded; see docs/metrics.md for names")
    if curriculum.max_load > 1.0:
        raise ValueError(f"{flag}={flags.curriculum!r}: load must be at most 1, the workload's own rate")
    return curriculum


def _warm_start(ppo: PPO, flags: PPOModularFlags, features: FeatureTable, prior: Prior) -> None:
    """Load the demonstrations; clone the actor from them, unless its weights come from a checkpoint."""
    flag, path = flag_name(type(flags), "warm_start_file"), Path(flags.warm_start_file)
    demonstrations = load(path, feature_hash=features.hash, flag=flag)
    if prior.name not in ("none", *demonstrations.priors):
        raise ValueError(f"{flag}={path}: it has costs of the priors {demonstrations.priors}, not of {prior.name}")
    size = ppo.network.shape.flat_replicas
    if size and (demonstrations.num_replicas != size).any():
        sizes = sorted(set(demonstrations.num_replicas.tolist()))
        raise ValueError(f"{flag}={path}: it has decisions among {sizes} replicas; the flat network is for {size} only")
    ppo.demonstrations = DemonstrationSet(demonstrations, prior)
    if flags.load_checkpoint:
        return
    clone(ppo.network, demonstrations, prior, flags)
    ppo.keep_reference()


def check_resumed(agent: Agent, flags: PPOModularFlags) -> None:
    """ValueError if a warm-started agent that was just loaded lacks the demonstrations it still learns from."""
    weight = 0.0 if agent.controllers.bc_coef is None else agent.controllers.bc_coef.value(agent.num_decisions)
    is_warm_started, has_demonstrations = agent.ppo.cloned_from is not None, agent.ppo.demonstrations is not None
    if is_warm_started and not has_demonstrations and weight > 0 and not flags.inference_only:
        raise ValueError(
            f"{flag_name(type(flags), 'warm_start_file')} must be given: the checkpoint was warm-started, and after "
            f"{agent.num_decisions} decisions demonstrations still count with weight {weight:g}; to go on without "
            f"them, set {flag_name(type(flags), 'bc_coef')} to 0"
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _controllers(flags: PPOModularFlags) -> Controllers:
    steps = flags.schedule_steps
    return Controllers(
        temperature=TemperatureController(flags, schedule_updates=flags.schedule_updates),
        entropy_coef=Schedule(
            start=flags.entropy_coef, end=_or(flags.entropy_coef_end, flags.entropy_coef), steps=steps
        ),
        learning_rate=Schedule(start=flags.lr, end=_or(flags.lr_end, flags.lr), steps=steps),
        epsilon=Schedule(start=flags.epsilon, end=0.0, steps=flags.epsilon_steps),
        kl=KlController(kl_coef=flags.kl_coef, target_kl=flags.target_kl) if flags.enable_adaptive_kl else None,
        adaptive_lr=(
            KlAdaptiveLearningRate(lr=flags.lr, target_kl=flags.target_kl) if flags.enable_adaptive_lr else None
        ),
        kl_ref_coef=_pull(flags),
        bc_coef=Schedule(start=flags.bc_coef, end=0.0, steps=flags.bc_fade_steps) if flags.bc_coef else None,
    )


def _pull(flags: PPOModularFlags) -> Schedule | None:
    """The weight of the pull to the reference: it fades over `kl_ref_steps`, or stays if they are 0."""
    if not flags.kl_ref_coef:
        return None
    kind = "linear" if flags.kl_ref_steps else "constant"
    return Schedule(start=flags.kl_ref_coef, end=0.0, steps=max(1, flags.kl_ref_steps), kind=kind)
