"""What is trained in the twin is true in Vidur: the same decisions, latencies, observations and credit."""

from pathlib import Path

import numpy as np
import pytest
from training_runs import clusters_of, small, train

from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.envs.settings import find_scenario
from vidur_ppo_plugin.learn.export import export_policy
from vidur_ppo_plugin.policy.numpy_actor import NumpyActor
from vidur_ppo_plugin.train.episodes import FIRST_EVALUATION_SEED, draw_episode
from vidur_ppo_plugin.train.herds import Herd, LooseHerd, VectorHerd
from vidur_ppo_plugin.train.observing import GreedyPolicy, build_actor
from vidur_ppo_plugin.train.slots import Exploration, Slot, rollouts_of
from vidur_ppo_plugin.twin.play import play


def test_a_trained_policy_gives_the_same_latencies_in_vidur(tmp_path: Path) -> None:
    # Light load: idle replicas are alike, so ties have to be broken alike.
    mixture = [{"scenario": "mixed_long", "load": [0.2, 0.5]}]
    config = small(mixture=mixture, decisions=1024, policy={"rollout_len": 64, "lr": 0.01})
    train(config, tmp_path)
    scenario = find_scenario("mixed_long").at(load=0.4, num_requests=200)
    (spec,) = parse_schedulers([f"ppo_modular:{tmp_path / 'checkpoints'}"])
    in_vidur = run_cell(scenario, spec, FIRST_EVALUATION_SEED, engine="vidur").requests

    export_policy(tmp_path / "checkpoints", tmp_path / "policy.npz")
    exported, _ = NumpyActor.load(tmp_path / "policy.npz")
    cluster = clusters_of(config)["mixed_long"]
    policy = GreedyPolicy(build_actor((exported.weights, exported.shape)), config.flags, cluster.delay_model)
    slots = config.flags.max_queue_requests_per_replica
    in_twin = play(cluster.twin, scenario.requests(FIRST_EVALUATION_SEED), policy, num_waiting_slots=slots)
    np.testing.assert_array_equal(in_twin.replica, in_vidur["replica"])
    np.testing.assert_array_equal(in_twin.completed_at_s, in_vidur["completed_at_s"])
    np.testing.assert_array_equal(in_twin.first_token_at_s, in_vidur["first_token_at_s"])
    assert len(set(in_twin.replica.tolist())) == 4


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_clusters_in_step_are_those_of_vidur(power: float) -> None:
    """Observations, prior and analytic credit, decision by decision: vectorised, one by one, and in Vidur."""
    policy = {"rollout_len": 40, "latency_power": power}
    mixture = [{"scenario": "mixed_long", "load": [0.9, 1.2], "tail_preference": [0.1, 0.9]}]
    twin, vidur = (small(mixture=mixture, policy=policy, backend=backend) for backend in ("twin", "vidur"))
    episode = draw_episode(twin, 0, 0)
    cluster = clusters_of(twin)["mixed_long"].with_speeds(episode.speed_factors)
    requests = episode.requests()
    herds: list[Herd] = [VectorHerd(twin, episode, cluster, requests)]
    herds += [LooseHerd(config, episode, cluster, requests) for config in (twin, vidur)]
    rng = np.random.default_rng(0)
    for _ in range(episode.num_decisions):
        expected, *others = [herd.observe() for herd in herds]
        np.testing.assert_array_equal(expected.request[:, -1], np.float32(episode.tail_preferences))
        credits = [herd.credit() for herd in herds]
        for seen, credit in zip(others, credits[1:], strict=True):
            np.testing.assert_array_equal(seen.replicas, expected.replicas)
            np.testing.assert_array_equal(seen.request, expected.request)
            np.testing.assert_array_equal(seen.prior_logits, expected.prior_logits)
            np.testing.assert_allclose(credit, credits[0], rtol=1e-9)
        actions = rng.integers(2, size=episode.num_clusters)  # two replicas get everything: queues grow
        for herd in herds:
            herd.place(actions)
    for herd in herds:
        herd.observe()
    served = [herd.take_served() for herd in herds]
    assert len(served[0].latency_s) > 0
    for other in served[1:]:
        np.testing.assert_allclose(np.sort(other.latency_s), np.sort(served[0].latency_s), rtol=1e-12)
        np.testing.assert_allclose(other.duration_s, served[0].duration_s)
        assert other.load_spread == pytest.approx(served[0].load_spread)


def test_exact_credit_is_that_of_the_twin() -> None:
    config = small(mixture=[{"scenario": "mixed_long"}], credit="exact")
    episode = draw_episode(config, 0, 0)
    cluster = clusters_of(config)["mixed_long"].with_speeds(episode.speed_factors)
    requests = episode.requests()
    vector, loose = VectorHerd(config, episode, cluster, requests), LooseHerd(config, episode, cluster, requests)
    analytic = VectorHerd(small(mixture=[{"scenario": "mixed_long"}]), episode, cluster, requests)
    correlations = []
    for _ in range(episode.num_decisions):
        for herd in (vector, loose, analytic):
            herd.observe()
        np.testing.assert_allclose(vector.credit(), loose.credit(), rtol=1e-9)
        correlations.append(np.corrcoef(vector.credit().reshape(-1), analytic.credit().reshape(-1))[0, 1])
        for herd in (vector, loose, analytic):
            herd.place(np.zeros(episode.num_clusters, np.int64))
    assert np.median(correlations) > 0.95  # the linear model says much the same


def test_an_episode_is_lost_at_the_safety_limit(tmp_path: Path) -> None:
    mixture = [{"scenario": "mixed_long", "load": [1.8, 1.9]}]
    config = small(
        mixture=mixture, latency_limit_s=0.5, limit_penalty=7.0, episode_rollouts=4, policy={"rollout_len": 64}
    )
    episode = draw_episode(config, 3 % len(config.slot_sizes), 1)
    clusters = clusters_of(config)
    slot = Slot(config, episode, clusters["mixed_long"].with_speeds(episode.speed_factors))
    train(config, tmp_path)
    export_policy(tmp_path / "checkpoints", tmp_path / "policy.npz")
    exported, _ = NumpyActor.load(tmp_path / "policy.npz")
    exploration = Exploration(temperature=50.0, epsilon=0.0)  # nearly at random: queues grow somewhere
    rng = np.random.default_rng(0)
    experiences = [
        slot.collect(build_actor((exported.weights, exported.shape)), exploration, rng.random((64, 2, 2)))
        for _ in range(4)
    ]
    kept = np.array([experience.num_kept for experience in experiences])
    assert (kept[0] > 0).all() and (kept[-1] == 0).any()  # some cluster got lost on the way
    cluster = int(np.flatnonzero(kept[-1] == 0)[0])
    last = int(np.flatnonzero(kept[:, cluster])[-1])
    (rollout,) = [r for r in rollouts_of(experiences[last], exploration, 0, is_last=False) if r.stream == cluster]
    assert len(rollout) == kept[last, cluster] and rollout.next_observation is None
    assert rollout.rewards[-1] < -7.0
