"""The actor against torch."""

import numpy as np
import pytest
import torch
from test_network import FEATURES, REQUEST, inputs, network

from vidur_ppo_plugin.policy.actor import Actor, Float32Array

SHAPES = [{}, {"decoupled": False}, {"hidden_size": 32, "feature_projection_dim": 48}, {"hidden_size": 5}]


def softmax(logits: Float32Array) -> Float32Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 4, 33, 300])
def test_it_gives_torchs_probabilities(shape: dict[str, int], count: int) -> None:
    net = network(**shape)
    actor = Actor.from_network(net)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        replicas = 4 * torch.randn(1, count, FEATURES, generator=generator)
        request = torch.randn(1, REQUEST, generator=generator)
        prior = -5 * torch.rand(1, count, generator=generator)
        with torch.no_grad():
            expected = torch.softmax(net.logits(net.encode(replicas, request), prior)[0], 0).numpy()
        logits = actor.logits(replicas[0].numpy(), request[0].numpy(), prior[0].numpy())
        assert logits.dtype == np.float32
        assert np.abs(softmax(logits) - expected).max() < 1e-6


def test_untrained_it_is_the_prior_to_the_last_bit() -> None:
    actor = Actor.from_network(network(trained=False))
    replicas, request, prior = (tensor[0].numpy() for tensor in inputs(5))
    assert np.array_equal(actor.logits(replicas, request, prior), prior)


def test_every_result_is_an_array_of_its_own() -> None:
    actor = Actor.from_network(network())
    replicas, request, prior = (tensor[0].numpy() for tensor in inputs(5))
    first = actor.logits(replicas, request, prior)
    kept = first.copy()
    actor.logits(2 * replicas, request, prior)
    assert np.array_equal(first, kept)
    # Also from features that lie in memory the other way round.
    assert np.array_equal(actor.logits(np.asfortranarray(replicas), request, prior), kept)


@pytest.mark.parametrize("where", ["replicas", "request", "weights"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_does_not_vanish(where: str, value: float) -> None:
    net = network()
    arrays = dict(
        zip(("replicas", "request", "prior"), (tensor[0].numpy().copy() for tensor in inputs(4)), strict=True)
    )
    if where == "weights":
        with torch.no_grad():
            net.actor_branch[0].weight[3, 3] = value  # type: ignore[index,union-attr]
    else:
        arrays[where].flat[2] = value
    logits = Actor.from_network(net).logits(arrays["replicas"], arrays["request"], arrays["prior"])
    assert not np.isfinite(logits.sum())
