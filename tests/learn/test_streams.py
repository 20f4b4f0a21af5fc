"""PPO on several streams at once: groups of different sizes, memories of their own, the expectation over actions."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from vidur_ppo_plugin.flags import LearningFlags, PPOModularFlags
from vidur_ppo_plugin.learn.parameters import ppo_parameters
from vidur_ppo_plugin.learn.ppo import PPO, Coefficients, PPOParameters
from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.learn.shard import LocalShards
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.features import Observation

FEATURES, REQUEST = 5, 3
COEFFICIENTS = Coefficients(learning_rate=3e-3, entropy_coef=0.0)


def learner(**parameters: object) -> PPO:
    shape = NetworkShape(num_replica_features=FEATURES, num_request_features=REQUEST, hidden_size=32)
    return PPO(ActorCritic(shape, 0), PPOParameters(**parameters), seed=0)  # type: ignore[arg-type]


def rollout(rng: np.random.Generator, num_replicas: int, *, stream: int = 0, length: int = 48) -> Rollout:
    """Random decisions; the replica with the largest first feature pays best."""
    replicas = rng.random((length, num_replicas, FEATURES), dtype=np.float32)
    actions = rng.integers(num_replicas, size=length)
    rewards = replicas[:, :, 0].astype(np.float64)
    return Rollout(
        replicas=replicas,
        request=rng.random((length, REQUEST), dtype=np.float32),
        prior_logits=np.zeros((length, num_replicas), np.float32),
        actions=actions,
        temperatures=np.ones(length, np.float32),
        epsilons=np.zeros(length, np.float32),
        rewards=rewards[np.arange(length), actions],
        action_rewards=rewards,
        next_observation=Observation(replicas[0], rng.random(REQUEST, dtype=np.float32)),
        stream=stream,
    )


def learn(ppo: PPO, *rollouts: Rollout) -> dict[str, float]:
    return ppo.update(LocalShards(ppo, rollouts), COEFFICIENTS)


def weights(ppo: PPO) -> list[list[float]]:
    return [parameter.detach().reshape(-1).tolist() for parameter in ppo.network.parameters()]


@pytest.mark.parametrize("parameters", [{}, {"expected_gradient": True, "enable_critic": False}, {"gamma": 0.5}])
def test_clusters_of_different_sizes_are_learned_from_together(parameters: dict[str, object]) -> None:
    if parameters.get("gamma"):
        parameters = {**parameters, "all_action_baseline": False}
    ppo, rng = learner(minibatch_size=64, **parameters), np.random.default_rng(1)

    def greedy_share(num_replicas: int) -> float:
        actor, test = Actor.from_network(ppo.network), rollout(np.random.default_rng(9), num_replicas, length=200)
        logits = [actor.logits(*seen) for seen in zip(test.replicas, test.request, test.prior_logits, strict=True)]
        return float(np.mean(np.argmax(logits, axis=1) == np.argmax(test.replicas[:, :, 0], axis=1)))

    for step in range(40):
        metrics = learn(ppo, *(rollout(rng, 2 + stream, stream=stream) for stream in range(3)))
        if step < 3:
            # The last bit of a product depends on the number of its rows, which is any number here.
            assert metrics["first_ratio_error"] < 1e-6
    assert ("value_loss" in metrics) == bool(parameters.get("enable_critic", True))
    assert min(greedy_share(size) for size in (2, 3, 4, 7)) > 0.6


def test_the_expectation_over_actions_does_not_depend_on_those_that_were_sampled() -> None:
    results = {}
    for is_expected in (True, False):
        for name in ("as sampled", "others"):
            ppo = learner(expected_gradient=is_expected, enable_critic=False, normalize_rewards=False)
            seen = rollout(np.random.default_rng(2), 4)
            actions = seen.actions if name == "as sampled" else (seen.actions + 1) % 4
            assert seen.action_rewards is not None
            rewards = seen.action_rewards[np.arange(len(seen)), actions]
            learn(ppo, dataclasses.replace(seen, actions=actions, rewards=rewards))
            results[is_expected, name] = weights(ppo)
    assert results[True, "as sampled"] == results[True, "others"]
    assert results[False, "as sampled"] != results[False, "others"]


def test_every_stream_has_its_own_memory() -> None:
    ppo, rng = learner(gamma=0.5, all_action_baseline=False), np.random.default_rng(3)
    learn(ppo, rollout(rng, 4, stream=0), rollout(rng, 4, stream=7))
    hiddens = ppo.state_dict()["preparation"]["hiddens"]
    assert set(hiddens) == {0, 7} and not torch.equal(hiddens[0], hiddens[7])
    # A stream that starts anew forgets, whether or not there is a state to bootstrap from.
    last = dataclasses.replace(rollout(rng, 4, stream=0), is_last_of_stream=True)
    learn(ppo, last, dataclasses.replace(rollout(rng, 4, stream=7), next_observation=None))
    assert ppo.state_dict()["preparation"]["hiddens"] == {}


def test_a_learner_continues_where_its_state_was_taken() -> None:
    first, second = learner(gamma=0.5, all_action_baseline=False), learner(gamma=0.5, all_action_baseline=False)
    rng = np.random.default_rng(4)
    learn(first, *(rollout(rng, 3, stream=stream) for stream in range(3)))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    again = [rollout(rng, 3, stream=stream) for stream in range(3)]
    assert learn(first, *again) == learn(second, *again)
    assert weights(first) == weights(second)


def test_what_has_no_advantages_is_refused() -> None:
    for name, value in (("all_action_baseline", False), ("gamma", 0.5)):
        with pytest.raises(ValueError, match="enable_critic=False needs all_action_baseline, and gamma 0"):
            PPOParameters(enable_critic=False, **{name: value})  # type: ignore[arg-type]


def test_actions_are_not_compared_where_the_future_counts() -> None:
    flags = PPOModularFlags(gamma=0.5)
    assert flags.all_action_baseline and flags.expected_gradient
    parameters = ppo_parameters(flags)
    assert not (parameters.all_action_baseline or parameters.expected_gradient)
    assert ppo_parameters(PPOModularFlags()).expected_gradient


def test_the_flags_of_learning_are_the_parameters_of_an_update() -> None:
    flags = PPOModularFlags(lr=0.02, epochs=3, gae_lambda=0.5, normalize_rewards=False)
    parameters = ppo_parameters(flags)
    shared = {name: getattr(flags, name) for name in vars(LearningFlags())}
    assert shared | {"normalize_rewards": False, "enable_critic": True} == vars(parameters)
