"""What the policy sees, and what it would do: features and prior logits of a decision, without torch."""

import random

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.learn.features import build_features
from vidur_ppo_plugin.policy import greedy
from vidur_ppo_plugin.policy.compiled_actor import CompiledActor
from vidur_ppo_plugin.policy.numpy_actor import NumpyActor
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import Float32Array, Observation
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

#: The actor's parameters by name, and the shape of its network: what is sent to workers after each update.
Weights = tuple[dict[str, Float32Array], dict[str, int | bool]]


class Observer:
    """Features and prior logits, decision after decision of one run: as `learn.agent.Agent.observe`."""

    def __init__(self, flags: PPOModularFlags, delay_model: DelayModel) -> None:
        self._features = build_features(flags)
        self._prior = Prior(flags.prior, weight=flags.prior_weight, delay_model=delay_model)

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> tuple[Observation, Float32Array]:
        """The observation, and the prior's logits."""
        logits = self._prior.logits(self._prior.cost(seen, request))
        return self._features.observe(seen, request), greedy.masked(logits, seen.available)


class GreedyPolicy:
    """The best replica, ties broken by seed: decides as `ppo_modular` does with the checkpoint of these weights."""

    def __init__(self, actor: NumpyActor, flags: PPOModularFlags, delay_model: DelayModel) -> None:
        self._actor = actor
        self._observer = Observer(flags, delay_model)
        self._rng = random.Random(flags.seed)

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> int:
        """The replica for a request."""
        observation, prior_logits = self._observer(seen, request)
        logits = self._actor.logits(observation.replicas, observation.request, prior_logits)
        return greedy.best(logits.tolist(), self._rng)


def build_actor(weights: Weights) -> NumpyActor:
    """The fastest actor that the network's shape allows."""
    parameters, shape = weights
    return (NumpyActor if shape["flat_replicas"] else CompiledActor)(parameters, shape)
