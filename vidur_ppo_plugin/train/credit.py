"""What placing a request on each replica adds to everybody's remaining time: to learn from, never to decide by."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from vidur_ppo_plugin.learn.credit_weights import CreditWeights
from vidur_ppo_plugin.routing.marginal_delay import ClusterWork, marginal_delay
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.layout import OUTSTANDING, IntArray
from vidur_ppo_plugin.twin.machine import Machine

from .clusters import Cluster
from .work_kernel import increase_all, read_work


class AnalyticCredit:
    """By the linear model of `routing.marginal_delay`, as `ppo_modular` learns inside Vidur."""

    def __init__(self, cluster: Cluster, weights: Sequence[CreditWeights]) -> None:
        """`weights`: those of each cluster, of which all have the replicas of `cluster`."""
        self._speeds = np.array(cluster.twin.speed_factors)
        self._cost = cluster.drain_cost
        self._weights = weights
        self._backlog_weights = np.array([one.backlog_weight for one in weights], np.float64)

    def __call__(
        self, machine: Machine, arrived_at_s: FloatArray, prompt_tokens: IntArray, decode_tokens: IntArray
    ) -> FloatArray:
        """[clusters, replicas]: the rewards of the next request of each cluster; all must have been brought there."""
        if all(one.latency_power == 1.0 for one in self._weights):
            return self._of_all(machine, prompt_tokens, decode_tokens)
        requests = zip(arrived_at_s.tolist(), prompt_tokens.tolist(), decode_tokens.tolist(), strict=True)
        rewards: FloatArray = -np.stack(
            [
                marginal_delay(
                    work_of(machine, now_s, number),
                    prompt_tokens=prompt,
                    decode_tokens=decode - 1,  # the end of prefill yields the first token
                    speed=self._speeds,
                    cost=self._cost,
                    **asdict(self._weights[number]),
                )
                for number, (now_s, prompt, decode) in enumerate(requests)
            ]
        )
        return rewards

    def _of_all(self, machine: Machine, prompt_tokens: IntArray, decode_tokens: IntArray) -> FloatArray:
        """The same in one compiled pass."""
        cost, increases = self._cost, np.empty((len(prompt_tokens), machine.num_replicas))
        increase_all(
            machine.rules,
            machine.state.cells,
            machine.state.floats,
            prompt_tokens,
            decode_tokens,
            self._speeds,
            self._backlog_weights,
            cost.prefill_s_per_token,
            cost.iteration_s,
            cost.iteration_s_per_request,
            cost.iteration_s_per_context_token,
            float(cost.prefill_chunk_tokens),
            increases,
        )
        return -increases


def exact_options(weights: Sequence[CreditWeights], *, horizon_s: float) -> dict[str, Any]:
    """The options of `marginal_delay` of clusters in step, which roll forward with and without the request."""
    names = (item.name for item in fields(CreditWeights))
    return {name: np.array([getattr(one, name) for one in weights], np.float64) for name in names} | {
        "horizon_s": horizon_s or math.inf
    }


def work_of(machine: Machine, now_s: float, cluster: int = 0) -> ClusterWork:
    """A cluster's requests in flight, in the order of their dispatch; it must have been brought to `now_s`."""
    first = cluster * machine.num_replicas
    rows = slice(first, first + machine.num_replicas)
    cells, floats = machine.state.cells[rows], machine.state.floats[rows]
    counts = cells[:, OUTSTANDING].astype(np.intp)
    columns = np.empty((4, int(counts.sum())))
    read_work(machine.rules, cells, floats, now_s, columns)
    prefill_tokens, decode_tokens, context_tokens, ages_s = columns
    return ClusterWork(
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        context_tokens=context_tokens,
        ages_s=ages_s,
        counts=counts,
    )
