"""Makes the twin of a Vidur cluster: its config, and its state in the middle of a run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from vidur.utils.memory_planner import MemoryPlanner

from vidur_ppo_plugin.flags import speed_factors
from vidur_ppo_plugin.twin import layout
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.layout import SCHEDULERS
from vidur_ppo_plugin.twin.twin import Twin

from .roofline_predictor import build_roofline
from .schedulers import prefill_chunk_size

# What a stage started last: the number of the start, the batch, and Vidur's record of the batch on this stage.
_Started = tuple[int, Any, Any]


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


class TwinFiller:
    """Puts a twin into the state of a live Vidur simulation, at a decision; what happens from there is the same.

    The end of a running batch is known to Vidur's event heap only, so each stage scheduler is hooked to tell when it
    starts one. What a snapshot averages over the past (latencies, rates, expected output) is not filled in.
    """

    def __init__(self, config: Any, replica_schedulers: Sequence[Any]) -> None:
        """To be built with the scheduler, before the simulation starts."""
        self.twin = Twin(twin_config(config))
        self._schedulers = list(replica_schedulers)
        self._started: list[list[_Started]] = []
        self._num_started = 0
        for scheduler in self._schedulers:
            stages = list(scheduler._replica_stage_schedulers.values())
            self._started.append([(0, None, None)] * len(stages))
            for number, stage in enumerate(stages):
                self._hook(stage, self._started[-1], number)

    def fill(self, now_s: float) -> Twin:
        """The twin at a decision at `now_s`, which the simulation is about to make; valid until the next call."""
        twin = self.twin
        rows = [_Row(twin.rules, *pair, now_s) for pair in zip(self._schedulers, self._started, strict=True)]
        width = max(len(row.cells) for row in rows) + layout.REQUEST_CELLS
        while twin.state.cells.shape[1] < width:
            twin.state = layout.grown(twin.rules, twin.state)
        layout.clear(twin.rules, twin.state)
        for into, row in zip(twin.state.cells, rows, strict=True):
            into[: len(row.cells)] = row.cells
            into[layout.FREE] = len(row.cells)
        twin.reset(now_s, num_submitted=1 + max((row.last_id for row in rows), default=-1))
        return twin

    def _hook(self, stage: Any, started: list[_Started], number: int) -> None:
        on_schedule = stage.on_schedule

        def hooked_on_schedule() -> Any:
            result = on_schedule()
            if result[0] is not None:
                self._num_started += 1
                started[number] = (self._num_started, result[0], result[1])
            return result

        stage.on_schedule = hooked_on_schedule


class _Row:
    """The cells of one replica, up to its last request."""

    def __init__(self, rules: layout.Rules, scheduler: Any, started: Sequence[_Started], now_s: float) -> None:
        self._rules = rules
        self._i = np.zeros(rules.requests, np.int64)
        self._f = self._i.view(np.float64)
        # Requests by id, in the order of their cells, and where those are; the place that follows another in a queue.
        self._requests: dict[int, Any] = {}
        self._places: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._fill_lists(scheduler)
        self._fill_batches(scheduler, started)
        self._fill_counters(scheduler, now_s)
        #: The highest id of a request, -1 without any.
        self.last_id = max(self._requests, default=-1)
        self.cells = np.concatenate((self._i, self._request_cells(scheduler)))

    def _place(self, request: Any) -> int:
        """Where the cells of a request are."""
        place = self._places.get(request.id)
        if place is None:
            place = self._rules.requests + layout.REQUEST_CELLS * len(self._places)
            self._places[request.id] = place
            self._requests[request.id] = request
        return place

    def _fill_lists(self, scheduler: Any) -> None:
        queue, partial = scheduler._request_queue, getattr(scheduler, "_partial_prefill_queue", [])
        if self._rules.scheduler == layout.FIXED_CHUNK:
            # Vidur's pairs of (arrival, id) and request, which it sorts when it next forms a batch.
            queue, partial = ([request for _, request in sorted(pairs, key=_first)] for pairs in (queue, partial))
        for head, requests in ((layout.QUEUE, queue), (layout.PARTIAL, partial)):
            places = [self._place(request) for request in requests]
            self._next.update(zip(places, [*places[1:], -1], strict=False))
            self._i[head], self._i[head + 1] = (places[0], places[-1]) if places else (-1, -1)
        idle = [self._place(request) for request in scheduler._preempted_requests]
        self._i[self._rules.idle : self._rules.idle + len(idle)] = idle
        self._i[layout.NUM_IDLE] = len(idle)

    def _fill_batches(self, scheduler: Any, started: Sequence[_Started]) -> None:
        """Batches in flight, the oldest first: of the last stage what runs there, then what waits there, and so on."""
        num_stages, batches = self._rules.num_stages, []
        stages = list(scheduler._replica_stage_schedulers.values())
        self._i[layout.RUNNING_STAGES] = scheduler._num_running_stages
        for number in reversed(range(num_stages)):
            stage, place = stages[number], layout.FIRST_STAGE + layout.STAGE_CELLS * number
            self._f[place + layout.END_S] = math.inf
            order, batch, batch_stage = started[number]
            is_ending = not stage._is_busy and _is_between_stages(batch, number, stages, started)
            if stage._is_busy or is_ending:
                batches.append(batch)
                self._f[place + layout.END_S] = batch_stage._scheduled_at + batch_stage.execution_time
                self._i[place + layout.END_ORDER] = order
                self._i[layout.SEQUENCE] = max(self._i[layout.SEQUENCE], order + 1)
            if is_ending and number == 0:
                self._i[layout.RUNNING_STAGES] += 1
            self._i[place + layout.NEXT_BATCH] = len(batches) % num_stages
            self._i[place + layout.NUM_WAITING] = len(stage._batch_queue)
            batches += stage._batch_queue
        self._i[layout.NEWEST_BATCH] = len(batches) % num_stages
        for number, batch in enumerate(batches):
            self._fill_batch(scheduler, number, batch)

    def _fill_batch(self, scheduler: Any, number: int, batch: Any) -> None:
        last_stage = self._rules.num_stages - 1
        place = self._rules.batches + self._rules.batch_cells * number
        predict = scheduler._execution_time_predictor.get_execution_time
        self._f[place + layout.MIDDLE_S] = predict(batch, 0).total_time
        self._f[place + layout.LAST_S] = predict(batch, last_stage).total_time
        (part,) = getattr(batch, "batch_mapping", {0: batch}).values()
        self._i[place + layout.SIZE] = len(part.requests)
        for request, tokens in zip(part.requests, part.num_q_tokens, strict=True):
            self._i[place + layout.BATCH_HEADER], self._i[place + layout.BATCH_HEADER + 1] = (
                self._place(request),
                tokens,
            )
            place += 2

    def _fill_counters(self, scheduler: Any, now_s: float) -> None:
        i, f, requests = self._i, self._f, self._requests.values()
        i[layout.KV_USED] = scheduler.num_allocated_blocks
        i[layout.ADMITTED] = len(_blocks_held(scheduler))
        i[layout.RUNNING_BATCHES] = scheduler._num_running_batches
        i[layout.OUTSTANDING] = len(requests)
        i[layout.CONTEXT_TOKENS] = sum(request._num_processed_tokens for request in requests)
        i[layout.PREFILL_TOKENS] = sum(
            request._num_prefill_tokens - request._num_processed_tokens
            for request in requests
            if not request._is_prefill_complete
        )
        f[layout.NOW] = f[layout.RATE_UPDATED] = now_s
        f[layout.TARGET] = f[layout.SUBMITTED] = -math.inf

    def _request_cells(self, scheduler: Any) -> layout.IntArray:
        held = _blocks_held(scheduler)
        cells = np.zeros((len(self._requests), layout.REQUEST_CELLS), np.int64)
        for row, request in zip(cells, self._requests.values(), strict=True):
            prefill_tokens = request._num_prefill_tokens
            row[: layout.ARRIVED] = (
                prefill_tokens,
                prefill_tokens + request._num_decode_tokens,
                request._num_processed_tokens,
                held.get(request.id, 0),
                request._num_restarts,
                self._next.get(self._places[request.id], -1),
                request.id,
                prefill_tokens,
                request._is_prefill_complete,
            )
            was_scheduled = request._scheduled or request._num_restarts > 0
            row.view(np.float64)[layout.ARRIVED :] = (
                request._arrived_at,
                request._scheduled_at if was_scheduled else math.nan,
                request._prefill_completed_at or math.nan,
            )
        return cells.reshape(-1)


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _blocks_held(scheduler: Any) -> Any:
    """Request id -> KV blocks; the mnemosyne family keeps its own books."""
    return getattr(scheduler, "_req_block_counter", scheduler._allocation_map)


def _is_between_stages(batch: Any, number: int, stages: Sequence[Any], started: Sequence[_Started]) -> bool:
    """Whether a batch has ended on a stage and nobody knows yet: that happened at this very moment.

    The twin then takes the stage for one that is about to end, which comes to the same.
    """
    later = range(number + 1, len(stages))
    has_moved_on = any(batch in stages[k]._batch_queue or started[k][1] is batch for k in later)
    return batch is not None and not batch._completed and not has_moved_on
