"""Updates from decisions that stay with the workers: the same as from all of them in one place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import clusters_of, small

from vidur_ppo_plugin.learn.parameters import Coefficients
from vidur_ppo_plugin.train.engines import InProcessEngine
from vidur_ppo_plugin.train.gradients import SpreadDecisions
from vidur_ppo_plugin.train.slots import rollouts_of
from vidur_ppo_plugin.train.trainer import Trainer
from vidur_ppo_plugin.train.worker import Worker

MIXTURE = [{"scenario": "heterogeneous", "num_replicas": [2, 4], "speeds": [[1.0, 0.5]]}]


def trainer_of(tmp_path: Path, num_jobs: int, **policy: Any) -> Trainer:
    config = small(policy={"rollout_len": 32, **policy}, mixture=MIXTURE, environments=6, clusters_in_step=1)
    clusters = clusters_of(config)
    trainer = Trainer(config, clusters, InProcessEngine(config, clusters), tmp_path, num_jobs=num_jobs)
    head = trainer.state.agent.ppo.network.actor_head.weight
    # Else only the last layer has a gradient.
    torch.nn.init.normal_(head, std=0.3, generator=torch.Generator().manual_seed(0))
    return trainer


def spread(trainer: Trainer) -> SpreadDecisions:
    collected = trainer.collect()
    (source,) = collected.update.args  # type: ignore[attr-defined]
    assert isinstance(source, SpreadDecisions)
    return source


@pytest.mark.parametrize("num_jobs", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        {"expected_gradient": True, "kl_ref_coef": 0.1},
        {"expected_gradient": False, "epsilon": 0.2, "epsilon_steps": 1000},
        {"normalize_advantages": False, "normalize_rewards": False, "entropy_coef": 0.05},
    ],
    ids=["every action", "sampled", "not normalised"],
)
def test_parts_add_up_to_the_whole(num_jobs: int, policy: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_jobs, **policy)
    source, ppo = spread(trainer), trainer.state.agent.ppo
    coefficients = Coefficients(
        learning_rate=1e-3, entropy_coef=policy.get("entropy_coef", 0.01), kl_coef=0.1, kl_ref_coef=0.1
    )
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:100]
    found_before = source.prepare()
    found = source.gradient(chosen, (0, 1), coefficients)
    gradients = {name: p.grad.clone() for name, p in ppo.network.named_parameters() if p.grad is not None}

    whole = trainer_of(tmp_path, num_jobs, **policy)
    worker, rollouts = Worker(whole._config, clusters_of(whole._config)), []
    for job in source.jobs:
        handed_over = worker._collect(type(job)(job.iteration, job.exploration, job.tasks, stays=False), source.weights)
        for task, experience in zip(job.tasks, handed_over, strict=True):  # type: ignore[arg-type]
            rollouts += rollouts_of(experience, job.exploration, task.episode.slot, is_last=False)
    # In the order of numbers of replicas, as batches are made.
    sizes = [rollout.num_replicas for rollout in rollouts]
    assert set(sizes) == {2, 4}
    batch, expected_before = whole.state.agent.ppo.prepared(rollouts)
    expected = whole.state.agent.ppo.gradient(batch, _renumbered(chosen, source, sizes), (0, 1), coefficients)
    assert found_before == pytest.approx(expected_before, abs=1e-6)
    assert found == pytest.approx(expected, abs=1e-5)
    parameters = dict(whole.state.agent.ppo.network.named_parameters())
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    for name, gradient in gradients.items():
        wanted = parameters[name].grad
        assert wanted is not None
        np.testing.assert_allclose(gradient.numpy(), wanted.numpy(), atol=2e-6, rtol=1e-3, err_msg=name)


def _renumbered(chosen: torch.Tensor, source: SpreadDecisions, sizes: list[int]) -> torch.Tensor:
    """The same decisions in a batch of all rollouts: there, those with fewer replicas come first."""
    length, numbers, first = 32, {}, 0
    per_job = [len(part.rewards) for part in source.sums]
    rollout = 0
    for count in per_job:  # within a job, too, those with fewer replicas come first
        order = sorted(range(rollout, rollout + count), key=lambda index: sizes[index])
        for index in order:
            numbers[index] = first
            first += length
        rollout += count
    whole_order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    place = {index: position * length for position, index in enumerate(whole_order)}
    mapping = torch.empty(first, dtype=torch.int64)
    for index, start in numbers.items():
        mapping[start : start + length] = torch.arange(place[index], place[index] + length)
    return mapping[chosen]


def test_decisions_that_a_worker_has_lost_are_collected_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2)
    source, engine = spread(trainer), trainer._engine
    assert isinstance(engine, InProcessEngine)
    source.prepare()
    chosen, coefficients = torch.arange(40), trainer.state.agent._coefficients()
    network = trainer.state.agent.ppo.network
    told, gradients = [], []
    for _ in range(2):
        told.append(source.gradient(chosen, (0, 1), coefficients))
        gradients.append({name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None})
        engine._worker = Worker(trainer._config, clusters_of(trainer._config))  # another one, who knows nothing
    assert told[0] == told[1]
    for name, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradient.numpy(), gradients[1][name].numpy())
    # It then goes on where the other was.
    went_on, never_lost = trainer.collect(), trainer_of(tmp_path, 2)
    never_lost.collect()
    never_lost.state.agent.num_decisions = trainer.state.agent.num_decisions
    for ours, theirs in zip(went_on.actions, never_lost.collect().actions, strict=True):
        np.testing.assert_array_equal(ours, theirs)
