"""What a router can know when it places a request: `RequestInfo` and `ClusterSnapshot`.

Whoever fills them (Vidur, the twin, real replicas) is a `ReplicaSource`; nobody downstream can tell them apart.
All per-replica figures live in one matrix, so that taking a snapshot costs one small copy.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .compiled import compilable

FloatArray = NDArray[np.float64]

# The rows of the matrix, in order: name, and what a router can know of each replica.
ROWS = {
    "outstanding_requests": "requests sent there and not finished, waiting or running",
    "running_requests": "requests that the replica has admitted (they hold KV blocks)",
    "prefill_tokens": "prompt tokens still to prefill, of waiting and running requests",
    "context_tokens": "tokens in the context of running requests: prompt tokens prefilled, tokens generated",
    "kv_blocks_used": "KV-cache blocks in use",
    "kv_blocks_total": "KV-cache blocks that the replica has",
    "oldest_wait_s": "seconds since the arrival of the request at the head of the waiting queue, 0 without one",
    "decoded_tokens": "tokens generated so far by the requests in flight",
    "recent_latency_s": "moving average of the latencies of requests completed there, 0 before the first",
    "completion_rate_per_s": "requests completed there per second, averaged over the last ten seconds or so",
    "token_time_s": "moving average of the time between tokens of requests completed there, 0 before the first",
    "typical_prompt_tokens": "mean length, weighted by tokens, of the last 65,536 prompt tokens or so sent there",
    "speed_factor": "speed relative to the device's nominal speed",
    "cached_prompt_tokens": "tokens of this request's prompt cached there (0 until a source knows sessions)",
}
ROW = {name: index for index, name in enumerate(ROWS)}
_OUTSTANDING, _PREFILL, _CONTEXT = ROW["outstanding_requests"], ROW["prefill_tokens"], ROW["context_tokens"]

# What a token in context and a request in flight weigh in `token_load`, in prompt tokens.
CONTEXT_WEIGHT = 0.05
REQUEST_WEIGHT = 20.0


@compilable
def token_load(values: Any, context_weight: float, request_weight: float) -> Any:
    """Work in prompt tokens: those still to prefill, tokens in context, requests in flight.

    Of all replicas, or of one if `values` is its column.
    """
    return values[_PREFILL] + context_weight * values[_CONTEXT] + request_weight * values[_OUTSTANDING]


@dataclass(frozen=True)
class RequestInfo:
    """The request to place: its prompt length is known, its output length is not."""

    prompt_tokens: int
    arrived_at_s: float
    #: Seconds since the arrival before, and arrivals per second, averaged over the last ten seconds or so.
    since_last_arrival_s: float = 0.0
    arrival_rate_per_s: float = 0.0


class ClusterSnapshot:
    """The replicas as the router sees them at one moment: for each of ROWS an array with one entry a replica."""

    outstanding_requests: FloatArray
    running_requests: FloatArray
    prefill_tokens: FloatArray
    context_tokens: FloatArray
    kv_blocks_used: FloatArray
    kv_blocks_total: FloatArray
    oldest_wait_s: FloatArray
    decoded_tokens: FloatArray
    recent_latency_s: FloatArray
    completion_rate_per_s: FloatArray
    token_time_s: FloatArray
    typical_prompt_tokens: FloatArray
    speed_factor: FloatArray
    cached_prompt_tokens: FloatArray

    __slots__ = (
        *ROWS,
        "available",
        "expected_decode_tokens",
        "kv_block_size",
        "now_s",
        "rows",
        "values",
        "waiting",
    )

    def __init__(
        self,
        now_s: float,
        values: FloatArray,
        *,
        kv_block_size: int,
        expected_decode_tokens: float,
        waiting: FloatArray | None = None,
    ) -> None:
        self.now_s = now_s
        self.values = values
        #: The rows of `values`: to index a tuple takes a fraction of what it takes to index an array.
        self.rows: tuple[FloatArray, ...] = tuple(values)
        #: Which replicas take new requests; None for all of them.
        self.available: NDArray[np.bool_] | None = None
        #: The first k waiting requests of each replica: [2k, replicas], k rows of prompt tokens, then k rows of ages
        #: in seconds; 0 where fewer are waiting.
        self.waiting: FloatArray = np.zeros((0, values.shape[1])) if waiting is None else waiting
        #: Tokens that fit into one KV-cache block.
        self.kv_block_size = kv_block_size
        #: Mean output length of the requests that have finished, or the initial guess before any has.
        self.expected_decode_tokens = expected_decode_tokens
        (
            self.outstanding_requests,
            self.running_requests,
            self.prefill_tokens,
            self.context_tokens,
            self.kv_blocks_used,
            self.kv_blocks_total,
            self.oldest_wait_s,
            self.decoded_tokens,
            self.recent_latency_s,
            self.completion_rate_per_s,
            self.token_time_s,
            self.typical_prompt_tokens,
            self.speed_factor,
            self.cached_prompt_tokens,
        ) = self.rows

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.outstanding_requests)

    @property
    def waiting_requests(self) -> FloatArray:
        """Requests sent there and not admitted yet."""
        return self.outstanding_requests - self.running_requests

    def showing(self, num_slots: int) -> "ClusterSnapshot":
        """This snapshot with so many waiting requests of each replica shown one by one; ValueError if it has fewer."""
        has = len(self.waiting) // 2
        if num_slots == has:
            return self
        if num_slots > has:
            raise ValueError(f"the snapshot shows {has} waiting requests of each replica, {num_slots} are wanted")
        shown = ClusterSnapshot(
            self.now_s,
            self.values,
            kv_block_size=self.kv_block_size,
            expected_decode_tokens=self.expected_decode_tokens,
            waiting=np.concatenate((self.waiting[:num_slots], self.waiting[has : has + num_slots])),
        )
        shown.available = self.available
        return shown

    @property
    def token_load(self) -> FloatArray:
        """The score of `heuristics.least_tokens` at its usual weights."""
        load: FloatArray = token_load(self.rows, CONTEXT_WEIGHT, REQUEST_WEIGHT)
        return load


class ReplicaSource(Protocol):
    """Fills snapshots; told of every dispatch so that the next decision sees the effect of this one."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """The cluster as of `now_s`."""
