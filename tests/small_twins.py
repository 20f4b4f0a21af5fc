"""Small clusters in the twin: their replicas, requests for them, and a policy that places these."""

from typing import Any

import numpy as np
import torch

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, ModelShape, Roofline
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Completions, Twin, in_order
from vidur_ppo_plugin.workload.requests import Requests

MODEL = ModelShape(
    name="tiny",
    num_layers=4,
    num_q_heads=8,
    num_kv_heads=8,
    embedding_dim=512,
    mlp_hidden_dim=1024,
    use_gated_mlp=True,
    post_attn_norm=True,
)


def config_of(**changes: Any) -> TwinConfig:
    """Two replicas with little memory, so that requests queue and are preempted."""
    values: dict[str, Any] = {
        "roofline": Roofline(MODEL, DEVICES["a100"], NETWORKS["a100_dgx"]),
        "replica_scheduler": "sarathi",
        "speed_factors": [1.0, 0.5],
        "block_size": 16,
        "num_blocks": 60,
        "watermark_blocks": 1,
        "batch_size_cap": 8,
        "max_batch_tokens": 64,
        "max_request_tokens": 600,
        "max_full_requests": 8,
    }
    return TwinConfig(**{**values, **changes})


def workload(num_requests: int, seed: int = 0) -> dict[str, Any]:
    """Requests and the replicas that they go to, in the order in which `Twin.submit` takes them."""
    rng = np.random.default_rng(seed)
    return {
        "replicas": rng.integers(0, 2, num_requests),
        "arrived_at_s": np.cumsum(rng.exponential(0.002, num_requests)),
        "prompt_tokens": rng.integers(1, 300, num_requests),
        "decode_tokens": rng.integers(1, 60, num_requests),
    }


def submit(twin: Twin, requests: dict[str, Any], first: int, last: int) -> None:
    """Send some of the requests of a `workload` to their replicas."""
    for index in range(first, last):
        twin.submit(*(requests[name][index] for name in requests))


def requests_of(num_requests: int, seed: int) -> Requests:
    """A workload whose replicas have not been chosen."""
    _, *columns = workload(num_requests, seed).values()
    return Requests(*columns)


def of_cluster(vector: tuple[np.ndarray, Completions], cluster: int) -> Completions:
    """The completions of one of many clusters."""
    clusters, completions = vector
    mask = clusters == cluster
    return in_order(Completions(*(getattr(completions, name)[mask] for name in completions.__dataclass_fields__)))


def actor_of(seed: int = 0) -> Actor:
    """A policy with opinions of its own."""
    table = FeatureTable()
    shape = {name: getattr(table, name) for name in ("num_replica_features", "num_request_features")}
    network = ActorCritic(NetworkShape(**shape), seed=seed)
    torch.nn.init.normal_(network.actor_head.weight, std=0.5, generator=torch.Generator().manual_seed(seed))
    return Actor.from_network(network)


def prior_of(config: TwinConfig, name: str = "least_tokens") -> Prior:
    """A prior of weight 1 whose delay model fits the cluster."""
    return Prior(name, weight=1.0, delay_model=DelayModel.from_roofline(config.roofline, config.max_batch_tokens))
