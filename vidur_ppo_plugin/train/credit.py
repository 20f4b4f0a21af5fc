"""What placing a request on each replica adds to everybody's remaining time: to learn from, never to decide by."""

import math
from collections.abc import Callable

import numpy as np

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.routing.marginal_delay import ClusterWork, marginal_delay
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.layout import OUTSTANDING
from vidur_ppo_plugin.twin.machine import Machine

from .clusters import Cluster
from .work_kernel import read_work

#: Reward of each replica for a request: moment, prompt tokens, output tokens.
Credit = Callable[[float, int, int], FloatArray]


def analytic_credit(work: Callable[[float], ClusterWork], cluster: Cluster, flags: PPOModularFlags) -> Credit:
    """By the linear model of `routing.marginal_delay`, as `ppo_modular` learns inside Vidur; `work` by the moment."""
    speeds = np.array(cluster.twin.speed_factors)

    def credit(now_s: float, prompt_tokens: int, decode_tokens: int) -> FloatArray:
        return -marginal_delay(
            work(now_s),
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens - 1,  # the end of prefill yields the first token
            speed=speeds,
            cost=cluster.drain_cost,
            latency_power=flags.latency_power,
            backlog_weight=flags.backlog_weight,
        )

    return credit


def exact_options(flags: PPOModularFlags, *, horizon_s: float) -> dict[str, float]:
    """The options of `marginal_delay` of a twin, which rolls forward with and without the request."""
    return {
        "latency_power": flags.latency_power,
        "backlog_weight": flags.backlog_weight,
        "horizon_s": horizon_s or math.inf,
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
