"""The actor without torch: numpy only, fast for a handful of replicas, equal to the torch actor to float32 rounding.

`NumpyActor.from_network` copies the weights (after each update); `save` and `load` keep them in a file that a router
can run without torch.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .network import ActorCritic

Float32Array = NDArray[np.float32]

_LAYER_NORM_EPSILON = np.float32(1e-5)  # torch's default
_GELU_SCALE = np.float32(np.sqrt(2.0 / np.pi))
_GELU_CUBE = np.float32(0.044715)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
FORMAT_VERSION = 1


@dataclass(frozen=True)
class _Norm:
    """Layer normalisation; the mean is a product with a constant vector, which is faster than `mean`."""

    gain: Float32Array
    bias: Float32Array
    average: Float32Array

    def __call__(self, x: Float32Array) -> Float32Array:
        centred = x - (x @ self.average)[:, None]
        variance = (centred * centred) @ self.average
        scaled: Float32Array = centred * (_ONE / np.sqrt(variance + _LAYER_NORM_EPSILON))[:, None]
        return scaled * self.gain + self.bias


def actor_weights(network: "ActorCritic") -> dict[str, Float32Array]:
    """A copy of the parameters that decide, by their names."""
    return {
        name: parameter.detach().numpy().astype(np.float32, copy=True)
        for name, parameter in network.named_parameters()
        if name.startswith(("projection", "actor"))
    }


class NumpyActor:
    """The actor's forward pass for one decision."""

    def __init__(self, weights: dict[str, Float32Array], shape: dict[str, Any]) -> None:
        if shape["attention_heads"]:
            raise ValueError("attention_heads must be 0 for the numpy actor: act with torch instead")
        self.weights = weights
        self.shape = shape
        self._flat = int(shape["flat_replicas"])
        self._input_norm = self._norm("projection.0")
        self._projection_in = self._linear("projection.1")
        self._projection_out = self._linear("projection.3")
        hidden = int(shape["hidden_size"])
        weight, self._branch_bias = self._linear("actor_branch.0")
        # Rows for the replica itself, and for the mean and maximum over replicas: those are the same for all, so
        # their product is computed once and not for each replica.
        self._branch_own = np.ascontiguousarray(weight[:hidden])
        self._branch_pooled = np.ascontiguousarray(weight[hidden:])
        self._branch_norms = (self._norm("actor_branch.1"), self._norm("actor_branch.4"))
        self._branch_second = self._linear("actor_branch.3")
        head, self._head_bias = self._linear("actor_head")
        self._head = head if self._flat else np.ascontiguousarray(head[:, 0])

    @classmethod
    def from_network(cls, network: "ActorCritic") -> "NumpyActor":
        """A copy of the actor's present weights."""
        return cls(actor_weights(network), network.shape.to_dict())

    def logits(self, replicas: Float32Array, request: Float32Array, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica: the prior plus the learned residual."""
        x: Float32Array
        if self._flat:
            x = np.concatenate((replicas.reshape(-1), request), dtype=np.float32)[None, :]
        else:
            num_replicas, num_features = replicas.shape
            x = np.empty((num_replicas, num_features + len(request)), dtype=np.float32)
            x[:, :num_features] = replicas
            x[:, num_features:] = request
        weight, bias = self._projection_in
        x = self._input_norm(x) @ weight + bias
        x = _HALF * x * (_ONE + np.tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x)))  # type: ignore[assignment]
        weight, bias = self._projection_out
        x = x @ weight + bias
        if self._flat:
            x = x @ self._branch_own + self._branch_bias
        else:
            pooled = np.concatenate((x.sum(axis=0) / np.float32(len(x)), x.max(axis=0)))
            x = x @ self._branch_own + (pooled @ self._branch_pooled + self._branch_bias)
        x = np.maximum(self._branch_norms[0](x), _ZERO)
        weight, bias = self._branch_second
        x = np.maximum(self._branch_norms[1](x @ weight + bias), _ZERO)
        residual = (x @ self._head)[0] if self._flat else x @ self._head
        logits: Float32Array = prior_logits + residual + self._head_bias
        return logits

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write weights, shape and metadata to one .npz file."""
        header = json.dumps({"format": FORMAT_VERSION, "shape": self.shape, "metadata": metadata})
        with path.open("wb") as file:
            np.savez(file, header=np.frombuffer(header.encode(), dtype=np.uint8), **self.weights)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> tuple["NumpyActor", dict[str, Any]]:
        """The actor and its metadata from a file that `save` wrote; ValueError naming the file if it is not one."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                header = json.loads(bytes(arrays["header"]).decode())
                weights = {name: arrays[name] for name in arrays.files if name != "header"}
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not an exported policy: {error}") from error
        if header.get("format") != FORMAT_VERSION:
            raise ValueError(f"{path} has format {header.get('format')!r}, this version reads {FORMAT_VERSION}")
        return cls(weights, header["shape"]), header["metadata"]

    def _linear(self, name: str) -> tuple[Float32Array, Float32Array]:
        return np.ascontiguousarray(self.weights[f"{name}.weight"].T), self.weights[f"{name}.bias"]

    def _norm(self, name: str) -> _Norm:
        gain = self.weights[f"{name}.weight"]
        return _Norm(gain, self.weights[f"{name}.bias"], np.full(len(gain), 1.0 / len(gain), dtype=np.float32))
