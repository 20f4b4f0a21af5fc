"""The linear model of what work costs on the replicas of a Vidur config."""

from typing import Any

from vidur_ppo_plugin.routing.delay_model import DelayModel

from .roofline_predictor import build_roofline

# Prefill chunk of replica schedulers that have no such flag (orca prefills whole prompts).
_DEFAULT_CHUNK_SIZE = 512


def prefill_chunk_size(config: Any) -> int:
    """Prompt tokens that the replica scheduler puts into one batch."""
    flags = config.cluster_config.replica_scheduler_config
    return int(getattr(flags, "chunk_size", None) or getattr(flags, "max_tokens_in_batch", None) or _DEFAULT_CHUNK_SIZE)


def build_delay_model(config: Any) -> DelayModel:
    """The delay model of a cluster's replicas, for the chunk size of its replica scheduler."""
    roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
    return DelayModel.from_roofline(roofline, prefill_chunk_size(config))
