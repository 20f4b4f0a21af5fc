"""The environment as RL libraries see it: checkers, seeds, spaces, ends of episodes, errors."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_scenarios import same, scenario
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

from vidur_ppo_plugin.envs.routing_env import RoutingEnv
from vidur_ppo_plugin.envs.setup import FIRST_DRAWN_SEED
from vidur_ppo_plugin.scenario import TraceWindows

MODES = ("marginal_delay", "queue_delay", "hybrid")


def make(**options: Any) -> RoutingEnv:
    return RoutingEnv(**{"scenario": scenario(), "reward_mode": "queue_delay", **options})


def play(env: Any, *, seed: int | None = None, first_replica: int = 0) -> list[tuple[Any, ...]]:
    """All that an episode gives if replicas take turns."""
    num_replicas = int(env.action_space.n)
    observation, info = env.reset(seed=seed)
    steps: list[tuple[Any, ...]] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step((len(steps) - 1 + first_replica) % num_replicas))
    return steps


# --- What libraries check ---


@pytest.mark.parametrize("options", [{}, {"flatten": True}, {"scenario": scenario("drained")}, {"backend": "vidur"}])
@pytest.mark.parametrize("reward_mode", MODES)
def test_the_checkers_of_gymnasium_and_stable_baselines3_are_content(reward_mode: str, options: Any) -> None:
    env = gymnasium.make("vidur_ppo/Routing-v0", **{"scenario": scenario(), "reward_mode": reward_mode, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of a dict of arrays it recommends a vector, which `flatten` gives.
        warnings.filterwarnings("ignore", message="Your observation replicas has an unconventional shape")
        check_env(env.unwrapped, skip_render_check=True)
        check_env_of_sb3(env.unwrapped)


def test_a_new_process_finds_it_without_importing_the_package() -> None:
    code = (
        "import sys, gymnasium; spec = gymnasium.spec('vidur_ppo/Routing-v0'); "
        "print(spec.entry_point, spec.vector_entry_point, 'vidur' in sys.modules, 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [
        "vidur_ppo_plugin.envs.routing_env:RoutingEnv",
        "vidur_ppo_plugin.envs.vector_env:VectorRoutingEnv",
        "False",
        "False",
    ]


def test_where_plugins_are_off_it_is_not_registered() -> None:
    code = "import gymnasium; print('vidur_ppo/Routing-v0' in gymnasium.registry)"
    environment = {**os.environ, "VIDUR_PLUGINS": ""}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert output.strip() == "False"


def test_spaces_follow_from_the_cluster() -> None:
    env = make(num_replicas=6, max_queue_requests_per_replica=2)
    shapes = {name: box.shape for name, box in env.observation_space.items()}
    features = env._observer.features
    assert shapes == {
        "replicas": (6, features.num_replica_features),
        "request": (features.num_request_features,),
        "prior": (6,),
        "available": (6,),
    }
    assert env.action_space.n == 6
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)

    flat = make(num_replicas=6, max_queue_requests_per_replica=2, flatten=True)
    vector, _ = flat.reset(seed=1)
    np.testing.assert_array_equal(vector, np.concatenate([part.ravel() for part in observation.values()]))
    assert flat.observation_space.contains(vector)


# --- Seeds ---


@pytest.mark.parametrize("reward_mode", MODES)
def test_the_same_seed_is_the_same_episode(reward_mode: str) -> None:
    env = make(reward_mode=reward_mode)
    first = play(env, seed=7)
    play(env, seed=8)
    assert same(play(env, seed=7), first)
    assert same(play(make(reward_mode=reward_mode), seed=7), first)
    assert not same(play(env, seed=8), first)


def test_without_a_seed_each_episode_is_another_one() -> None:
    env = make()
    seeds = []
    for _ in range(2):
        env.reset(seed=3)
        seeds.append([env.reset()[1]["workload_seed"] for _ in range(3)])
    assert seeds[0] == seeds[1]  # they follow from the seed before
    assert len(set(seeds[0])) == 3
    assert min(seeds[0]) >= FIRST_DRAWN_SEED


def test_a_seed_is_the_workload_of_that_seed() -> None:
    env = make()
    _, info = env.reset(seed=1000)
    assert info["workload_seed"] == 1000
    assert info["time_s"] == scenario().requests(1000).arrived_at_s[0]


def test_a_trace_has_episodes_for_its_windows(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{0.1 * index:.1f},{100 + index},5" for index in range(40)]
    path.write_text("\n".join(["arrived_at_s,prompt_tokens,decode_tokens", *rows]))
    trace = TraceWindows(path, window_requests=20, windows={5: 0, 6: 1}, rate_qps=10.0)
    env = make(scenario=scenario(trace=trace, num_requests=20))
    assert len(play(env, seed=6)) == 21
    assert {env.reset()[1]["workload_seed"] for _ in range(20)} == {5, 6}
    with pytest.raises(ValueError, match=r"seed must be one of .*\[5, 6\], got 7"):
        env.reset(seed=7)


# --- Rewards, infos, ends ---


def test_the_rewards_of_an_episode_are_minus_the_total_latency() -> None:
    for options in ({"reward_mode": "queue_delay"}, {"reward_mode": "marginal_delay", "backlog_weight": 0.0}):
        steps = play(make(**options), seed=2)
        latencies = [latency for step in steps for latency in step[4]["latencies_s"]]
        assert len(latencies) == 60
        assert sum(step[1] for step in steps) == pytest.approx(-sum(latencies), rel=1e-9)


def test_better_placements_earn_more() -> None:
    env = make()
    returns = []
    for choose in (lambda observation: 0, lambda observation: int(np.argmax(observation["prior"]))):
        observation, _ = env.reset(seed=4)
        total, is_over = 0.0, False
        while not is_over:
            observation, reward, is_over, _, _ = env.step(choose(observation))
            total += reward
        returns.append(total)
    assert returns[1] > 0.7 * returns[0]


def test_infos_tell_what_happened() -> None:
    steps = play(make(reward_mode="marginal_delay"), seed=2, first_replica=1)
    requests = scenario().requests(2)
    is_long = requests.prompt_tokens > scenario().class_boundary_tokens
    for index, (_, reward, _, _, info) in enumerate(steps[1:]):
        assert info["replica"] == (index + 1) % 4
        assert reward == info["action_rewards"][info["replica"]] == max(reward, info["action_rewards"].min())
    for index, (*_, info) in enumerate(steps[:-1]):
        assert info["request"] == index
        assert info["request_class"] == ("long" if is_long[index] else "short")
        assert info["time_s"] == requests.arrived_at_s[index]
    done = [index for *_, info in steps for index in info["completed"]]
    assert sorted(done) == list(range(60))
    summary = steps[-1][4]["summary"]
    latencies = np.array([latency for *_, info in steps for latency in info["latencies_s"]])
    ttfts = np.array([ttft for *_, info in steps for ttft in info["ttfts_s"]])
    assert summary["e2e_mean"] == pytest.approx(latencies.mean())
    assert summary["ttft_p99"] == pytest.approx(np.percentile(ttfts, 99))
    assert summary["e2e_mean_long"] == pytest.approx(latencies[is_long[done]].mean())
    assert summary["action_shares"].tolist() == [0.25] * 4
    assert (summary["num_placed"], summary["num_completed"], summary["is_over_limit"]) == (60, 60, False)
    assert not any("summary" in info for *_, info in steps[:-1])


def test_max_steps_truncates_and_shows_what_comes_next() -> None:
    whole, cut = play(make(), seed=2), play(make(max_steps=10), seed=2)
    assert len(cut) == 11
    assert cut[-1][2:4] == (False, True)
    assert same([step[:2] for step in cut], [step[:2] for step in whole[:11]])
    assert cut[-1][4]["summary"]["num_placed"] == 10
    assert len(play(make(max_steps=60), seed=2)) == 61  # the last step ends it anyway
    assert play(make(max_steps=60), seed=2)[-1][2:4] == (True, False)


def test_a_request_above_the_latency_limit_ends_the_episode_with_a_penalty() -> None:
    whole = play(make(), seed=2)
    latencies_s = sorted(latency for *_, info in whole[:-1] for latency in info["latencies_s"])
    limit_s = latencies_s[len(latencies_s) // 2]
    limited = play(make(latency_limit_s=limit_s, latency_limit_penalty=50.0), seed=2)
    last = len(limited) - 1
    assert last < 60
    assert limited[last][2:4] == (True, False)
    assert limited[last][1] == pytest.approx(whole[last][1] - 50.0)
    assert limited[last][4]["summary"]["is_over_limit"]
    assert max(limited[last][4]["latencies_s"]) > limit_s
    assert not any(max(info["latencies_s"], default=0.0) > limit_s for *_, info in limited[:-1])
    assert not any(part.any() for part in limited[last][0].values())
    assert len(play(make(latency_limit_s=100.0), seed=2)) == 61


def test_a_drained_replica_takes_no_requests() -> None:
    env = make(scenario=scenario("drained"))
    _, info = env.reset(seed=2)
    is_over, placed = False, []
    while not is_over:
        mask = info["action_mask"]
        np.testing.assert_array_equal(env.action_masks(), mask.astype(bool))
        observation, _, is_over, _, info = env.step(1)
        placed.append((bool(mask[1]), info["replica"]))
        if not is_over:
            np.testing.assert_array_equal(observation["available"], info["action_mask"])
    assert {replica for is_open, replica in placed if is_open} == {1}
    turned_away = [replica for is_open, replica in placed if not is_open]
    assert len(turned_away) > 10
    assert 1 not in turned_away


def test_load_stays_what_it_is_with_other_replicas() -> None:
    base = make().scenario.qps
    assert make(num_replicas=8).scenario.qps == pytest.approx(2 * base)
    assert make(replica_speeds=[1.0, 0.5]).scenario.qps == pytest.approx(0.75 * base)
    assert make(load=0.45).scenario.qps == pytest.approx(0.5 * base)
    half = make(scenario=scenario("speeds"), num_replicas=8)
    assert half.scenario.qps == pytest.approx(2 * base)


@pytest.mark.parametrize("backend", ["twin", "vidur"])
def test_speeds_are_a_pattern_that_is_repeated_over_the_replicas(backend: str) -> None:
    """One request in an empty cluster: slow replicas take twice as long for it, wherever they stand."""
    took_s = []
    for replica in range(4):
        env = make(num_requests=1, replica_speeds=[1.0, 0.5], backend=backend)
        env.reset(seed=3)
        *_, info = env.step(replica)
        (latency_s,) = info["latencies_s"]
        took_s.append(latency_s)
    assert took_s == pytest.approx([took_s[0], 2.0 * took_s[0], took_s[0], 2.0 * took_s[0]])


# --- Errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": "mixed_lon"}, r"unknown scenario 'mixed_lon' \(did you mean 'mixed_long'\?\)"),
        ({"scenario": "no/such.yaml"}, r"no/such\.yaml: .*No such file"),
        ({"scenario": "replay"}, r"scenario 'replay' replays a trace"),
        ({"scenario": scenario(capacity=None)}, r"scenario 'small' has no capacity"),
        ({"backend": "vidurr"}, r"unknown backend 'vidurr' \(did you mean 'vidur'\?\); there are twin, vidur"),
        ({"reward_mode": "queue_dela"}, r"unknown reward_mode 'queue_dela' \(did you mean 'queue_delay'\?\)"),
        ({"prior": "least_token"}, r"unknown prior 'least_token' \(did you mean 'least_tokens'\?\)"),
        ({"latency_powr": 2.0}, r"unknown option 'latency_powr' \(did you mean 'latency_power'\?\)"),
        ({"latency_power": 0.0}, r"^latency_power must be >= 1 and <= 4, got 0\.0"),
        ({"load": 2.5}, r"load must be between 0 and 2 \(1 is the capacity\), got 2\.5"),
        ({"num_requests": 0}, r"num_requests must be >= 1, got 0"),
        ({"num_replicas": 0}, r"num_replicas must be >= 1, got 0"),
        ({"replica_speeds": [1.0, 0.0]}, r"replica_speeds must be > 0, one for each of 4 replicas"),
        ({"replica_speeds": [1.0] * 3}, r"a pattern whose length divides that, got \[1\.0, 1\.0, 1\.0\]"),
        ({"scenario": scenario("drained"), "num_replicas": 1}, r"num_replicas must be > 1, which .* drains, got 1"),
        ({"max_steps": 0}, r"max_steps must be >= 1, got 0"),
        ({"latency_limit_penalty": -1.0}, r"latency_limit_penalty must be >= 0, got -1\.0"),
        ({"render_mode": "human"}, r"render_mode must be None.*got 'human'"),
        (
            {"scenario": scenario(flags={"replica_scheduler_config_type": "mnemosyne_edf"})},
            r"scenario 'small': --replica_scheduler_config_type .* for the twin, got mnemosyne_edf; use",
        ),
        ({"scenario": scenario(flags={"cluster_config_num_replica": 2})}, r"unknown flag 'cluster_config_num_replica'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("action", [4, -1, 1.5, "0", None, np.array([0, 1])])
def test_an_action_is_a_replica(action: Any) -> None:
    env = make()
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"action must be a replica in 0 \.\.\. 3, got "):
        env.step(action)
    env.step(np.int64(3))  # nothing was lost


def test_steps_need_an_episode() -> None:
    env = make(num_requests=2)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.step(0)
    play(env, seed=1)
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step(0)
    env.reset()
    env.step(0)


def test_a_scenario_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "why: For a test.\nlengths: fixed(500) / fixed(5)\nload: 0.5\nnum_requests: 10\nclass_boundary_tokens: 100\n"
        "capacity: {qps: 20.0, scheduler: least_tokens, num_requests: 100, num_seeds: 1}\n"
    )
    env = make(scenario=str(path))
    assert env.scenario.name == "mine"
    assert len(play(env, seed=1)) == 11
    path.write_text("why: For a test.\nlengthz: fixed(500) / fixed(5)\n")
    with pytest.raises(ValueError, match=r"mine\.yaml: unknown key 'lengthz' \(did you mean 'lengths'\?\)"):
        make(scenario=path)
