"""Repairs of Vidur 0.0.26, applied in phase 2 of plugin loading and only then.

Each has a test that fails loudly once upstream no longer needs it. None changes the result of a run that works
without it; they make runs work, or come out the same in every process.
"""

from typing import Any

from vidur.entities import (
    Batch,
    BatchStage,
    Cluster,
    ExecutionTime,
    KVParallelBatch,
    KVParallelBatchStage,
    Replica,
    Request,
)
from vidur.scheduler.replica_scheduler.mnemosyne_base_replica_scheduler import MnemosyneBaseReplicaScheduler

_REPAIRED = "_repaired_by_vidur_ppo_plugin"


def apply() -> None:
    """Apply all repairs, once."""
    if hasattr(Request, _REPAIRED):
        return
    setattr(Request, _REPAIRED, True)
    repair_restart()
    repair_ids()
    repair_request_order(KVParallelBatch, "_batch_mapping")
    repair_request_order(KVParallelBatchStage, "_batch_stage_mapping")
    repair_kv_count()


def repair_restart() -> None:
    """Preemption under KV pressure ended every run with an AssertionError.

    `Request.restart` puts a request back to the start of its prefill, but leaves the pipeline-stage counters
    where they were: the next `on_batch_stage_end` counts beyond the request's end. It also takes the tokens
    processed so far for the new prompt. That is right for a decoding request, whose output so far is prefilled
    again; of a request preempted in the middle of its prefill it would turn the rest of the prompt into output.
    """
    stock_restart = Request.restart

    def restart(self: Any) -> None:
        prompt_tokens, decode_tokens = self._num_prefill_tokens, self._num_decode_tokens
        was_prefilling = not self._is_prefill_complete
        stock_restart(self)
        self._num_stage_processed_tokens = 0
        self._is_prefill_stage_complete = False
        if was_prefilling:
            self._num_prefill_tokens, self._num_decode_tokens = prompt_tokens, decode_tokens

    Request.restart = restart


def repair_ids() -> None:
    """A second simulation in one process had replicas 4 to 7, and round_robin failed on them.

    Ids are class-level counters that go on counting. A cluster is the first thing a simulation builds, so they
    start anew there. Event ids do not: they order events of equal time in simulations that may still be running.
    """
    stock_init = Cluster.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for entity in (
            Cluster, Replica, Request, Batch, BatchStage, KVParallelBatch, KVParallelBatchStage, ExecutionTime
        ):  # fmt: skip
            entity._id = -1
        stock_init(self, *args, **kwargs)

    Cluster.__init__ = __init__


def repair_request_order(batch_class: Any, mapping_name: str) -> None:
    """Requests of a KV-parallel batch came in the order of their memory addresses (`list(set(...))`).

    The order decides whom KV pressure preempts, so the same seed gave other results in another process.
    """
    stock_init = batch_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        parts = getattr(self, mapping_name).values()
        self._requests = list(dict.fromkeys(request for part in parts for request in part.requests))

    batch_class.__init__ = __init__


def repair_kv_count() -> None:
    """KV use of the default replica scheduler (the mnemosyne family) always read 0.

    Its `allocate` counts blocks per KV-parallel group and never updates the counter that is reported.
    """

    def num_allocated_blocks(self: Any) -> int:
        return sum(self._kvp_group_num_allocated_blocks)

    def memory_usage_percent(self: Any) -> float:
        total_blocks: int = self._cache_config.num_blocks * self._kv_parallel_size
        return 100 * num_allocated_blocks(self) / total_blocks

    MnemosyneBaseReplicaScheduler.num_allocated_blocks = property(num_allocated_blocks)
    MnemosyneBaseReplicaScheduler.memory_usage_percent = property(memory_usage_percent)
