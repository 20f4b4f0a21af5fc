"""The actor without torch: what decides, and the file that it is kept in.

`Actor.from_network` copies the weights (after each update); `save` and `load` keep them in a file that a router can run
without torch. Its logits equal those of the torch actor to float32 rounding.
"""

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .forward import forward_compiled

if TYPE_CHECKING:
    from .network import ActorCritic

Float32Array = NDArray[np.float32]

FORMAT_VERSION = 1
#: The actor's parameters by name, and the shape of its network: what it is made of.
Weights = tuple[dict[str, Float32Array], dict[str, Any]]


def actor_weights(network: "ActorCritic") -> dict[str, Float32Array]:
    """A copy of the parameters that decide, by their names."""
    return {
        name: parameter.detach().numpy().astype(np.float32, copy=True)
        for name, parameter in network.named_parameters()
        if name.startswith(("projection", "actor"))
    }


class Actor:
    """The actor's forward pass for one decision."""

    def __init__(self, weights: dict[str, Float32Array], shape: dict[str, Any]) -> None:
        if shape["attention_heads"]:
            raise ValueError("attention_heads must be 0 for an actor without torch: act with torch instead")
        self.weights = weights
        self.shape = shape
        self._arrays = self._arranged()

    @classmethod
    def from_network(cls, network: "ActorCritic") -> "Actor":
        """A copy of the actor's present weights."""
        return cls(actor_weights(network), network.shape.to_dict())

    @property
    def kernel_weights(self) -> tuple[Float32Array, ...]:
        """The weights that `forward` takes after features and prior."""
        return self._arrays

    def logits(self, replicas: Float32Array, request: Float32Array, prior_logits: Float32Array) -> Float32Array:
        """One logit a replica: the prior plus the learned residual."""
        if not replicas.flags.c_contiguous:
            replicas = np.ascontiguousarray(replicas)
        logits: Float32Array = forward_compiled(replicas, request, prior_logits, self._arrays)
        return logits

    def _arranged(self) -> tuple[Float32Array, ...]:
        """The weights as `forward` wants them: [inputs, outputs], the head's [outputs, inputs], vectors as rows."""
        weights, hidden = self.weights, int(self.shape["hidden_size"])
        # Gain and bias of the first normalisation go into the layer after it.
        gain, bias = weights["projection.0.weight"], weights["projection.0.bias"]
        first = np.ascontiguousarray(weights["projection.1.weight"].T)
        first_bias = (bias.astype(np.float64) @ first + weights["projection.1.bias"]).astype(np.float32)
        # Rows for the replica itself, and for the mean and maximum over replicas: those are the same for all, so
        # their product is computed once and not for each replica. A flat network has none of the latter.
        branch = np.ascontiguousarray(weights["actor_branch.0.weight"].T)
        rows = (
            first_bias,
            weights["projection.3.bias"],
            weights["actor_branch.0.bias"],
            weights["actor_branch.1.weight"],
            weights["actor_branch.1.bias"],
            weights["actor_branch.3.bias"],
            weights["actor_branch.4.weight"],
            weights["actor_branch.4.bias"],
            weights["actor_head.bias"],
        )
        vectors = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.float32)
        for vector, row in zip(vectors, rows, strict=True):
            vector[: len(row)] = row
        return (
            (gain[:, None] * first).astype(np.float32),
            np.ascontiguousarray(weights["projection.3.weight"].T),
            np.ascontiguousarray(branch[:hidden]),
            np.ascontiguousarray(branch[hidden:]),
            np.ascontiguousarray(weights["actor_branch.3.weight"].T),
            np.ascontiguousarray(weights["actor_head.weight"]),
            vectors,
        )

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write weights, shape and metadata to one .npz file."""
        header = json.dumps({"format": FORMAT_VERSION, "shape": self.shape, "metadata": metadata})
        with path.open("wb") as file:
            np.savez(file, header=np.frombuffer(header.encode(), dtype=np.uint8), **self.weights)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> tuple["Actor", dict[str, Any]]:
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
