"""Learned policies for the tests of `serve`: real networks, exported, with weights that are not zero."""

from pathlib import Path
from typing import Any


def save_policy(path: Path, seed: int = 0, **metadata: Any) -> Path:
    """An exported policy whose residual is large enough to decide otherwise than its prior."""
    import torch

    from vidur_ppo_plugin.policy.actor import Actor
    from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
    from vidur_ppo_plugin.routing.features import FeatureTable

    table = FeatureTable()
    shape = NetworkShape(
        num_replica_features=table.num_replica_features,
        num_request_features=table.num_request_features,
        feature_projection_dim=32,
        hidden_size=32,
        critic_gru_layers=1,
        attention_heads=0,
        decoupled=True,
        flat_replicas=0,
    )
    network = ActorCritic(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.actor_head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    facts = {
        "feature_hash": table.hash,
        "features": table.definition,
        "prior": "least_tokens",
        "prior_weight": 3.0,
        "num_updates": 0,
        "num_decisions": 0,
        "plugin_version": "0",
        "temperature": 1.0,
    }
    Actor.from_network(network).save(path, {**facts, **metadata})
    return path
