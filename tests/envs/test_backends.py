"""Vidur and its twin behind the same environment: the same observations, rewards and infos for the same actions."""

from typing import Any

import numpy as np
import pytest
from env_scenarios import REWARDS, SMALL, VARIANTS, same, scenario

from vidur_ppo_plugin.envs.routing_env import RoutingEnv
from vidur_ppo_plugin.scenario import TraceWindows
from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
from vidur_ppo_plugin.sim.launch import run


def episode(backend: str, *, seed: int, num_actions: int = 4, **options: Any) -> list[tuple[Any, ...]]:
    env = RoutingEnv(backend=backend, **options)
    rng = np.random.default_rng(seed)
    steps: list[tuple[Any, ...]] = [env.reset(seed=seed)]
    is_over = False
    while not is_over:
        steps.append(env.step(int(rng.integers(num_actions))))
        is_over = steps[-1][2] or steps[-1][3]
    return steps


@pytest.mark.parametrize("reward", REWARDS, ids=" ".join)
@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_cannot_be_told_apart(variant: str, reward: tuple[str, ...]) -> None:
    options = {"scenario": scenario(variant), **dict(zip(("reward_mode", "hybrid_credit"), reward, strict=False))}
    vidur, twin = (episode(backend, seed=11, **options) for backend in ("vidur", "twin"))
    assert len(vidur) == len(twin) == SMALL.num_requests + 1
    for index, (left, right) in enumerate(zip(vidur, twin, strict=True)):
        assert same(left, right), f"step {index}: {left} {right}"
    if variant == "memory":
        assert vidur[-1][4]["summary"]["preemptions"] > 0


def test_requests_of_one_moment_are_placed_one_after_the_other(tmp_path: Any) -> None:
    """Three at a time: each decision sees the one before."""
    path = tmp_path / "trace.csv"
    rows = [f"{index // 3},{500 + 100 * index},20" for index in range(30)]
    path.write_text("\n".join(["arrived_at_s,prompt_tokens,decode_tokens", *rows]))
    trace = TraceWindows(path, window_requests=30, windows={11: 0}, rate_qps=54.0)
    for reward_mode in ("queue_delay", "marginal_delay"):
        options = {"scenario": scenario(trace=trace, num_requests=30), "reward_mode": reward_mode}
        vidur, twin = (episode(backend, seed=11, num_actions=1, **options) for backend in ("vidur", "twin"))
        assert all(map(same, vidur, twin))
        names = [item.name for item in RoutingEnv(**options)._observer.features.replica_features]
        prefill = [step[0]["replicas"][0, names.index("prefill")] for step in vidur[:3]]
        assert prefill[0] < prefill[1] < prefill[2]


def test_an_episode_is_a_run_of_vidur(tmp_path: Any) -> None:
    """The latencies of an episode are those of `vidur.main` with a scheduler that places the requests alike."""
    env = RoutingEnv(scenario=scenario(), backend="vidur", reward_mode="queue_delay")
    env.reset(seed=5)
    is_over, latencies, turn = False, {}, 0
    while not is_over:
        *_, is_over, _, info = env.step(turn % 4)
        latencies.update(zip(info["completed"], info["latencies_s"], strict=True))
        turn += 1
    flags = {
        **scenario().vidur_flags(5),
        "global_scheduler_config_type": "round_robin",
        "metrics_config_output_dir": str(tmp_path),
        "metrics_config_store_plots": False,
        "metrics_config_enable_chrome_trace": False,
        "roofline_execution_time_predictor_config_cache_dir": str(tmp_path / "cache"),
    }
    outcome = run(to_arguments(flags, known_flags()))
    expected = [request.completed_at_s - request.arrived_at_s for request in outcome.requests]
    assert [latencies[index] for index in range(len(expected))] == expected


def test_simulations_do_not_disturb_each_other() -> None:
    """Two episodes in turn are the same as one after the other."""
    options = {"scenario": scenario(num_requests=20), "backend": "vidur", "reward_mode": "queue_delay"}
    alone = [episode(seed=seed, num_actions=1, **options) for seed in (1, 2)]
    envs = [RoutingEnv(**options), RoutingEnv(**options)]
    together: list[list[Any]] = [[env.reset(seed=seed)] for seed, env in enumerate(envs, start=1)]
    for _ in range(20):
        for steps, env in zip(together, envs, strict=True):
            steps.append(env.step(0))
    assert same(alone, together)


def test_the_callers_random_numbers_are_left_alone() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    episode("vidur", seed=3, scenario=scenario(num_requests=5))
    np.testing.assert_array_equal(np.random.get_state()[1], before)
