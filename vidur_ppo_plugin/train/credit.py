"""What placing a request on each replica adds to everybody's remaining time: to learn from, never to decide by."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.routing.marginal_delay import ClusterWork, marginal_delay
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.twin.layout import OUTSTANDING
from vidur_ppo_plugin.twin.twin import Twin

from .clusters import Cluster
from .work_kernel import read_work

#: Reward of each replica for a request: moment, prompt tokens, output tokens.
Credit = Callable[[float, int, int], FloatArray]


def analytic_credit(twin: Twin, cluster: Cluster, flags: PPOModularFlags) -> Credit:
    """By the linear model of `routing.marginal_delay`, as `ppo_modular` learns inside Vidur."""
    speeds = np.array(twin.config.speed_factors)

    def credit(now_s: float, prompt_tokens: int, decode_tokens: int) -> FloatArray:
        return -marginal_delay(
            work_of(twin, now_s),
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens - 1,  # the end of prefill yields the first token
            speed=speeds,
            cost=cluster.drain_cost,
            latency_power=flags.latency_power,
            backlog_weight=flags.backlog_weight,
        )

    return credit


def exact_credit(twin: Twin, flags: PPOModularFlags, *, horizon_s: float) -> Credit:
    """By rolling the twin forward with and without the request; a horizon of 0 is none."""
    options: dict[str, Any] = {"latency_power": flags.latency_power, "backlog_weight": flags.backlog_weight}
    if horizon_s:
        options["horizon_s"] = horizon_s

    def credit(now_s: float, prompt_tokens: int, decode_tokens: int) -> FloatArray:
        return -twin.marginal_delay(now_s, prompt_tokens, decode_tokens, **options)

    return credit


def work_of(twin: Twin, now_s: float) -> ClusterWork:
    """The requests in flight, in the order of their dispatch; the twin must have been brought to `now_s`."""
    counts = twin.state.cells[:, OUTSTANDING].astype(np.intp)
    columns = np.empty((4, int(counts.sum())))
    read_work(twin.rules, twin.state.cells, twin.state.floats, now_s, columns)
    prefill_tokens, decode_tokens, context_tokens, ages_s = columns
    return ClusterWork(
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        context_tokens=context_tokens,
        ages_s=ages_s,
        counts=counts,
    )
