"""The flags that a checkpoint decides: features, network and prior, which it cannot be used without. Needs no torch."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from vidur_ppo_plugin.checkpoint import CheckpointError
from vidur_ppo_plugin.flags import PPOModularFlags, flag_name
from vidur_ppo_plugin.routing.features import FeatureTable


def checkpoint_flags(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `ppo_modular` with which a checkpoint was learned, from its metadata."""
    try:
        features, network = metadata["features"], metadata["network"]
        table = FeatureTable.of(features)
        scales = table.scales
        flags = {
            "max_queue_requests_per_replica": features["num_waiting_slots"],
            "trend_window": features["trend_window"],
            "request_scale": scales.requests,
            "token_scale": scales.tokens,
            "time_scale_s": scales.seconds,
            "feature_projection_dim": network["feature_projection_dim"],
            "hidden_size": network["hidden_size"],
            "critic_gru_layers": network["critic_gru_layers"],
            "attention_heads": network["attention_heads"],
            "enable_decoupled_ac": network["decoupled"],
            "enable_flat_network": network["flat_replicas"] > 0,
            "prior": metadata["prior"],
            "prior_weight": metadata["prior_weight"],
        }
        known_hash = metadata["feature_hash"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"its metadata is not that of a policy: {error!r}") from error
    if table.hash != known_hash:
        raise CheckpointError(
            f"it was learned with other features (feature_hash {known_hash}) than this version computes ({table.hash})"
        )
    return flags


def adopt_flags(flags: PPOModularFlags, metadata: Mapping[str, Any], *, given: Collection[str] = ()) -> None:
    """Set the flags that a checkpoint decides; CheckpointError if one was given and says something else.

    `given`: names that were on the command line. Without one, a flag counts as given if it is not at its default.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(PPOModularFlags)}
    for name, value in checkpoint_flags(metadata).items():
        own = getattr(flags, name)
        if own != value and (name in given or own != defaults[name]):
            raise CheckpointError(
                f"{flag_name(type(flags), name)} is {own!r}, but the checkpoint {flags.load_checkpoint} was learned "
                f"with {value!r}: leave the flag out"
            )
        setattr(flags, name, value)
