"""The twin of the cluster that a Vidur config describes."""

from typing import Any

from vidur.utils.memory_planner import MemoryPlanner

from vidur_ppo_plugin.flags import speed_factors
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.layout import SCHEDULERS

from .delay_model import prefill_chunk_size
from .roofline_predictor import build_roofline


def twin_config(config: Any) -> TwinConfig:
    """The twin of the cluster that a Vidur simulation config describes; ValueError naming what is not covered."""
    cluster, workload = config.cluster_config, config.request_generator_config
    replica, cache, flags = cluster.replica_config, cluster.cache_config, cluster.replica_scheduler_config
    _refuse_uncovered(config)
    # As in BaseReplicaScheduler.__init__, which writes the number of blocks into the config when it first runs.
    full_requests = int(MemoryPlanner(replica, cache).get_max_kv_cache_size_in_tokens() // workload.max_tokens)
    num_blocks = int(cache.num_blocks or workload.max_tokens // cache.block_size * full_requests)
    return TwinConfig(
        roofline=build_roofline(replica, config.execution_time_predictor_config),
        replica_scheduler=str(flags.get_type()),
        speed_factors=speed_factors(config.execution_time_predictor_config, cluster.num_replicas),
        block_size=cache.block_size,
        num_blocks=num_blocks,
        watermark_blocks=int(cache.watermark_blocks_fraction * num_blocks),
        batch_size_cap=flags.batch_size_cap,
        max_batch_tokens=prefill_chunk_size(config),
        max_request_tokens=workload.max_tokens,
        max_full_requests=full_requests,
    )


def _refuse_uncovered(config: Any) -> None:
    replica = config.cluster_config.replica_config
    scheduler = str(config.cluster_config.replica_scheduler_config.get_type())
    predictor = str(config.execution_time_predictor_config.get_type())
    if predictor != "roofline":
        raise ValueError(f"--execution_time_predictor_config_type must be roofline for the twin, got {predictor}")
    if scheduler not in SCHEDULERS:
        raise ValueError(
            f"--replica_scheduler_config_type must be one of {', '.join(SCHEDULERS)} for the twin, got {scheduler}"
        )
    if replica.enable_sequence_pipeline_parallel:
        raise ValueError("--replica_config_enable_sequence_pipeline_parallel is not covered by the twin")
    if replica.kv_parallel_size != 1:
        raise ValueError(f"--replica_config_kv_parallel_size must be 1 for the twin, got {replica.kv_parallel_size}")
