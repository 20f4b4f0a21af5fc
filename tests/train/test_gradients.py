"""Updates from shards that lie with workers: what they add up to is what one shard of everything gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import clusters_of, small

from vidur_ppo_plugin.learn.batch import Normalisation
from vidur_ppo_plugin.learn.parameters import Coefficients
from vidur_ppo_plugin.learn.ppo import PPO, _parts
from vidur_ppo_plugin.learn.rollout import Rollout
from vidur_ppo_plugin.learn.shard import LocalShards, Shard
from vidur_ppo_plugin.train.engines import InProcessEngine
from vidur_ppo_plugin.train.gradients import WorkerShards
from vidur_ppo_plugin.train.trainer import Trainer
from vidur_ppo_plugin.train.worker import Worker

MIXTURE = [{"scenario": "heterogeneous", "num_replicas": [2, 4], "speeds": [[1.0, 0.5]]}]


#: As a checkpoint might: else a stream begins and the critic's statistics are empty.
RETURNS = {"count": 100.0, "mean": -0.5, "sum_of_squares": 400.0}


def trainer_of(tmp_path: Path, num_jobs: int, *, enable_critic: bool = False, **policy: Any) -> Trainer:
    config = small(
        policy={"rollout_len": 32, **policy},
        mixture=MIXTURE,
        environments=6,
        clusters_in_step=1,
        enable_critic=enable_critic,
    )
    clusters = clusters_of(config)
    trainer = Trainer(config, clusters, InProcessEngine(config, clusters), tmp_path, num_jobs=num_jobs)
    ppo = trainer.state.agent.ppo
    # Else only the last layer has a gradient.
    torch.nn.init.normal_(ppo.network.actor_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    if enable_critic:
        state = ppo.state_dict()
        hiddens = {stream: torch.full_like(ppo.network.initial_hidden(), 0.1 * stream) for stream in range(6)}
        state["preparation"] |= {"returns": RETURNS, "hiddens": hiddens}
        ppo.load_state_dict(state)
    return trainer


def shards_of(trainer: Trainer) -> WorkerShards:
    return trainer.collect().shards


def rollouts_in(trainer: Trainer) -> list[Rollout]:
    """What the worker in this process has collected, in the order of its shards."""
    engine = trainer._engine
    assert isinstance(engine, InProcessEngine)
    shards: list[Shard] = list(engine._worker._shards.values())
    return [rollout for shard in shards for draft in shard._drafts for rollout in draft.rollouts]


POLICIES: dict[str, dict[str, Any]] = {
    "every action": {"expected_gradient": True, "kl_ref_coef": 0.1},
    "sampled": {"expected_gradient": False, "epsilon": 0.2, "epsilon_steps": 1000},
    "not normalised": {"normalize_advantages": False, "normalize_rewards": False, "entropy_coef": 0.05},
    "critic": {"enable_critic": True, "gamma": 0.9, "minibatch_size": 16},
    "critic beside all actions": {"enable_critic": True, "minibatch_size": 16},
}


@pytest.mark.parametrize("num_jobs", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_parts_add_up_to_the_whole(num_jobs: int, policy: dict[str, Any], tmp_path: Path) -> None:
    trainer, whole = (trainer_of(tmp_path, num_jobs, **policy) for _ in range(2))
    spread, ppo = shards_of(trainer), trainer.state.agent.ppo
    rollouts = rollouts_in(trainer)
    assert {rollout.num_replicas for rollout in rollouts} == {2, 4} and len(rollouts) == 6
    one = LocalShards(whole.state.agent.ppo, rollouts)
    coefficients = Coefficients(learning_rate=1e-3, entropy_coef=0.01, kl_coef=0.1, kl_ref_coef=0.1)
    chosen = torch.randperm(6 * 32, generator=torch.Generator().manual_seed(0))[:100].numpy()
    gradients, metrics, normalisations, states = [], [], [], []
    for learner, shards in ((ppo, spread), (whole.state.agent.ppo, one)):
        summaries, normalisation, told = learner._prepare(shards)
        sizes = [contents.num_decisions for contents in shards.contents]
        segments = [np.arange(len(summary.segment_lengths)) for summary in summaries]
        numbers = chosen if shards is spread else _in_one_shard(chosen, rollouts)
        minibatches = _parts(numbers, sizes, segments, summaries)
        assert sum(minibatch.share for minibatch in minibatches) == pytest.approx(1.0)
        metrics.append(shards.backward(minibatches, normalisation, coefficients) | told)
        gradients.append({name: p.grad for name, p in learner.network.named_parameters() if p.grad is not None})
        normalisations.append(vars(normalisation))
        states.append(learner.state_dict()["preparation"])
    assert normalisations[0] == pytest.approx(normalisations[1], rel=1e-9)
    assert (normalisations[0] == vars(Normalisation())) == (policy.get("normalize_advantages") is False)
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 1e-4
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradient.numpy(), gradients[1][name].numpy(), atol=2e-6, rtol=1e-3, err_msg=name)
    # What the next update begins with: the critic's memory and the statistics of returns.
    assert ("value_loss" in metrics[0]) == policy.get("enable_critic", False)
    assert states[0]["hiddens"].keys() == states[1]["hiddens"].keys()
    for stream, hidden in states[0]["hiddens"].items():
        np.testing.assert_allclose(hidden, states[1]["hiddens"][stream], atol=1e-6)
    assert states[0]["rewards"].pop("discounted_sums") == states[1]["rewards"].pop("discounted_sums")
    assert states[0]["rewards"] == pytest.approx(states[1]["rewards"])
    assert states[0]["returns"] == pytest.approx(states[1]["returns"], rel=1e-5)


def _in_one_shard(chosen: np.ndarray, rollouts: list[Rollout]) -> np.ndarray:
    """The same decisions in a shard of all rollouts: there, those with fewer replicas come first."""
    order = sorted(range(len(rollouts)), key=lambda index: rollouts[index].num_replicas)
    place = {index: 32 * position for position, index in enumerate(order)}
    return np.array([place[number // 32] + number % 32 for number in chosen.tolist()])


@pytest.mark.parametrize("policy", [POLICIES["every action"], POLICIES["critic"]], ids=["every action", "critic"])
def test_decisions_that_a_worker_has_lost_are_collected_again(policy: dict[str, Any], tmp_path: Path) -> None:
    """Before they are prepared and after: another worker, who knows nothing, goes on where the lost one was."""

    def updated(lost_before: str) -> tuple[dict[str, float], Any, Any]:
        trainer = trainer_of(tmp_path, 2, **policy)
        engine, shards, learner = trainer._engine, shards_of(trainer), trainer.state.agent.ppo
        assert isinstance(engine, InProcessEngine)
        kinds: list[str] = []
        run = engine.run

        def lose(jobs: Any, weights: Any) -> list[Any]:
            kinds.append(type(jobs[0]).__name__)
            if kinds.count(lost_before) == 1 and kinds[-1] == lost_before:
                engine._worker = Worker(trainer._config, clusters_of(trainer._config))
            return run(jobs, weights)

        engine.run = lose  # type: ignore[method-assign]
        metrics = learner.update(shards, trainer.state.agent._coefficients())
        assert kinds.count("CollectJob") == bool(lost_before)
        network = {name: weights.tolist() for name, weights in learner.network.state_dict().items()}
        return metrics, network, [actions.tolist() for actions in trainer.collect().actions]

    expected = updated("")
    assert updated("PrepareJob") == expected
    assert updated("GradientJob") == expected


def test_a_number_that_is_not_finite_leaves_the_learner_as_it_was(tmp_path: Path) -> None:
    """Learned by the worker, told by the learner: the update is skipped and training goes on."""
    trainer = trainer_of(tmp_path, 2)
    collected, worker = trainer.collect(), trainer._engine._worker  # type: ignore[attr-defined]
    shard = next(iter(worker._shards.values()))
    rollouts = [rollout for draft in shard._drafts for rollout in draft.rollouts]
    rollouts[0].rewards[3] = np.nan
    spoiled = Shard(rollouts, shard._network, None, shard._parameters).contents
    assert spoiled.not_finite == "rewards[3] of the rollout is not finite: nan"
    collected.shards.contents = [spoiled, *collected.shards.contents[1:]]
    before = _plain(trainer.state.agent.ppo)
    assert trainer._learn(collected) == {}
    assert _plain(trainer.state.agent.ppo) == before


def _plain(ppo: PPO) -> Any:
    state = ppo.state_dict()
    return state["num_updates"], state["preparation"], {k: v.tolist() for k, v in state["network"].items()}
