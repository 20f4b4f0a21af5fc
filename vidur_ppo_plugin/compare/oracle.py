"""A bound on what a router can reach: it knows every output length and simulates each placement before it decides.

The request goes where it adds least to the sum of all latencies, as if nobody came after it, plus a term for those who
do come: the growth of (seconds of prefill) ** 2, which is how a queue's cost grows with its length (M/G/1). No real
router can know this. It is greedy, so it is a strong reference and not the optimum.
"""

import random
import time

import numpy as np

from vidur_ppo_plugin.routing.heuristics import choose
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Completions, Twin, in_order
from vidur_ppo_plugin.workload.requests import Requests

#: Weight of that term; 0 starves long prompts and is unstable near saturation.
BACKLOG_WEIGHT = 3.0


def play_oracle(
    config: TwinConfig,
    requests: Requests,
    visibility: Visibility,
    *,
    seed: int,
    backlog_weight: float = BACKLOG_WEIGHT,
) -> tuple[Completions, float]:
    """What happened to each request, in their order, and the seconds spent deciding."""
    twin, rng, deciding_s = Twin(config), random.Random(seed), 0.0
    columns = (requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
    for arrived_at_s, prompt_tokens, decode_tokens in zip(*(column.tolist() for column in columns), strict=True):
        started_s = time.perf_counter()
        cost = twin.marginal_delay(arrived_at_s, prompt_tokens, decode_tokens, backlog_weight=backlog_weight)
        available = visibility.available(arrived_at_s, config.num_replicas)
        if available is not None:
            cost = np.where(available, cost, np.inf)
        replica = choose(cost, rng)
        deciding_s += time.perf_counter() - started_s
        twin.submit(replica, arrived_at_s, prompt_tokens, decode_tokens)
    twin.drain()
    return in_order(twin.completions()), deciding_s
