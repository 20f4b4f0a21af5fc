"""`NumpyActor` with its forward pass compiled: several times as fast for the few replicas that a decision is about."""

from typing import TYPE_CHECKING, Any

import numpy as np

from .forward_kernel import forward_compiled
from .numpy_actor import Float32Array, NumpyActor

if TYPE_CHECKING:
    from .network import ActorCritic


class CompiledActor(NumpyActor):
    """The actor's forward pass for one decision, by `forward_kernel`; for set encoders only."""

    def __init__(self, weights: dict[str, Float32Array], shape: dict[str, Any]) -> None:
        super().__init__(weights, shape)
        if self._flat:
            raise ValueError("flat_replicas must be 0 for the compiled actor")
        # Gain and bias of the first normalisation go into the layer after it.
        weight, bias = self._projection_in
        first_weight = (self._input_norm.gain[:, None] * weight).astype(np.float32)
        first_bias = (self._input_norm.bias.astype(np.float64) @ weight + bias).astype(np.float32)
        first, second = self._branch_norms
        rows = (
            first_bias,
            self._projection_out[1],
            self._branch_bias,
            first.gain,
            first.bias,
            self._branch_second[1],
            second.gain,
            second.bias,
            self._head,
            self._head_bias,
        )
        vectors = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.float32)
        for vector, row in zip(vectors, rows, strict=True):
            vector[: len(row)] = row
        self._matrices = (
            first_weight,
            self._projection_out[0],
            self._branch_own,
            self._branch_pooled,
            self._branch_second[0],
            vectors,
        )

    @property
    def kernel_weights(self) -> tuple[Float32Array, ...]:
        """What `forward_kernel.forward` goes by, after features and prior."""
        return self._matrices

    def logits(self, replicas: Float32Array, request: Float32Array, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica: the prior plus the learned residual."""
        if not replicas.flags.c_contiguous:
            replicas = np.ascontiguousarray(replicas)
        logits: Float32Array = forward_compiled(replicas, request, prior_logits, *self._matrices)
        return logits


def fast_actor(network: "ActorCritic") -> NumpyActor:
    """The fastest actor that the network's shape allows."""
    return (NumpyActor if network.shape.flat_replicas else CompiledActor).from_network(network)
