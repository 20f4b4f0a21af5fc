"""The protocol of a cluster: it stops at every request that has to be placed, and goes on once it is told the replica.

Vidur, its twin and real replicas differ in what happens between two requests; nobody downstream can tell them apart.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo


class Completion(NamedTuple):
    """What happened to a request, known by its number in the cluster."""

    completed_at_s: float
    request: int
    replica: int
    arrived_at_s: float
    first_token_at_s: float
    num_restarts: int
    decode_tokens: int

    @property
    def latency_s(self) -> float:
        """From arrival to the last token."""
        return self.completed_at_s - self.arrived_at_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_at_s - self.arrived_at_s


class Cluster(Protocol):
    """A run of some requests: `next_request`, look at it, `place` it, and again."""

    #: The moment of the decision; at the end, that of the last completion.
    now_s: float

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its number. None if there is none to place."""

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""

    def lengths(self) -> tuple[int, int]:
        """Prompt and output tokens of the request to place. Privileged: the output is for credit, not to decide by."""

    def marginal_delay(
        self, replicas: NDArray[np.intp] | None = None, *, latency_power: float = 1.0, backlog_weight: float = 0.0
    ) -> FloatArray:
        """What placing the request on each of these replicas (all unless given) adds to everybody's latency.

        Privileged: it knows true output lengths. For training credit and for bounds, never for a decision.
        """

    def place(self, replica: int) -> None:
        """Send the request to a replica."""

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""

    @property
    def batch_counts(self) -> tuple[int, int]:
        """Batches that have ended and the requests in them, on all replicas; zeros where nobody counts."""
