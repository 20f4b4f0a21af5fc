"""The roofline as a Vidur execution-time predictor: adapts Vidur's batches to `hardware.Roofline`."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from operator import sub
from typing import Any

from vidur._native.entities import ExecutionTime
from vidur.execution_time_predictor import BaseExecutionTimePredictor

from vidur_ppo_plugin.flags import validate
from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, ModelShape, Roofline


def build_roofline(replica_config: Any, predictor_config: Any) -> Roofline:
    """The roofline of the model, device and parallelism that a Vidur replica config describes.

    Of the flags that every Vidur predictor has, the host's share of an all-reduce counts here, as in Vidur's own.
    """
    model = replica_config.model_config
    tensor_parallel_size = replica_config.tensor_parallel_size
    skew_ms = predictor_config.nccl_cpu_skew_overhead_per_device_ms * tensor_parallel_size**1.25
    shape = ModelShape(
        name=replica_config.model_name,
        num_layers=model.num_layers,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        embedding_dim=model.embedding_dim,
        mlp_hidden_dim=model.mlp_hidden_dim,
        use_gated_mlp=model.use_gated_mlp,
        post_attn_norm=model.post_attn_norm,
    )
    return Roofline(
        shape,
        DEVICES[replica_config.device],
        NETWORKS[replica_config.network_device],
        tensor_parallel_size=tensor_parallel_size,
        num_pipeline_stages=replica_config.num_pipeline_stages,
        all_reduce_overhead_ms=predictor_config.nccl_cpu_launch_overhead_ms + skew_ms,
    )


class RooflineExecutionTimePredictor:
    """Offline predictor for every model, device, parallelism and replica scheduler that Vidur knows."""

    def __init__(self, predictor_config: Any, replica_config: Any, cache_config: Any) -> None:
        validate(predictor_config)
        self._config = predictor_config
        self._replica_config = replica_config
        self._block_size = cache_config.block_size
        self._cache_dir = predictor_config.cache_dir
        # Vidur's deadline schedulers write a file here, and expect the predictor to have made the directory.
        os.makedirs(self._cache_dir, exist_ok=True)
        self.roofline = build_roofline(replica_config, predictor_config)
        self._num_layers = replica_config.num_layers_per_pipeline_stage
        self._last_stage = replica_config.num_pipeline_stages - 1
        # The pattern repeats over the replicas; `sim/checks.py` sees to it that it fits.
        self._slowness = [1.0 / factor for factor in predictor_config.replica_speed_factors]

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> ExecutionTime:
        """Time of a batch on one pipeline stage; of a KV-parallel batch, that of its slowest group."""
        groups = getattr(batch, "batch_mapping", None)
        if groups is None:
            return self._execution_time(batch, pipeline_stage)
        times = [self._execution_time(group, pipeline_stage) for group in groups.values()]
        return times[0] if len(times) == 1 else max(times, key=_total_time)

    def _execution_time(self, batch: Any, pipeline_stage: int) -> ExecutionTime:
        roofline = self.roofline
        num_tokens = batch._total_num_q_tokens
        times = roofline.layer_times(num_tokens)
        prefill_ms, decode_ms = self._attention_ms(batch, num_tokens)
        all_reduce_ms = roofline.all_reduce_ms(num_tokens)
        send_recv_ms = 0.0 if pipeline_stage == self._last_stage else roofline.send_recv_ms(num_tokens)
        # A plain int where the deadline schedulers time a batch of no replica.
        replica_id = getattr(batch._replica_id, "id", batch._replica_id)
        slowness = self._slowness[replica_id % len(self._slowness)]
        (norm, pre_proj, rope, kv_save, post_proj, mlp_norm, up_proj, act, down_proj, add) = times
        if slowness == 1.0:
            return ExecutionTime(
                self._num_layers, rope, kv_save, decode_ms, prefill_ms, pre_proj, post_proj, up_proj,
                down_proj, act, norm, mlp_norm, add, all_reduce_ms, send_recv_ms,
            )  # fmt: skip
        return ExecutionTime(
            self._num_layers, rope * slowness, kv_save * slowness, decode_ms * slowness, prefill_ms * slowness,
            pre_proj * slowness, post_proj * slowness, up_proj * slowness, down_proj * slowness, act * slowness,
            norm * slowness, mlp_norm * slowness, add * slowness, all_reduce_ms * slowness,
            send_recv_ms * slowness,
        )  # fmt: skip

    def _attention_ms(self, batch: Any, num_tokens: int) -> tuple[float, float]:
        """(prefill, decode) attention per layer, whatever the replica scheduler means by `num_kv_tokens`."""
        q_tokens: Sequence[int] = batch._num_q_tokens
        kv_tokens: Sequence[int] = batch._num_kv_tokens
        # The mnemosyne family counts the tokens cached before this batch, the others include its own.
        counts_own = not batch._last_kvp_group_ids
        if num_tokens == len(q_tokens) == len(kv_tokens):
            context_tokens = batch._total_num_kv_tokens - (num_tokens if counts_own else 0)
            return 0.0, self.roofline.decode_attention_ms(num_tokens, context_tokens)
        if counts_own:
            cached = list(map(sub, kv_tokens, q_tokens))
            # Orca leaves new requests out of `num_kv_tokens`; they come last, with nothing cached.
            cached += [0] * (len(q_tokens) - len(cached))
            return self.roofline.attention_ms(q_tokens, cached)
        return self.roofline.attention_ms(q_tokens, kv_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Everything that a predicted time depends on; the deadline schedulers name their cache file by it."""
        roofline = self.roofline
        return {
            "model_provider": str(self._config.get_type()),
            "model": dataclasses.asdict(roofline.model),
            "device": dataclasses.asdict(roofline.device),
            "network": dataclasses.asdict(roofline.network),
            "tensor_parallel_size": roofline.tensor_parallel_size,
            "num_pipeline_stages": roofline.num_pipeline_stages,
            "all_reduce_overhead_ms": roofline.all_reduce_overhead_ms,
            "replica_speed_factors": list(self._config.replica_speed_factors),
            "block_size": self._block_size,
        }

    def get_hash(self) -> str:
        """Short digest of `to_dict`, as Vidur's own predictors have."""
        return hashlib.md5(str(self.to_dict()).encode()).hexdigest()[:8]


# Only `get_execution_time`, `to_dict` and the cache directory are ever used of a predictor; Vidur's abstract
# class wants a method for every single operation on top.
BaseExecutionTimePredictor.register(RooflineExecutionTimePredictor)


def _total_time(execution_time: ExecutionTime) -> float:
    return float(execution_time.total_time)
