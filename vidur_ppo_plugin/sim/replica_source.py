"""Fills `ClusterSnapshot`s from a live Vidur simulation, at a cost that does not grow with the requests in flight.

Counters are kept up to date by hooks on each replica scheduler instance:
- `on_schedule` admits requests and preempts them (Vidur does both there, not in `on_batch_end`);
- `free` is called exactly once for every completion and every preemption;
- `on_batch_end` makes progress: prompt tokens prefilled, tokens generated.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo

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
_SPEED = ROW["speed_factor"]

# Weight of the newest latency in the moving average, and the time over which rates are averaged.
_LATENCY_WEIGHT = 0.1
_RATE_WINDOW_S = 10.0


class VidurReplicaSource:
    """A `ReplicaSource` over Vidur's replica schedulers, in the order given."""

    def __init__(
        self,
        replica_schedulers: Sequence[Any],
        *,
        speed_factors: Sequence[float],
        initial_decode_tokens: float = 128.0,
        num_waiting_slots: int = 0,
        on_completion: Callable[[int, Any], None] | None = None,
    ) -> None:
        """`num_waiting_slots`: how many waiting requests of each replica a snapshot shows one by one.

        `on_completion(replica index, request)` is called for each request that completes, at its completion.
        """
        self.num_replicas = len(replica_schedulers)
        self._schedulers = list(replica_schedulers)
        self._counters = np.zeros((len(ROWS), self.num_replicas))
        self._counters[_SPEED] = speed_factors
        self._counters[_KV_TOTAL] = [_kv_blocks_total(scheduler) for scheduler in self._schedulers]
        self._kv_block_size = int(self._schedulers[0]._cache_config.block_size)
        # Arrival time of the request at the head of each waiting queue; the row holds its age only in a snapshot.
        self._oldest_arrival_s = np.full(self.num_replicas, np.nan)
        # Requests in flight of each replica: id -> (request, its prompt length; a preemption rewrites Vidur's).
        self._in_flight: list[dict[int, tuple[Any, int]]] = [{} for _ in self._schedulers]
        self._initial_decode_tokens = initial_decode_tokens
        self._finished_requests = 0
        self._finished_decode_tokens = 0
        self._on_completion = on_completion
        #: Batches that have ended, and the requests in them, on all replicas.
        self.num_batches = 0
        self.num_batched_requests = 0
        self._num_waiting_slots = num_waiting_slots
        self._num_heads = max(1, num_waiting_slots)
        # Rows as in ClusterSnapshot.waiting, but with arrival times for ages.
        self._waiting = np.zeros((2 * num_waiting_slots, self.num_replicas))
        self._rate_updated_s = np.zeros(self.num_replicas)
        self._last_arrival_s: float | None = None
        self._arrival_rate_per_s = 0.0
        for index, scheduler in enumerate(self._schedulers):
            self._hook(index, scheduler)

    @property
    def expected_decode_tokens(self) -> float:
        """Mean output length of the finished requests, or the initial guess before any has finished."""
        if self._finished_requests == 0:
            return self._initial_decode_tokens
        return self._finished_decode_tokens / self._finished_requests

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """The cluster as of `now_s`."""
        values = self._counters.copy()
        ages = now_s - self._oldest_arrival_s
        np.nan_to_num(ages, copy=False, nan=0.0)
        values[_OLDEST] = ages
        values[_RATE] *= np.exp((self._rate_updated_s - now_s) / _RATE_WINDOW_S)
        waiting = self._waiting
        if self._num_waiting_slots:
            waiting = waiting.copy()
            slots = self._num_waiting_slots
            waiting[slots:] = np.where(waiting[:slots] > 0, now_s - waiting[slots:], 0.0)
        return ClusterSnapshot(
            now_s,
            values,
            kv_block_size=self._kv_block_size,
            expected_decode_tokens=self.expected_decode_tokens,
            waiting=waiting,
        )

    def request_info(self, request: Any) -> RequestInfo:
        """What a router knows of a request that arrives now; call it once for each request, in order."""
        now_s = request.arrived_at
        since_s = 0.0 if self._last_arrival_s is None else now_s - self._last_arrival_s
        self._arrival_rate_per_s *= math.exp(-since_s / _RATE_WINDOW_S)
        info = RequestInfo(request.num_prefill_tokens, now_s, since_s, self._arrival_rate_per_s)
        self._arrival_rate_per_s += 1.0 / _RATE_WINDOW_S
        self._last_arrival_s = now_s
        return info

    def requests_in_flight(self, index: int) -> list[Any]:
        """Vidur's requests in flight on a replica, in order of dispatch; for training credit, never for decisions."""
        return [request for request, _ in self._in_flight[index].values()]

    def on_dispatch(self, index: int, request: Any) -> None:
        """Count a request that was just sent to a replica (Vidur hands it over only after the last decision)."""
        counters = self._counters
        num_waiting = int(counters[_OUTSTANDING, index] - counters[_RUNNING, index])
        if num_waiting == 0:
            self._oldest_arrival_s[index] = request.arrived_at
        if num_waiting < self._num_waiting_slots:
            self._waiting[num_waiting, index] = request.num_prefill_tokens
            self._waiting[num_waiting + self._num_waiting_slots, index] = request.arrived_at
        counters[_OUTSTANDING, index] += 1
        counters[_PREFILL, index] += request.num_prefill_tokens
        self._in_flight[index][request.id] = (request, request.num_prefill_tokens)

    def _hook(self, index: int, scheduler: Any) -> None:
        """Wrap the three methods on the instance; other simulations in this process are not touched."""
        on_schedule, free, on_batch_end = scheduler.on_schedule, scheduler.free, scheduler.on_batch_end
        admitted = _admitted_requests(scheduler)

        def hooked_on_schedule(time: float) -> Any:
            batch = on_schedule(time)
            self._update_occupancy(index, scheduler, admitted)
            return batch

        def hooked_free(*request_ids: int) -> None:
            free(*request_ids)
            for request_id in request_ids:
                self._on_free(index, request_id)

        def hooked_on_batch_end(batch: Any) -> None:
            on_batch_end(batch)
            self._on_progress(index, batch)
            self._update_occupancy(index, scheduler, admitted)

        scheduler.on_schedule = hooked_on_schedule
        scheduler.free = hooked_free
        scheduler.on_batch_end = hooked_on_batch_end

    def _update_occupancy(self, index: int, scheduler: Any, admitted: Callable[[], int]) -> None:
        counters = self._counters
        counters[_RUNNING, index] = admitted()
        counters[_KV_USED, index] = scheduler.num_allocated_blocks
        # The mnemosyne family queues (priority, request) pairs.
        heads = [head[1] if type(head) is tuple else head for head in scheduler._request_queue[: self._num_heads]]
        self._oldest_arrival_s[index] = heads[0]._arrived_at if heads else np.nan
        slots = self._num_waiting_slots
        if slots:
            padding = [0.0] * (slots - len(heads))
            self._waiting[:slots, index] = [head._num_prefill_tokens for head in heads] + padding
            self._waiting[slots:, index] = [head._arrived_at for head in heads] + padding

    def _on_free(self, index: int, request_id: int) -> None:
        in_flight = self._in_flight[index]
        request, prompt_tokens = in_flight[request_id]
        if request._completed:
            del in_flight[request_id]
            self._counters[_OUTSTANDING, index] -= 1
            self._counters[_CONTEXT, index] -= request._num_processed_tokens
            self._on_completed(index, request, request.total_tokens - prompt_tokens)
            return
        # Preempted: its progress is lost, and Vidur has already forgotten how much that was. Rare: count anew.
        self._counters[_PREFILL, index] = sum(
            request._num_prefill_tokens - request._num_processed_tokens
            for request, _ in in_flight.values()
            if not request._is_prefill_complete
        )
        self._counters[_CONTEXT, index] = sum(request._num_processed_tokens for request, _ in in_flight.values())

    def _on_completed(self, index: int, request: Any, decode_tokens: int) -> None:
        counters, now_s = self._counters, request._completed_at
        counters[_DECODED, index] -= decode_tokens
        self._finished_requests += 1
        self._finished_decode_tokens += decode_tokens
        latency_s, mean_s = now_s - request._arrived_at, counters[_LATENCY, index]
        counters[_LATENCY, index] = mean_s + _LATENCY_WEIGHT * (latency_s - mean_s) if mean_s > 0 else latency_s
        decay = math.exp((self._rate_updated_s[index] - now_s) / _RATE_WINDOW_S)
        counters[_RATE, index] = counters[_RATE, index] * decay + 1.0 / _RATE_WINDOW_S
        self._rate_updated_s[index] = now_s
        if self._on_completion is not None:
            self._on_completion(index, request)

    def _on_progress(self, index: int, batch: Any) -> None:
        self.num_batches += 1
        self.num_batched_requests += len(batch._requests)
        sub_batches = getattr(batch, "batch_mapping", None)
        if sub_batches is None:
            self._count_batch(index, batch)
        elif len(sub_batches) == 1:
            self._count_batch(index, *sub_batches.values())
        else:
            self._count_kv_parallel_batch(index, batch)

    def _count_batch(self, index: int, batch: Any) -> None:
        """Add a finished batch's tokens: one each for decodes, a chunk for each prefill."""
        new_context = batch._total_num_q_tokens
        prefilled = batch._num_prefill_tokens
        if prefilled:
            self._counters[_PREFILL, index] -= prefilled
            new_context += _first_tokens(batch._requests)
        self._counters[_CONTEXT, index] += new_context
        self._counters[_DECODED, index] += new_context - prefilled

    def _count_kv_parallel_batch(self, index: int, batch: Any) -> None:
        """The same where a request's KV cache spans groups: it is in several sub-batches and counts once."""
        tokens = batch._req_num_q_token_map
        prefilled = sum(
            tokens[request.id]
            for request in batch._requests
            if not request._is_prefill_complete or _is_first_token(request)
        )
        self._counters[_PREFILL, index] -= prefilled
        new_context = sum(tokens.values()) + _first_tokens(batch._requests)
        self._counters[_CONTEXT, index] += new_context
        self._counters[_DECODED, index] += new_context - prefilled


def _is_first_token(request: Any) -> bool:
    """Whether the batch that just ended finished the request's prefill.

    Vidur then counts the first output token as processed; a decode in the same batch is at least one further.
    """
    return bool(request._is_prefill_complete and request._num_processed_tokens == request._num_prefill_tokens + 1)


def _first_tokens(requests: Sequence[Any]) -> int:
    return sum(1 for request in requests if _is_first_token(request))


def _admitted_requests(scheduler: Any) -> Callable[[], int]:
    """A function that counts the requests holding KV blocks."""
    # The mnemosyne family keeps its own books, per group of the KV-parallel split.
    holders = getattr(scheduler, "_req_block_counter", scheduler._allocation_map)
    return holders.__len__  # type: ignore[no-any-return]


def _kv_blocks_total(scheduler: Any) -> int:
    return int(scheduler._cache_config.num_blocks * getattr(scheduler, "_kv_parallel_size", 1))
