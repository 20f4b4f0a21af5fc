"""Checkpoints that hold a policy and no learner: small, to be used or to be learned on from, not to be resumed.

Those of a run hold everything that its next update depends on; of a shipped policy only the network is of use.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidur_ppo_plugin import __version__, checkpoint

if TYPE_CHECKING:
    from .agent import Agent  # imports torch

_NETWORK = "network"


def is_policy_only(loaded: checkpoint.Checkpoint) -> bool:
    """Whether a checkpoint holds no learner."""
    return _NETWORK in loaded.state


def network_weights(loaded: checkpoint.Checkpoint) -> dict[str, Any]:
    """The weights of the network in a checkpoint, with or without a learner."""
    holder = loaded.state if is_policy_only(loaded) else loaded.state["agent"]["ppo"]
    weights: dict[str, Any] = holder[_NETWORK]
    return weights


def metadata_of(agent: "Agent") -> dict[str, Any]:
    """What a checkpoint of this agent says of itself."""
    return {
        "feature_hash": agent.features.hash,
        "features": agent.features.definition,
        "network": agent.ppo.network.shape.to_dict(),
        "prior": agent.flags.prior,
        "prior_weight": agent.flags.prior_weight,
        "plugin_version": __version__,
        "num_updates": agent.ppo.num_updates,
        "num_decisions": agent.num_decisions,
    }


def restore(agent: "Agent", loaded: checkpoint.Checkpoint) -> None:
    """Go on from a checkpoint of either kind: a learner is resumed, a policy is acted with and learned on from."""
    if is_policy_only(loaded):
        agent.load_policy(network_weights(loaded))
    else:
        agent.load_state_dict(loaded.state["agent"])


def policy_temperature(loaded: checkpoint.Checkpoint) -> float:
    """The temperature at which the policy was last sampled; 1 where that is not known."""
    return 1.0 if is_policy_only(loaded) else float(loaded.state["agent"]["temperature"]["temperature"])


def save_policy(source: checkpoint.Checkpoint, destination: Path, *, metadata: dict[str, Any]) -> None:
    """Write the network of a checkpoint to a file of its own; `metadata` is added to that of the checkpoint."""
    state = {_NETWORK: dict(network_weights(source))}
    checkpoint.write(destination, state, metadata={**source.metadata, **metadata})
