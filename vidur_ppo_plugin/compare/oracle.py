"""A bound on what a router can reach: it knows every output length and simulates each placement before it decides.

The request goes where it adds least to the sum of all latencies, as if nobody came after it, plus a term for those who
do come: the growth of (seconds of prefill) ** 2, which is how a queue's cost grows with its length (M/G/1). No real
router can know this. It is greedy, so it is a strong reference and not the optimum.
"""

import random

from vidur_ppo_plugin.clusters.cluster import Cluster
from vidur_ppo_plugin.routing.heuristics import available_cost, choose
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

#: Weight of that term; 0 starves long prompts and is unstable near saturation.
BACKLOG_WEIGHT = 3.0


class Oracle:
    """The router of one run of a cluster, which it asks what each placement would cost."""

    def __init__(self, cluster: Cluster, *, seed: int, backlog_weight: float = BACKLOG_WEIGHT) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._backlog_weight = backlog_weight

    def __call__(self, seen: ClusterSnapshot, request: RequestInfo) -> int:
        cost = self._cluster.marginal_delay(backlog_weight=self._backlog_weight)
        return choose(available_cost(cost, seen), self._rng)
