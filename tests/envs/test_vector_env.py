"""Clusters in step give what as many single environments give."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_scenarios import REWARDS, VARIANTS, same, scenario

from vidur_ppo_plugin.envs.vector_env import VectorRoutingEnv

NUM_ENVS = 3


def make_vec(mode: str | None, **options: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"scenario": scenario(num_requests=25), "reward_mode": "queue_delay", **options}
        return gymnasium.make_vec("vidur_ppo/Routing-v0", num_envs=NUM_ENVS, vectorization_mode=mode, **options)


def play(env: Any, num_steps: int, seed: Any) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(1)
    steps: list[tuple[Any, ...]] = [env.reset(seed=seed)]
    for _ in range(num_steps):
        steps.append(env.step(rng.integers(0, 4, NUM_ENVS)))
    return steps


@pytest.mark.parametrize("reward", REWARDS, ids=" ".join)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_equals_single_environments(variant: str, reward: tuple[str, ...]) -> None:
    """Two episodes and a bit: beyond the end, and through the seeds that are drawn there."""
    options = dict(zip(("reward_mode", "hybrid_credit"), reward, strict=False))
    options["scenario"] = scenario(variant, num_requests=25)
    together, one_by_one = (play(make_vec(mode, **options), 60, 5) for mode in ("vector_entry_point", "sync"))
    for index, (left, right) in enumerate(zip(together, one_by_one, strict=True)):
        assert same(left, right), f"step {index}: {left} {right}"
    assert [bool(step[2].any()) for step in together[1:]].count(True) == 2


@pytest.mark.parametrize(
    "options",
    [{"flatten": True}, {"max_steps": 10}, {"prior": "shortest_delay"}, {"prior": "none"}, {"num_replicas": 5}],
)
def test_so_do_other_options(options: dict[str, Any]) -> None:
    together, one_by_one = (play(make_vec(mode, **options), 40, [3, 9, 4]) for mode in ("vector_entry_point", "sync"))
    for left, right in zip(together, one_by_one, strict=True):
        assert same(left, right)


def test_it_is_the_default_of_make_vec() -> None:
    env = make_vec(None)
    assert isinstance(env, VectorRoutingEnv)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert env.single_action_space.n == 4
    assert env.action_space.contains(env.action_space.sample())


def test_what_it_gave_does_not_change_afterwards() -> None:
    env = make_vec(None)
    kept = [env.reset(seed=1)]
    copies = [{name: part.copy() for name, part in kept[0][0].items()}]
    for _ in range(10):
        kept.append(env.step(np.zeros(NUM_ENVS, np.int64)))
        copies.append({name: part.copy() for name, part in kept[-1][0].items()})
    assert same([step[0] for step in kept], copies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "vidur"}, r"backend must be 'twin' .* got 'vidur': use vectorization_mode='sync'"),
        ({"latency_limit_s": 3.0}, r"latency_limit_s must be 0 .* got 3\.0: use vectorization_mode='sync'"),
        ({"reward_mode": "hybird"}, r"unknown reward_mode 'hybird' \(did you mean 'hybrid'\?\)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vec(None, **options)


def test_wrong_calls_are_named() -> None:
    env = make_vec(None)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.step(np.zeros(NUM_ENVS, np.int64))
    with pytest.raises(ValueError, match="seed must be one number or 3, one for each cluster, got 2"):
        env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": np.ones(NUM_ENVS, np.bool_)})
    env.reset(seed=1)
    for actions, message in (
        (np.zeros(2, np.int64), "actions must be 3 whole numbers"),
        (np.zeros(NUM_ENVS), "actions must be 3 whole numbers"),
        (np.array([0, 4, 0]), r"actions must be replicas in 0 \.\.\. 3"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step(actions)


def test_requests_that_never_fit_are_reported() -> None:
    tight = scenario(num_requests=5, lengths="fixed(6000) / fixed(5)", flags={"cache_config_num_blocks": 100})
    env = VectorRoutingEnv(2, tight, reward_mode="queue_delay")
    env.reset(seed=1)
    with pytest.raises(ValueError, match="10 requests can never run"):
        for _ in range(5):
            env.step(np.zeros(2, np.int64))
