"""What is trained in the twin is true in Vidur: the same decisions, latencies, observations and credit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import clusters_of, small, train

from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.learn.build import build_agent
from vidur_ppo_plugin.learn.export import export_policy
from vidur_ppo_plugin.learn.features import build_features, build_prior
from vidur_ppo_plugin.policy.actor import Actor, Weights
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.scenario import find_scenario
from vidur_ppo_plugin.train.clusters import Cluster
from vidur_ppo_plugin.train.config import TrainConfig
from vidur_ppo_plugin.train.episodes import FIRST_EVALUATION_SEED, Episode, draw_episode
from vidur_ppo_plugin.train.slots import Exploration, Slot, rollouts_of
from vidur_ppo_plugin.twin.cluster import play
from vidur_ppo_plugin.twin.policy_kernels import MASKED


def cluster_of(config: TrainConfig, episode: Episode) -> Cluster:
    return clusters_of(config)[episode.scenario].with_speeds(episode.speed_factors)


def weights_of(config: TrainConfig) -> Weights:
    """A policy with opinions of its own."""
    network = build_agent(config.flags, num_replicas=4, delay_model=clusters_of(config)["mixed_long"].delay_model).ppo
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(network.network.actor_head.weight, std=0.5, generator=generator)
    actor = Actor.from_network(network.network)
    return actor.weights, actor.shape


def test_a_trained_policy_gives_the_same_latencies_in_vidur(tmp_path: Path) -> None:
    # Light load: idle replicas are alike, so ties have to be broken alike.
    mixture = [{"scenario": "mixed_long", "load": [0.2, 0.5]}]
    config = small(mixture=mixture, decisions=1024, policy={"rollout_len": 64, "lr": 0.01})
    train(config, tmp_path)
    scenario = find_scenario("mixed_long").at(load=0.4, num_requests=200)
    (spec,) = parse_schedulers([f"ppo_modular:{tmp_path / 'checkpoints'}"])
    in_vidur = run_cell(scenario, spec, FIRST_EVALUATION_SEED, engine="vidur").requests

    export_policy(tmp_path / "checkpoints", tmp_path / "policy.npz")
    exported, _ = Actor.load(tmp_path / "policy.npz")
    cluster = clusters_of(config)["mixed_long"]
    assert cluster.twin is not None
    policy = Policy(
        Actor(exported.weights, exported.shape),
        build_features(config.flags),
        build_prior(config.flags, cluster.delay_model),
        random.Random(config.flags.seed),
    )
    slots = config.flags.max_queue_requests_per_replica
    in_twin = play(cluster.twin, scenario.requests(FIRST_EVALUATION_SEED), policy, num_waiting_slots=slots)
    np.testing.assert_array_equal(in_twin.replica, in_vidur["replica"])
    np.testing.assert_array_equal(in_twin.completed_at_s, in_vidur["completed_at_s"])
    np.testing.assert_array_equal(in_twin.first_token_at_s, in_vidur["first_token_at_s"])
    assert len(set(in_twin.replica.tolist())) == 4


#: For looking ahead, which nobody does here.
RNG = np.random.default_rng(0)
CLEAR = {"scenario": "mixed_long", "load": [0.9, 1.2], "tail_preference": [0.1, 0.9]}
HIDDEN = {**CLEAR, "report_delay_s": [0.4, 0.8], "drained_share": 1.0}


@pytest.mark.parametrize("part", [CLEAR, HIDDEN], ids=["clear", "old reports and drained replicas"])
@pytest.mark.parametrize("reward_mode", ["marginal_delay", "queue_delay", "hybrid"])
def test_clusters_in_the_twin_are_those_of_vidur(part: dict[str, Any], reward_mode: str) -> None:
    """Observations, prior, decisions, credit and what was served, decision by decision."""
    policy = {"rollout_len": 40, "latency_power": 1.5, "reward_mode": reward_mode}
    if reward_mode == "queue_delay":
        policy["gamma"] = 0.9
    twin, vidur = (
        small(mixture=[part], policy=policy, backend=backend, enable_critic=reward_mode == "queue_delay")
        for backend in ("twin", "vidur")
    )
    episode = draw_episode(twin, 1, 1)
    assert episode.is_clear == (part is CLEAR)
    slots = [Slot(config, episode, cluster_of(config, episode)) for config in (twin, vidur)]
    actor, rng = Actor(*weights_of(small())), np.random.default_rng(0)
    for _ in range(2):
        uniforms = rng.random((episode.num_clusters, 40, 2))
        exploration = Exploration(temperature=20.0, epsilon=0.1)  # nearly at random: queues grow
        expected, got = [slot.collect(actor, exploration, uniforms, RNG) for slot in slots]
        for name in ("replicas", "request", "prior_logits", "actions", "next_replicas", "next_request"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
        np.testing.assert_allclose(got.rewards, expected.rewards, rtol=1e-9)
        if reward_mode != "queue_delay":
            np.testing.assert_allclose(got.action_rewards, expected.action_rewards, rtol=1e-9)
        assert len(expected.served.latency_s) > 0
        for name in ("latency_s", "ttft_s", "tbt_s"):
            pair = (np.sort(getattr(side.served, name)) for side in (got, expected))
            np.testing.assert_allclose(*pair, rtol=1e-12, err_msg=name)
        assert got.served.duration_s == pytest.approx(expected.served.duration_s)
        assert got.served.load_spread == pytest.approx(expected.served.load_spread)
    masked = expected.prior_logits == MASKED
    assert masked.any() == (part is not CLEAR)
    assert not np.any(np.take_along_axis(masked, expected.actions[..., None], axis=2)) or part is not CLEAR


def test_queue_delay_is_minus_the_total_latency() -> None:
    """Of the rewards of an episode: what requests have spent in the system until its last moment."""
    config = small(
        mixture=[CLEAR], policy={"rollout_len": 32, "reward_mode": "queue_delay", "gamma": 0.9}, enable_critic=True
    )
    episode = draw_episode(config, 0, 1)
    slot = Slot(config, episode, cluster_of(config, episode))
    rng, actor = np.random.default_rng(0), Actor(*weights_of(config))
    rollouts = [slot.collect(actor, Exploration(1.0, 0.0), rng.random((2, 32, 2)), RNG) for _ in range(2)]
    earned = sum(rollout.rewards.sum() for rollout in rollouts)
    completed_s = sum(rollout.served.latency_s.sum() for rollout in rollouts)
    num_completed = sum(len(rollout.served.latency_s) for rollout in rollouts)
    requests = episode.requests()
    last_s = [part.arrived_at_s[-1] for part in requests]
    every_s = sum((end - part.arrived_at_s[:-1]).sum() for part, end in zip(requests, last_s, strict=True))
    assert 0 < num_completed < 2 * 64
    assert -every_s < earned < -completed_s  # the others have been there for a while, too


def test_a_slot_that_repeats_its_decisions_goes_on_as_before() -> None:
    """Also where reports are old, replicas drained and rewards depend on what is in flight."""
    policy = {"rollout_len": 32, "reward_mode": "queue_delay", "gamma": 0.9}
    config = small(mixture=[HIDDEN], policy=policy, enable_critic=True)
    episode = draw_episode(config, 1, 1)
    rng, actor = np.random.default_rng(0), Actor(*weights_of(config))
    first, second = (rng.random((2, 32, 2)) for _ in range(2))
    slot, anew = (Slot(config, episode, cluster_of(config, episode)) for _ in range(2))
    actions = slot.collect(actor, Exploration(1.0, 0.0), first, RNG).actions
    anew.replay(actor, actions.astype(np.int16))
    expected, got = (one.collect(actor, Exploration(1.0, 0.0), second, RNG) for one in (slot, anew))
    for name in ("replicas", "prior_logits", "actions", "rewards", "next_request"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)


def test_an_episode_is_lost_at_the_safety_limit() -> None:
    mixture = [{"scenario": "mixed_long", "load": [1.8, 1.9]}]
    config = small(
        mixture=mixture, latency_limit_s=0.5, limit_penalty=7.0, episode_rollouts=4, policy={"rollout_len": 64}
    )
    episode = draw_episode(config, 1, 1)
    slot, free = (Slot(one, episode, cluster_of(one, episode)) for one in (config, small(mixture=mixture)))
    actor = Actor(*weights_of(config))
    exploration = Exploration(temperature=50.0, epsilon=0.0)  # nearly at random: queues grow somewhere
    uniforms = np.random.default_rng(0).random((4, 2, 64, 2))
    experiences = [slot.collect(actor, exploration, part, RNG) for part in uniforms]
    unpunished = [free.collect(actor, exploration, part, RNG) for part in uniforms]
    kept = np.array([experience.num_kept for experience in experiences])
    assert (kept[0] > 0).all() and (kept[-1] == 0).any()  # some cluster got lost on the way
    cluster = int(np.flatnonzero(kept[-1] == 0)[0])
    last = int(np.flatnonzero(kept[:, cluster])[-1])
    (rollout,) = [r for r in rollouts_of(experiences[last], exploration, 0, is_last=False) if r.stream == cluster]
    assert len(rollout) == kept[last, cluster] and rollout.next_observation is None
    difference = rollout.rewards - unpunished[last].rewards[cluster, : len(rollout)]
    np.testing.assert_allclose(difference[-1], -7.0)
    np.testing.assert_array_equal(difference[:-1], 0.0)
    assert rollout.action_rewards is not None
    assert rollout.action_rewards[-1, rollout.actions[-1]] == rollout.rewards[-1]
