"""A checkpoint's actor as a policy file: what a router needs to decide without torch, and without simulating."""

import contextlib
import os
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape

from .policy_checkpoint import network_weights, policy_temperature

SUFFIX = ".npz"
# What of a checkpoint's metadata belongs to the policy. `features` holds names, scales and windows.
_TAKEN_OVER = ("feature_hash", "features", "prior", "prior_weight", "num_updates", "num_decisions", "plugin_version")


class ExportError(ValueError):
    """A policy that cannot be exported; the message names the file and the reason."""


def export_policy(source: Path | str, destination: Path) -> dict[str, Any]:
    """Write the actor of a checkpoint (a file, a directory, or directory/name) to an .npz file; returns its metadata.

    The file appears whole or not at all; one that was there is replaced.
    """
    _check_destination(destination)
    loaded = checkpoint.load(source)
    network = _network(loaded)
    try:
        actor = Actor.from_network(network)
    except ValueError as error:
        raise ExportError(f"{loaded.path} cannot be exported: {error}") from error
    metadata = {key: loaded.metadata[key] for key in _TAKEN_OVER}
    metadata["temperature"] = policy_temperature(loaded)
    _save_atomically(actor, destination, metadata)
    return metadata


def _check_destination(destination: Path) -> None:
    if destination.is_dir():
        raise ExportError(f"{destination} is a directory: name a file, such as {destination / 'policy'}{SUFFIX}")
    if destination.suffix != SUFFIX:
        raise ExportError(f"{destination} must end in {SUFFIX}")
    if not destination.parent.is_dir():
        raise ExportError(f"{destination} cannot be written: there is no directory {destination.parent}")


def _network(loaded: checkpoint.Checkpoint) -> ActorCritic:
    """The network of a checkpoint of ppo_modular."""
    missing = [key for key in (*_TAKEN_OVER, "network") if key not in loaded.metadata]
    if missing:
        raise ExportError(f"{loaded.path} is no checkpoint of ppo_modular, or an older one: no {', '.join(missing)}")
    network = ActorCritic(NetworkShape(**loaded.metadata["network"]))
    network.load_state_dict(network_weights(loaded))
    return network


def _save_atomically(actor: Actor, destination: Path, metadata: dict[str, Any]) -> None:
    staging = destination.with_name(f".{destination.name}.tmp-{os.getpid()}")
    try:
        actor.save(staging, metadata)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staging, destination)
    except OSError as error:
        raise ExportError(f"{destination} was not written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()
