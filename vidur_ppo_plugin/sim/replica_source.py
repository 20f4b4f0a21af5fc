"""Fills `ClusterSnapshot`s from a live Vidur simulation, at a cost that does not grow with the requests in flight.

Counters are kept up to date by hooks on each replica scheduler instance:
- `on_schedule` admits requests and preempts them (Vidur does both there, not in `on_batch_end`);
- `free` is called exactly once for every completion and every preemption;
- `on_batch_end` makes progress: prompt tokens prefilled, tokens generated.

They run for each batch, ten times as often as decisions are made. So they do little: what can be read off a replica
scheduler at any time (who waits, who holds blocks) is read when a snapshot is taken, of the replicas that moved since
the last. Single numbers are written through a memoryview, three times as fast as through the array that it shows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from vidur.entities import Batch

from vidur_ppo_plugin.learn.credit.analytic import ClusterWork
from vidur_ppo_plugin.routing.averages import (
    Arrivals,
    bring_to_now,
    counted_rate,
    mean_output,
    moved_average,
    updated_typical_prompt,
)
from vidur_ppo_plugin.routing.compiled import compiled
from vidur_ppo_plugin.routing.snapshot import (
    ROW,
    ROWS,
    ClusterSnapshot,
    FloatArray,
    RequestInfo,
)

_OUTSTANDING = ROW["outstanding_requests"]
_RUNNING = ROW["running_requests"]
_PREFILL = ROW["prefill_tokens"]
_CONTEXT = ROW["context_tokens"]
_KV_USED = ROW["kv_blocks_used"]
_KV_TOTAL = ROW["kv_blocks_total"]
_OLDEST = ROW["oldest_wait_s"]
_DECODED = ROW["decoded_tokens"]
_LATENCY = ROW["recent_latency_s"]
_RATE = ROW["completion_rate_per_s"]
_TOKEN_TIME = ROW["token_time_s"]
_TYPICAL = ROW["typical_prompt_tokens"]
_SPEED = ROW["speed_factor"]

_bring_to_now_compiled = compiled(bring_to_now)
# In larger fleets it is compiled in any case: the decisions of a run would otherwise take longer than to import numba.
_MOST_PLAIN = 16


class VidurReplicaSource:
    """A `ReplicaSource` over Vidur's replica schedulers, in the order given."""

    def __init__(
        self,
        replica_schedulers: Sequence[Any],
        *,
        speed_factors: Sequence[float],
        initial_decode_tokens: float = 128.0,
        num_waiting_slots: int = 0,
        on_completion: Callable[[int, Any, int], None] | None = None,
        is_compiled: bool = False,
    ) -> None:
        """`num_waiting_slots`: how many waiting requests of each replica a snapshot shows one by one.

        `is_compiled`: use numba, which takes a third of a second to import, also for few replicas.
        `on_completion(replica index, request, output tokens)` is called at each completion.
        """
        self.num_replicas = len(replica_schedulers)
        self._schedulers = list(replica_schedulers)
        self._admitted = [_admitted_requests(scheduler) for scheduler in self._schedulers]
        self._counters = np.zeros((len(ROWS), self.num_replicas))
        # The same numbers; row r of replica i is at r * num_replicas + i.
        self._cells = _cells(self._counters)
        # Replicas whose occupancy and queue may have changed since they were last read.
        self._moved: set[int] = set()
        self._counters[_SPEED] = speed_factors
        self._counters[_KV_TOTAL] = [_kv_blocks_total(scheduler) for scheduler in self._schedulers]
        self._kv_block_size = int(self._schedulers[0]._cache_config.block_size)
        # Requests in flight of each replica: id -> (request, its prompt length; a preemption rewrites Vidur's).
        self._in_flight: list[dict[int, tuple[Any, int]]] = [{} for _ in self._schedulers]
        self._initial_decode_tokens = initial_decode_tokens
        self._finished_requests = 0
        self._finished_decode_tokens = 0
        self._on_completion = on_completion
        is_compiled |= self.num_replicas > _MOST_PLAIN
        self._bring_to_now = _bring_to_now_compiled if is_compiled else bring_to_now
        #: Batches that have ended, and the requests in them, on all replicas.
        self.num_batches = 0
        self.num_batched_requests = 0
        self._num_waiting_slots = num_waiting_slots
        # At least the oldest request is kept, for its age.
        self._num_heads = max(1, num_waiting_slots)
        # Rows as in ClusterSnapshot.waiting, but with arrival times for ages: infinite where nobody waits, so that the
        # age is negative there and cut off at 0.
        self._waiting = np.zeros((2 * self._num_heads, self.num_replicas))
        self._waiting[self._num_heads :] = np.inf
        self._waiting_cells = _cells(self._waiting)
        self._num_shown = [0] * self.num_replicas
        self._rate_updated_s = np.zeros(self.num_replicas)
        self._rate_updated_cells = _cells(self._rate_updated_s)
        self._arrivals = Arrivals()
        for index, scheduler in enumerate(self._schedulers):
            self._hook(index, scheduler)

    @property
    def expected_decode_tokens(self) -> float:
        """Mean output length of the finished requests, or the initial guess before any has finished."""
        return mean_output(self._finished_requests, self._finished_decode_tokens, self._initial_decode_tokens)

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """The cluster as of `now_s`."""
        for index in self._moved:
            self._read_occupancy(index)
        self._moved.clear()
        values, waiting = self._counters.copy(), self._waiting.copy()
        self._bring_to_now(values, waiting, self._rate_updated_s, now_s)
        return ClusterSnapshot(
            now_s,
            values,
            kv_block_size=self._kv_block_size,
            expected_decode_tokens=self.expected_decode_tokens,
            waiting=waiting if self._num_waiting_slots else None,
        )

    def request_info(self, request: Any) -> RequestInfo:
        """What a router knows of a request that arrives now; call it once for each request, in order."""
        return self._arrivals.request_info(request.num_prefill_tokens, request.arrived_at)

    def work_left(self, indices: Iterable[int], now_s: float) -> ClusterWork:
        """What some replicas have still to do, by true output lengths: for training credit, never for decisions."""
        rows: list[float] = []
        counts: list[int] = []
        for index in indices:
            in_flight = self._in_flight[index]
            for request, _ in in_flight.values():  # in order of dispatch
                done = request._num_processed_tokens
                if request._is_prefill_complete:
                    left = request._num_prefill_tokens + request._num_decode_tokens - done
                    rows += (0, left, done, now_s - request._arrived_at)
                else:  # the end of prefill yields the first token
                    left = request._num_decode_tokens - 1
                    rows += (request._num_prefill_tokens - done, left, done, now_s - request._arrived_at)
            counts.append(len(in_flight))
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T.copy()
        return ClusterWork(
            prefill_tokens=columns[0],
            decode_tokens=columns[1],
            context_tokens=columns[2],
            ages_s=columns[3],
            counts=np.array(counts, dtype=np.intp),
        )

    def on_dispatch(self, index: int, request: Any) -> None:
        """Count a request that was just sent to a replica (Vidur hands it over only after the last decision)."""
        if index in self._moved:
            self._moved.remove(index)
            self._read_occupancy(index)
        cells, size = self._cells, self.num_replicas
        prompt_tokens = request.num_prefill_tokens
        slot = self._num_shown[index]
        if slot < self._num_heads:
            self._show(index, slot, prompt_tokens, request.arrived_at)
            self._num_shown[index] = slot + 1
        cells[_OUTSTANDING * size + index] += 1
        cells[_PREFILL * size + index] += prompt_tokens
        cells[_TYPICAL * size + index] = updated_typical_prompt(cells[_TYPICAL * size + index], prompt_tokens)
        self._in_flight[index][request.id] = (request, prompt_tokens)

    def _hook(self, index: int, scheduler: Any) -> None:
        """Wrap the three methods on the instance; other simulations in this process are not touched."""
        on_schedule, free, on_batch_end = scheduler.on_schedule, scheduler.free, scheduler.on_batch_end
        has_moved = self._moved.add

        def hooked_on_schedule(time: float) -> Any:
            has_moved(index)
            return on_schedule(time)

        def hooked_free(*request_ids: int) -> None:
            free(*request_ids)
            for request_id in request_ids:
                self._on_free(index, request_id)

        def hooked_on_batch_end(batch: Any) -> None:
            has_moved(index)
            on_batch_end(batch)
            self._on_progress(index, batch)

        scheduler.on_schedule = hooked_on_schedule
        scheduler.free = hooked_free
        scheduler.on_batch_end = hooked_on_batch_end

    def _read_occupancy(self, index: int) -> None:
        cells, size, scheduler = self._cells, self.num_replicas, self._schedulers[index]
        cells[_RUNNING * size + index] = self._admitted[index]()
        cells[_KV_USED * size + index] = scheduler.num_allocated_blocks
        queue, num_shown = scheduler._request_queue, self._num_shown[index]
        if not queue and not num_shown:
            return
        heads = queue[: self._num_heads]
        for slot, head in enumerate(heads):
            # The mnemosyne family queues (priority, request) pairs.
            request = head[1] if type(head) is tuple else head
            self._show(index, slot, request._num_prefill_tokens, request._arrived_at)
        for slot in range(len(heads), num_shown):
            self._show(index, slot, 0.0, math.inf)
        self._num_shown[index] = len(heads)

    def _show(self, index: int, slot: int, prompt_tokens: float, arrived_at_s: float) -> None:
        cells, first = self._waiting_cells, slot * self.num_replicas + index
        cells[first] = prompt_tokens
        cells[first + self._num_heads * self.num_replicas] = arrived_at_s

    def _on_free(self, index: int, request_id: int) -> None:
        in_flight = self._in_flight[index]
        request, prompt_tokens = in_flight[request_id]
        cells, size = self._cells, self.num_replicas
        if request._completed:
            del in_flight[request_id]
            cells[_OUTSTANDING * size + index] -= 1
            cells[_CONTEXT * size + index] -= request._num_processed_tokens
            self._on_completed(index, request, request.total_tokens - prompt_tokens)
            return
        # Preempted: its progress is lost, and Vidur has already forgotten how much that was. Rare: count anew.
        cells[_PREFILL * size + index] = sum(
            request._num_prefill_tokens - request._num_processed_tokens
            for request, _ in in_flight.values()
            if not request._is_prefill_complete
        )
        cells[_CONTEXT * size + index] = sum(request._num_processed_tokens for request, _ in in_flight.values())

    def _on_completed(self, index: int, request: Any, decode_tokens: int) -> None:
        cells, size, now_s = self._cells, self.num_replicas, request._completed_at
        cells[_DECODED * size + index] -= decode_tokens
        self._finished_requests += 1
        self._finished_decode_tokens += decode_tokens
        latency, token_time, rate = _LATENCY * size + index, _TOKEN_TIME * size + index, _RATE * size + index
        cells[latency] = moved_average(cells[latency], now_s - request._arrived_at)
        if decode_tokens > 1:
            token_s = (now_s - request._prefill_completed_at) / (decode_tokens - 1)
            cells[token_time] = moved_average(cells[token_time], token_s)
        cells[rate] = counted_rate(cells[rate], self._rate_updated_cells[index], now_s)
        self._rate_updated_cells[index] = now_s
        if self._on_completion is not None:
            self._on_completion(index, request, decode_tokens)

    def _on_progress(self, index: int, batch: Any) -> None:
        """Add a finished batch's tokens: one each for decodes, a chunk for each prefill."""
        requests = batch._requests
        self.num_batches += 1
        self.num_batched_requests += len(requests)
        if type(batch) is not Batch:
            sub_batches = batch.batch_mapping
            if len(sub_batches) > 1:
                self._count_kv_parallel_batch(index, batch)
                return
            (batch,) = sub_batches.values()
        cells, size = self._cells, self.num_replicas
        new_context = batch._total_num_q_tokens
        prefilled = batch._num_prefill_tokens
        if prefilled:
            cells[_PREFILL * size + index] -= prefilled
            # Whoever does not prefill decodes one token.
            new_context += _first_tokens(requests, len(requests) - (new_context - prefilled))
        cells[_CONTEXT * size + index] += new_context
        cells[_DECODED * size + index] += new_context - prefilled

    def _count_kv_parallel_batch(self, index: int, batch: Any) -> None:
        """Count a batch where KV caches span groups: a request is in several sub-batches and counts once."""
        tokens = batch._req_num_q_token_map
        prefilled = sum(
            tokens[request.id]
            for request in batch._requests
            if not request._is_prefill_complete or _is_first_token(request)
        )
        cells, size = self._cells, self.num_replicas
        cells[_PREFILL * size + index] -= prefilled
        new_context = sum(tokens.values()) + _first_tokens(batch._requests, len(batch._requests))
        cells[_CONTEXT * size + index] += new_context
        cells[_DECODED * size + index] += new_context - prefilled


def _cells(matrix: FloatArray) -> "memoryview[float]":
    """The numbers of a contiguous array one after the other, to read and write singly."""
    return memoryview(matrix.reshape(-1))  # type: ignore[arg-type]


def _is_first_token(request: Any) -> bool:
    """Whether the batch that just ended finished the request's prefill.

    Vidur then counts the first output token as processed; a decode in the same batch is at least one further.
    """
    return bool(request._is_prefill_complete and request._num_processed_tokens == request._num_prefill_tokens + 1)


def _first_tokens(requests: Sequence[Any], num_prefills: int) -> int:
    """How many of the `num_prefills` requests that the batch prefilled got their first token.

    This runs for most batches: prefills are usually the last requests of a batch, so it ends early.
    """
    count = 0
    for request in reversed(requests):
        if not request._is_prefill_complete:
            num_prefills -= 1
        elif request._num_processed_tokens == request._num_prefill_tokens + 1:  # as in _is_first_token
            num_prefills -= 1
            count += 1
        if num_prefills <= 0:
            break
    return count


def _admitted_requests(scheduler: Any) -> Callable[[], int]:
    """A function that counts the requests holding KV blocks."""
    # The mnemosyne family keeps its own books, per group of the KV-parallel split.
    holders = getattr(scheduler, "_req_block_counter", scheduler._allocation_map)
    return holders.__len__  # type: ignore[no-any-return]


def _kv_blocks_total(scheduler: Any) -> int:
    return int(scheduler._cache_config.num_blocks * getattr(scheduler, "_kv_parallel_size", 1))
