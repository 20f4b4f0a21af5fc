"""The network's structure: a set of replicas, a residual over the prior, and an actor without torch that agrees."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape

FEATURES, REQUEST = 7, 3
VARIANTS = [
    {},
    {"decoupled": False},
    {"critic_gru_layers": 0},
    {"critic_gru_layers": 2},
    {"attention_heads": 2},
    {"hidden_size": 32, "feature_projection_dim": 48},
]


def network(trained: bool = True, **shape: int) -> ActorCritic:
    net = ActorCritic(NetworkShape(num_replica_features=FEATURES, num_request_features=REQUEST, **shape))
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return net


def inputs(replicas: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(replicas)
    return (
        3 * torch.randn(batch, replicas, FEATURES, generator=generator),
        torch.randn(batch, REQUEST, generator=generator),
        -torch.rand(batch, replicas, generator=generator),
    )


@pytest.mark.parametrize("shape", VARIANTS)
def test_permuting_replicas_permutes_logits_and_leaves_the_value(shape: dict[str, int]) -> None:
    net = network(**shape)
    replicas, request, prior = inputs(5, batch=3)
    order = torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        encoded, permuted = net.encode(replicas, request), net.encode(replicas[:, order], request)
        torch.testing.assert_close(net.logits(encoded, prior)[:, order], net.logits(permuted, prior[:, order]))
        torch.testing.assert_close(net.values(encoded)[0], net.values(permuted)[0])


@pytest.mark.parametrize("shape", [*VARIANTS, {"flat_replicas": 5}])
def test_untrained_policy_is_its_prior_to_the_last_bit(shape: dict[str, int]) -> None:
    net = network(trained=False, **shape)
    replicas, request, prior = inputs(5, batch=4)
    with torch.no_grad():
        assert torch.equal(net.logits(net.encode(replicas, request), prior), prior)


@pytest.mark.parametrize("shape", VARIANTS)
def test_one_network_serves_any_number_of_replicas(shape: dict[str, int]) -> None:
    net = network(**shape)
    for count in (1, 2, 64, 1024):
        replicas, request, prior = inputs(count)
        with torch.no_grad():
            assert net.logits(net.encode(replicas, request), prior).shape == (1, count)


def test_different_states_give_different_probabilities() -> None:
    """Batch statistics at batch size one would make every state look the same."""
    net = network()
    _, request, prior = inputs(4)
    with torch.no_grad():
        logits = [
            net.logits(net.encode(scale * torch.ones(1, 4, FEATURES) * torch.arange(4)[None, :, None], request), prior)
            for scale in (0.1, 1.0)
        ]
    assert (torch.softmax(logits[0], 1) - torch.softmax(logits[1], 1)).abs().max() > 1e-3


def test_no_action_probability_is_capped() -> None:
    net = network()
    with torch.no_grad():
        net.actor_head.weight.mul_(100.0)
        replicas, request, prior = inputs(4)
        assert torch.softmax(net.logits(net.encode(replicas, request), prior), 1).max() > 0.999


def test_actor_and_critic_are_decoupled_beyond_the_projection() -> None:
    def touched(shape: dict[str, bool]) -> set[str]:
        net = network(**shape)  # type: ignore[arg-type]
        replicas, request, _ = inputs(4, batch=2)
        net.values(net.encode(replicas, request))[0].sum().backward()
        return {name.split(".")[0] for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}

    assert touched({"decoupled": True}) == {"projection", "critic_branch", "critic_gru", "critic_head"}
    assert "actor_branch" in touched({"decoupled": False})


def test_the_critics_memory_carries_over_segments() -> None:
    net = network()
    replicas, request, _ = inputs(3, batch=10)
    with torch.no_grad():
        encoded = net.encode(replicas, request)
        whole, _ = net.values(encoded)
        first, hidden = net.values(encoded[:4])
        second, _ = net.values(encoded[4:], hidden)
        forgetful, _ = net.values(encoded[4:])
    torch.testing.assert_close(whole, torch.cat((first, second)))
    assert (second - forgetful).abs().max() > 1e-4


@pytest.mark.parametrize("shape", [v for v in VARIANTS if not v.get("attention_heads")] + [{"flat_replicas": 64}])
@pytest.mark.parametrize("count", [1, 4, 64, 300])
def test_the_actor_gives_torchs_probabilities(shape: dict[str, int], count: int) -> None:
    if shape.get("flat_replicas") and count != 64:
        count = 64
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
        ours = np.exp(logits - logits.max())
        assert np.abs(ours / ours.sum() - expected).max() < 1e-6


def test_the_actor_is_a_copy() -> None:
    net = network()
    actor = Actor.from_network(net)
    replicas, request, prior = inputs(4)
    before = actor.logits(replicas[0].numpy(), request[0].numpy(), prior[0].numpy())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    assert np.array_equal(before, actor.logits(replicas[0].numpy(), request[0].numpy(), prior[0].numpy()))


def test_export_runs_without_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    net = network()
    actor = Actor.from_network(net)
    path = tmp_path / "policy.npz"
    actor.save(path, {"feature_hash": "abc"})
    replicas, request, prior = inputs(4)
    arrays = tmp_path / "inputs.npz"
    np.savez(arrays, replicas=replicas[0].numpy(), request=request[0].numpy(), prior=prior[0].numpy())
    program = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from vidur_ppo_plugin.policy.actor import Actor\n"
        f"actor, metadata = Actor.load(Path({str(path)!r}))\n"
        f"a = np.load({str(arrays)!r}); assert metadata == {{'feature_hash': 'abc'}}\n"
        "print(actor.logits(a['replicas'], a['request'], a['prior']).tolist()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = actor.logits(replicas[0].numpy(), request[0].numpy(), prior[0].numpy())
    assert np.allclose(np.array(eval(done.stdout)), expected, atol=1e-6)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_a_file_that_is_no_policy_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.npz is not an exported policy"):
        Actor.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 0), ("critic_gru_layers", -1), ("attention_heads", 5), ("num_replica_features", 0)],
)
def test_impossible_shapes_are_refused(field: str, value: int) -> None:
    shape = {"num_replica_features": FEATURES, "num_request_features": REQUEST, field: value}
    with pytest.raises(ValueError, match=field):
        NetworkShape(**shape)
