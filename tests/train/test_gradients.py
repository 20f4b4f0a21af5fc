"""Gradients computed in parts add up to the gradient of the whole."""

import numpy as np
import pytest
import torch
from training_runs import clusters_of, small

from vidur_ppo_plugin.learn.loss import Loss
from vidur_ppo_plugin.learn.preparation import Preparation
from vidur_ppo_plugin.train.engines import InProcessEngine
from vidur_ppo_plugin.train.gradients import ParallelGradients
from vidur_ppo_plugin.train.slots import Exploration, rollouts_of
from vidur_ppo_plugin.train.trainer import Trainer


@pytest.mark.parametrize("num_jobs", [1, 2, 3])
@pytest.mark.parametrize("is_expected", [True, False])
def test_parts_add_up(num_jobs: int, is_expected: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    policy = {"rollout_len": 32, "expected_gradient": is_expected, "kl_ref_coef": 0.1}
    mixture = [{"scenario": "heterogeneous", "num_replicas": [2, 4], "speeds": [[1.0, 0.5]]}]
    config = small(policy=policy, mixture=mixture, environments=6, clusters_in_step=1)
    clusters = clusters_of(config)
    engine = InProcessEngine(config, clusters)
    trainer = Trainer(config, clusters, engine, tmp_path_factory.mktemp("unused"), num_jobs=1)
    rollouts = []
    for slot, experience in enumerate(trainer.collect()):
        rollouts += rollouts_of(experience, Exploration(1.0, 0.0), slot, is_last=False)
    assert {rollout.num_replicas for rollout in rollouts} == {2, 4}
    ppo = trainer.state.agent.ppo
    torch.nn.init.normal_(ppo.network.actor_head.weight, std=0.3)  # else only the last layer has a gradient
    batch, _ = Preparation(ppo.network, ppo.parameters).batch(rollouts, None)
    chosen = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))[:100]
    coefficients = trainer.state.agent._coefficients()

    loss, metrics = Loss(ppo.network, ppo.parameters).of_policy(batch, chosen, coefficients)
    ppo.network.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad.clone() for name, p in ppo.network.named_parameters() if p.grad is not None}
    parallel = ParallelGradients(engine, ppo.network, ppo.parameters, num_jobs=num_jobs)
    in_parts = parallel(batch, chosen, coefficients)
    assert in_parts == pytest.approx(metrics, abs=1e-6)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4
    for name, gradient in expected.items():
        found = dict(ppo.network.named_parameters())[name].grad
        assert found is not None
        np.testing.assert_allclose(found.numpy(), gradient.numpy(), atol=1e-6, rtol=1e-4, err_msg=name)
