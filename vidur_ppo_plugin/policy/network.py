"""The actor-critic in torch: for learning. Who decides is its copy, `actor.Actor`.

    replica and request features ── projection ── pooling across replicas ─┬─ actor branch ── one logit a replica
                                    (shared by all replicas)               └─ critic branch ── pooling ── GRU ── value

The encoder is shared across replicas, and replicas meet only in symmetric pooling (or attention): permuting them
permutes the logits, and one set of weights serves any number of them. The logits are a residual over a heuristic prior
whose last layer starts at zero, so the untrained policy is exactly that heuristic. Nothing caps a logit.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vidur_ppo_plugin.flags import NetworkFlags

from . import gru
from .actor import Actor, Float32Array

# Gains of orthogonal initialisation (Andrychowicz et al. 2021, "What Matters in On-Policy RL", and CleanRL).
_HIDDEN_GAIN = 2.0**0.5
_VALUE_GAIN = 1.0


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """What defines the network's parameters; two networks of equal shape can exchange weights."""

    num_replica_features: int
    num_request_features: int
    feature_projection_dim: int = NetworkFlags.feature_projection_dim
    hidden_size: int = NetworkFlags.hidden_size
    critic_gru_layers: int = NetworkFlags.critic_gru_layers
    attention_heads: int = NetworkFlags.attention_heads
    decoupled: bool = NetworkFlags.enable_decoupled_ac
    # The plan's flat variant: replicas concatenated in order, for exactly this many; 0 for the set encoder.
    flat_replicas: int = 0

    def __post_init__(self) -> None:
        for name in ("num_replica_features", "num_request_features", "feature_projection_dim", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("critic_gru_layers", "attention_heads", "flat_replicas"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.attention_heads and self.hidden_size % self.attention_heads:
            raise ValueError(
                f"attention_heads must divide hidden_size ({self.hidden_size}), got {self.attention_heads}"
            )
        if self.attention_heads and self.flat_replicas:
            raise ValueError("attention_heads must be 0 with the flat network, which has no set to attend over")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)


def _branch(input_size: int, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(input_size, hidden_size),
        nn.LayerNorm(hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.LayerNorm(hidden_size),
        nn.ReLU(),
    )


class ActorCritic(nn.Module):
    """Logits for every replica, and the value of the cluster's state."""

    def __init__(self, shape: NetworkShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        hidden, projection = shape.hidden_size, shape.feature_projection_dim
        if shape.flat_replicas:
            inputs = shape.flat_replicas * shape.num_replica_features + shape.num_request_features
            pooled = hidden
        else:
            inputs = shape.num_replica_features + shape.num_request_features
            pooled = 2 * hidden if shape.attention_heads else 3 * hidden
        # GELU in its tanh form: `forward` then needs no error function.
        self.projection = nn.Sequential(
            nn.LayerNorm(inputs),
            nn.Linear(inputs, projection),
            nn.GELU(approximate="tanh"),
            nn.Linear(projection, hidden),
        )
        self.attention = (
            nn.MultiheadAttention(hidden, shape.attention_heads, batch_first=True) if shape.attention_heads else None
        )
        self.actor_branch = _branch(pooled, hidden)
        # One shared trunk with two heads if the branches are not decoupled.
        self.critic_branch = _branch(pooled, hidden) if shape.decoupled else self.actor_branch
        critic_inputs = hidden if shape.flat_replicas else 2 * hidden
        self.critic_gru = nn.GRU(critic_inputs, hidden, shape.critic_gru_layers) if shape.critic_gru_layers else None
        self.actor_head = nn.Linear(hidden, shape.flat_replicas or 1)
        self.critic_head = nn.Linear(hidden if shape.critic_gru_layers else critic_inputs, 1)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, _HIDDEN_GAIN, generator=generator)
                nn.init.zeros_(module.bias)
        for recurrent in (self.critic_gru, self.attention):
            if recurrent is None:
                continue
            for name, parameter in recurrent.named_parameters():
                if "bias" in name:
                    nn.init.zeros_(parameter)
                else:
                    nn.init.orthogonal_(parameter, generator=generator)
        nn.init.orthogonal_(self.critic_head.weight, _VALUE_GAIN, generator=generator)
        # The residual starts at zero: the untrained policy is its prior, to the last bit.
        nn.init.zeros_(self.actor_head.weight)
        nn.init.zeros_(self.actor_head.bias)

    def encode(self, replicas: Tensor, request: Tensor) -> Tensor:
        """Encodings [batch, replicas, pooled]: each replica's own and what is pooled over the others."""
        batch, num_replicas, _ = replicas.shape
        if self.shape.flat_replicas:
            encoded: Tensor = self.projection(torch.cat((replicas.reshape(batch, -1), request), dim=-1))
            return encoded[:, None, :]
        spread = request[:, None, :].expand(batch, num_replicas, request.shape[-1])
        encoded = self.projection(torch.cat((replicas, spread), dim=-1))
        if self.attention is not None:
            attended, _ = self.attention(encoded, encoded, encoded, need_weights=False)
            return torch.cat((encoded, attended), dim=-1)
        pooled = torch.cat((encoded.mean(dim=1), encoded.amax(dim=1)), dim=-1)
        return torch.cat((encoded, pooled[:, None, :].expand(batch, num_replicas, pooled.shape[-1])), dim=-1)

    def logits(self, encoded: Tensor, prior_logits: Tensor) -> Tensor:
        """Logits [batch, replicas]: the prior plus the learned residual."""
        residual: Tensor = self.actor_head(self.actor_branch(encoded))
        residual = residual[:, 0, :] if self.shape.flat_replicas else residual.squeeze(-1)
        return prior_logits + residual

    def values(self, encoded: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Values of states in the order in which they happened, and the GRU's state after the last.

        `encoded` is [time, replicas, pooled]; `hidden` is the state before the first, zeros if None.
        """
        features: Tensor = self.critic_branch(encoded)
        if self.shape.flat_replicas:
            summary = features[:, 0, :]
        else:
            summary = torch.cat((features.mean(dim=1), features.amax(dim=1)), dim=-1)
        if self.critic_gru is None:
            return self.critic_head(summary).squeeze(-1), self.initial_hidden()
        if hidden is None:
            hidden = self.initial_hidden()
        outputs, hidden = gru.run(self.critic_gru, summary, hidden)
        return self.critic_head(outputs).squeeze(-1), hidden

    def initial_hidden(self) -> Tensor:
        """The GRU's state before anything has happened."""
        return torch.zeros(max(1, self.shape.critic_gru_layers), self.shape.hidden_size)

    @torch.no_grad()
    def attention_summary(self, replicas: Tensor, request: Tensor) -> dict[str, float]:
        """Statistics of the attention weights, averaged over states and replicas; empty without attention."""
        weights = self.attention_weights(replicas, request)
        if weights is None:
            return {}
        entropy = -(weights * weights.clamp_min(1e-12).log()).sum(dim=-1)
        return {
            "attention_self": float(weights.diagonal(dim1=1, dim2=2).mean()),
            "attention_max": float(weights.amax(dim=-1).mean()),
            "attention_entropy": float(entropy.mean()),
        }

    def attention_weights(self, replicas: Tensor, request: Tensor) -> Tensor | None:
        """Attention [batch, replicas, replicas], averaged over heads; None without attention. For the record only."""
        if self.attention is None:
            return None
        spread = request[:, None, :].expand(*replicas.shape[:2], request.shape[-1])
        encoded = self.projection(torch.cat((replicas, spread), dim=-1))
        _, weights = self.attention(encoded, encoded, encoded, need_weights=True)
        return weights  # type: ignore[no-any-return]


class TorchActor:
    """Scores replicas with the network itself: where it has attention, which nothing else computes."""

    def __init__(self, network: ActorCritic) -> None:
        self._network = network
        self.shape = network.shape.to_dict()

    @torch.no_grad()
    def logits(self, replicas: Float32Array, request: Float32Array, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica: the prior plus the learned residual."""
        network = self._network
        encoded = network.encode(torch.from_numpy(replicas)[None], torch.from_numpy(request)[None])
        logits: Float32Array = network.logits(encoded, torch.from_numpy(prior_logits)[None])[0].numpy()
        return logits


def actor_of(network: ActorCritic) -> Actor | TorchActor:
    """An actor with the network's present weights: a copy of them, unless the network has attention."""
    return TorchActor(network) if network.shape.attention_heads else Actor.from_network(network)
