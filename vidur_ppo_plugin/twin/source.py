"""A `ReplicaSource` over a twin: the same snapshots as `sim.replica_source` gives of the same history in Vidur."""

import copy

import numpy as np

from vidur_ppo_plugin.routing.averages import Arrivals, mean_output
from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo

from .twin import Twin


class TwinReplicaSource:
    """Shows a twin to a router, and tells the twin what the router decided."""

    def __init__(self, twin: Twin, *, initial_decode_tokens: float = 128.0, num_waiting_slots: int = 0) -> None:
        """`num_waiting_slots`: how many waiting requests of each replica a snapshot shows one by one."""
        self.twin = twin
        self._initial_decode_tokens = initial_decode_tokens
        self._num_waiting_slots = num_waiting_slots
        self._arrivals = Arrivals()

    def copy(self, twin: Twin) -> "TwinReplicaSource":
        """A source over a copy of this one's twin, which has seen the same arrivals and goes on by itself."""
        source = copy.copy(self)
        source.twin, source._arrivals = twin, copy.copy(self._arrivals)
        return source

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.twin.num_replicas

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """The cluster at a decision at `now_s`; brings the twin there."""
        values = np.empty((len(ROWS), self.num_replicas))
        waiting = np.empty((2 * self._num_waiting_slots, self.num_replicas))
        finished, decode_tokens = self.twin.observe(now_s, values, waiting)
        return ClusterSnapshot(
            now_s,
            values,
            kv_block_size=self.twin.config.block_size,
            expected_decode_tokens=mean_output(finished, decode_tokens, self._initial_decode_tokens),
            waiting=waiting,
        )

    def request_info(self, prompt_tokens: int, arrived_at_s: float) -> RequestInfo:
        """What a router knows of a request that arrives now; call it once for each request, in order."""
        return self._arrivals.request_info(prompt_tokens, arrived_at_s)
