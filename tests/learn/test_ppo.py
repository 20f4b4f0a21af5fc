"""PPO on closed-form cases, and on bandits that it must solve."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from vidur_ppo_plugin.learn.ppo import (
    PPO,
    Coefficients,
    NonFiniteUpdate,
    PPOParameters,
    check_same_shape,
    log_probabilities,
)
from vidur_ppo_plugin.learn.rollout import Decision, Rollout, RolloutBuffer
from vidur_ppo_plugin.learn.shard import LocalShards
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.features import Observation

FEATURES, REQUEST, REPLICAS = 5, 3, 4
COEFFICIENTS = Coefficients(learning_rate=3e-3, entropy_coef=0.0)


def learner(seed: int = 0, network: dict[str, object] | None = None, **parameters: object) -> PPO:
    shape = NetworkShape(
        num_replica_features=FEATURES, num_request_features=REQUEST, **{"hidden_size": 32, **(network or {})}
    )
    return PPO(ActorCritic(shape, seed), PPOParameters(**{"expected_gradient": False, **parameters}), seed=seed)


def learn(ppo: PPO, item: Rollout, coefficients: Coefficients = COEFFICIENTS) -> dict[str, float]:
    return ppo.update(LocalShards(ppo, [item]), coefficients)


def observation(rng: np.random.Generator) -> Observation:
    return Observation(rng.random((REPLICAS, FEATURES), dtype=np.float32), rng.random(REQUEST, dtype=np.float32))


def rollout(
    ppo: PPO,
    rng: np.random.Generator,
    length: int = 64,
    *,
    temperature: float = 1.3,
    epsilon: float = 0.0,
    last: bool = False,
) -> Rollout:
    """Decisions made by the actor; the replica with the largest first feature pays best."""
    actor = Actor.from_network(ppo.network)
    buffer = RolloutBuffer(length)
    for _ in range(length):
        seen = observation(rng)
        prior = -rng.random(REPLICAS, dtype=np.float32)
        logits = actor.logits(seen.replicas, seen.request, prior) / np.float32(temperature)
        probabilities = np.exp(logits - logits.max())
        probabilities = (1 - epsilon) * probabilities / probabilities.sum() + epsilon / REPLICAS
        action = int(rng.choice(REPLICAS, p=probabilities / probabilities.sum()))
        buffer.add(
            Decision(observation=seen, prior_logits=prior, action=action, temperature=temperature, epsilon=epsilon)
        )
        values = seen.replicas[:, 0].astype(float)
        buffer.settle(float(values[action]), values)
    return buffer.take(None if last else observation(rng))


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
@pytest.mark.parametrize("network", [{}, {"decoupled": False}, {"critic_gru_layers": 0}, {"flat_replicas": REPLICAS}])
def test_ratio_is_one_before_the_first_step(network: dict[str, object], epsilon: float) -> None:
    """Although the hot path acts in numpy, at another temperature than 1."""
    ppo, rng = learner(network=network), np.random.default_rng(0)
    learn(ppo, rollout(ppo, rng, epsilon=epsilon))
    metrics = learn(ppo, rollout(ppo, rng, epsilon=epsilon))
    assert metrics["first_ratio_error"] == 0.0
    assert metrics["approx_kl"] > 0.0


@pytest.mark.parametrize("mode", ["all_action", "sampled", "critic"])
def test_it_solves_a_contextual_bandit(mode: str) -> None:
    """From a prior that knows nothing of the reward."""
    parameters = {"all_action_baseline": mode == "all_action", "epochs": 6, "gamma": 0.5 if mode == "critic" else 0.0}
    ppo, rng = learner(**parameters), np.random.default_rng(1)

    def greedy_share() -> float:
        test_rng = np.random.default_rng(99)
        actor = Actor.from_network(ppo.network)
        hits = 0
        for _ in range(200):
            seen = observation(test_rng)
            prior = -test_rng.random(REPLICAS, dtype=np.float32)
            chosen = int(np.argmax(actor.logits(seen.replicas, seen.request, prior)))
            hits += chosen == int(np.argmax(seen.replicas[:, 0]))
        return hits / 200

    assert greedy_share() < 0.45
    for _ in range(30):
        learn(ppo, rollout(ppo, rng, 256))
    assert greedy_share() > 0.8


def test_the_critic_learns_what_is_predictable() -> None:
    """With a discount the value depends on what follows; rewards here follow the mean of the first feature."""
    ppo, rng = learner(gamma=0.0, all_action_baseline=False, epochs=6), np.random.default_rng(2)
    variances = [learn(ppo, rollout(ppo, rng, 256))["explained_variance"] for _ in range(30)]
    assert np.mean(variances[:2]) < 0.2
    assert np.mean(variances[-5:]) > 0.25


def test_same_seed_same_bits() -> None:
    def trained() -> list[Tensor]:
        ppo, rng = learner(seed=3), np.random.default_rng(3)
        for _ in range(3):
            learn(ppo, rollout(ppo, rng))
        return [parameter.detach() for parameter in ppo.network.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(), trained(), strict=True))


def test_saving_and_loading_continues_bit_for_bit() -> None:
    ppo = learner(seed=4, gamma=0.9)
    data = [rollout(ppo, np.random.default_rng(seed), last=seed == 1) for seed in range(4)]
    for item in data[:2]:
        learn(ppo, item)
    saved = copy.deepcopy(ppo.state_dict())
    fresh = learner(seed=5, gamma=0.9)
    fresh.load_state_dict(saved)
    for item in data[2:]:
        assert learn(ppo, item) == learn(fresh, item)
    for mine, theirs in zip(ppo.network.parameters(), fresh.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_non_finite_update_is_undone_and_named() -> None:
    ppo, rng = learner(), np.random.default_rng(5)
    learn(ppo, rollout(ppo, rng))
    before = copy.deepcopy(ppo.state_dict()["network"])
    spoiled = rollout(ppo, rng)
    spoiled.replicas[3, 1, 2] = np.nan
    with pytest.raises(NonFiniteUpdate, match=r"replicas\[3, 1, 2\] of the rollout is not finite"):
        learn(ppo, spoiled)
    after = ppo.state_dict()["network"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    learn(ppo, rollout(ppo, rng))


def test_the_entropy_floor_has_a_gradient() -> None:
    """It pushes entropy up although nothing else does: the advantages are all zero."""
    ppo, rng = learner(entropy_min=1.38, entropy_floor_coef=1.0, normalize_advantages=False), np.random.default_rng(6)
    with torch.no_grad():
        ppo.network.actor_head.weight.normal_(0, 3.0, generator=torch.Generator().manual_seed(0))

    def flat(item: Rollout) -> Rollout:
        item.rewards[:] = 0.5
        assert item.action_rewards is not None
        item.action_rewards[:] = 0.5
        return item

    first = learn(ppo, flat(rollout(ppo, rng)))["entropy"]
    for _ in range(10):
        last = learn(ppo, flat(rollout(ppo, rng)))["entropy"]
    assert last > first + 0.05


def test_the_kl_penalty_holds_the_policy_back() -> None:
    def divergence(kl_coef: float) -> float:
        ppo, rng = learner(epochs=8), np.random.default_rng(7)
        coefficients = Coefficients(learning_rate=3e-3, entropy_coef=0.0, kl_coef=kl_coef)
        return learn(ppo, rollout(ppo, rng, 256), coefficients)["approx_kl"]

    assert divergence(50.0) < 0.5 * divergence(0.0)


def test_the_pull_to_the_reference_keeps_the_prior() -> None:
    def distance(kl_ref_coef: float) -> float:
        ppo, rng = learner(epochs=8), np.random.default_rng(8)
        coefficients = Coefficients(learning_rate=3e-3, entropy_coef=0.0, kl_ref_coef=kl_ref_coef)
        for _ in range(5):
            metrics = learn(ppo, rollout(ppo, rng, 128), coefficients)
        return metrics["kl_reference"]

    assert 0 < distance(20.0) < distance(0.01)


def test_explained_variance_is_that_of_the_returns() -> None:
    """With gamma 0 a return is the reward, and the value a constant, whose head has no weights yet."""
    ppo = learner(gamma=0.0, all_action_baseline=False, normalize_rewards=False)
    with torch.no_grad():
        ppo.network.critic_head.weight.zero_()
    constant = rollout(ppo, np.random.default_rng(10))
    assert learn(ppo, constant)["explained_variance"] == pytest.approx(0.0)
    constant.rewards[:] = 1.0
    assert np.isnan(learn(ppo, constant)["explained_variance"])


def test_early_stopping_is_a_flag() -> None:
    stopping = learner(epochs=8, early_stop_kl_factor=1.0, target_kl=1e-6, minibatch_size=16)
    free = learner(epochs=8, early_stop_kl_factor=0.0, target_kl=1e-6)
    assert learn(stopping, rollout(stopping, np.random.default_rng(9)))["epochs"] == 1
    assert learn(free, rollout(free, np.random.default_rng(9)))["epochs"] == 8


def test_shape_guard() -> None:
    with pytest.raises(ValueError, match=r"\(4,\).*\(4, 1\)"):
        check_same_shape(values=torch.zeros(4), returns=torch.zeros(4, 1))


def test_log_probabilities_mix_temperature_and_epsilon() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    plain = log_probabilities(logits, torch.tensor([2.0]), torch.tensor([0.0])).exp()[0]
    expected = torch.softmax(torch.tensor([0.5, 1.0]), dim=0)
    assert plain.tolist() == pytest.approx(expected.tolist())
    mixed = log_probabilities(logits, torch.tensor([2.0]), torch.tensor([0.5])).exp()[0]
    assert mixed.tolist() == pytest.approx((0.5 * expected + 0.25).tolist())
