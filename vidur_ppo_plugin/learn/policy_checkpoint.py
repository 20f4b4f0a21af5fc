"""Checkpoints that hold a policy and no learner: small, to be used or to be learned on from, not to be resumed.

Those of a run hold everything that its next update depends on; of a shipped policy only the network is of use.
"""

from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint

_NETWORK = "network"


def is_policy_only(loaded: checkpoint.Checkpoint) -> bool:
    """Whether a checkpoint holds no learner."""
    return _NETWORK in loaded.state


def network_weights(loaded: checkpoint.Checkpoint) -> dict[str, Any]:
    """The weights of the network in a checkpoint, with or without a learner."""
    holder = loaded.state if is_policy_only(loaded) else loaded.state["agent"]["ppo"]
    weights: dict[str, Any] = holder[_NETWORK]
    return weights


def policy_temperature(loaded: checkpoint.Checkpoint) -> float:
    """The temperature at which the policy was last sampled; 1 where that is not known."""
    return 1.0 if is_policy_only(loaded) else float(loaded.state["agent"]["temperature"]["temperature"])


def save_policy(source: checkpoint.Checkpoint, destination: Path, *, metadata: dict[str, Any]) -> None:
    """Write the network of a checkpoint to a file of its own; `metadata` is added to that of the checkpoint."""
    state = {_NETWORK: dict(network_weights(source))}
    checkpoint.write(destination, state, metadata={**source.metadata, **metadata})
