"""What a router can know when it places a request: `RequestInfo` and `ClusterSnapshot`.

Whoever fills them (Vidur, the twin, real replicas) is a `ReplicaSource`; nobody downstream can tell them apart.
All per-replica figures live in one matrix, so that taking a snapshot costs one small copy.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# The rows of the matrix, in order. Each is an attribute of ClusterSnapshot, documented there.
ROWS = (
    "outstanding_requests",
    "running_requests",
    "prefill_tokens",
    "context_tokens",
    "kv_blocks_used",
    "kv_blocks_total",
    "oldest_wait_s",
    "speed_factor",
    "cached_prompt_tokens",
)
ROW = {name: index for index, name in enumerate(ROWS)}


@dataclass(frozen=True)
class RequestInfo:
    """The request to place: its prompt length is known, its output length is not."""

    prompt_tokens: int
    arrived_at_s: float


class ClusterSnapshot:
    """The replicas as the router sees them at one moment; every figure is an array with one entry a replica."""

    __slots__ = ("expected_decode_tokens", "kv_block_size", "now_s", "values")

    def __init__(
        self, now_s: float, values: FloatArray, *, kv_block_size: int, expected_decode_tokens: float
    ) -> None:
        self.now_s = now_s
        self.values = values
        #: Tokens that fit into one KV-cache block.
        self.kv_block_size = kv_block_size
        #: Mean output length of the requests that have finished, or the initial guess before any has.
        self.expected_decode_tokens = expected_decode_tokens

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(self.values.shape[1])

    @property
    def outstanding_requests(self) -> FloatArray:
        """Requests sent there and not finished: waiting and running."""
        return self.values[0]

    @property
    def running_requests(self) -> FloatArray:
        """Requests that the replica has admitted (they hold KV blocks)."""
        return self.values[1]

    @property
    def waiting_requests(self) -> FloatArray:
        """Requests sent there and not admitted yet."""
        return self.values[0] - self.values[1]

    @property
    def prefill_tokens(self) -> FloatArray:
        """Prompt tokens still to prefill, of waiting and running requests."""
        return self.values[2]

    @property
    def context_tokens(self) -> FloatArray:
        """Tokens in the context of running requests: prompt tokens prefilled and tokens generated."""
        return self.values[3]

    @property
    def kv_blocks_used(self) -> FloatArray:
        """KV-cache blocks in use."""
        return self.values[4]

    @property
    def kv_blocks_total(self) -> FloatArray:
        """KV-cache blocks that the replica has."""
        return self.values[5]

    @property
    def oldest_wait_s(self) -> FloatArray:
        """Seconds since the arrival of the request at the head of the waiting queue; 0 without one."""
        return self.values[6]

    @property
    def speed_factor(self) -> FloatArray:
        """Speed of the replica relative to its device's nominal speed."""
        return self.values[7]

    @property
    def cached_prompt_tokens(self) -> FloatArray:
        """Tokens of this request's prompt already cached there (0 as long as no source knows sessions)."""
        return self.values[8]


class ReplicaSource(Protocol):
    """Fills snapshots; told of every dispatch so that the next decision sees the effect of this one."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """The cluster as of `now_s`."""
