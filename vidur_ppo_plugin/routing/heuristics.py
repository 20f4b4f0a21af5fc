"""Each heuristic as a pure function: snapshot and request in, a cost per replica out. The lowest cost wins.

They use only what a router can know. `choose` breaks ties fairly: at light load many replicas are equal, and
taking the first of them would send everything to replica 0.
"""

import random
from collections.abc import Sequence

import numpy as np

from . import compiled
from .delay_model import DelayModel
from .slowness import weigh_by_slowness
from .snapshot import CONTEXT_WEIGHT, REQUEST_WEIGHT, ClusterSnapshot, FloatArray, RequestInfo

_KERNEL = "vidur_ppo_plugin.routing.prior_kernel"


def least_outstanding(snapshot: ClusterSnapshot) -> FloatArray:
    """Requests in flight, waiting and running (what Vidur's `lor` should be: it counts waiting ones only)."""
    return snapshot.outstanding_requests


def power_of_two(snapshot: ClusterSnapshot, rng: random.Random) -> FloatArray:
    """Requests in flight of two replicas drawn at random; the others are out of the question.

    Mitzenmacher 2001, "The Power of Two Choices in Randomized Load Balancing".
    """
    candidates: Sequence[int] = range(snapshot.num_replicas)
    if snapshot.available is not None:
        candidates = snapshot.available.nonzero()[0].tolist()
    if len(candidates) <= 2:
        return snapshot.outstanding_requests
    drawn = rng.sample(candidates, 2)
    cost = np.full(snapshot.num_replicas, np.inf)
    cost[drawn] = snapshot.outstanding_requests[drawn]
    return cost


def least_kv(snapshot: ClusterSnapshot) -> FloatArray:
    """Share of the KV cache in use, counting the prompts still to prefill as if they were in it already.

    Waiting requests hold no blocks yet: without them a replica with a long queue would look empty.
    """
    claimed_blocks = snapshot.prefill_tokens / snapshot.kv_block_size
    cost: FloatArray = (snapshot.kv_blocks_used + claimed_blocks) / snapshot.kv_blocks_total
    return cost


def least_tokens(
    snapshot: ClusterSnapshot, *, context_weight: float = CONTEXT_WEIGHT, request_weight: float = REQUEST_WEIGHT
) -> FloatArray:
    """Prompt tokens still to prefill + 0.05 x tokens in context + 20 x requests in flight; hard to beat."""
    cost: FloatArray = (
        snapshot.prefill_tokens
        + context_weight * snapshot.context_tokens
        + request_weight * snapshot.outstanding_requests
    )
    return cost


def least_work(snapshot: ClusterSnapshot) -> FloatArray:
    """The score of `least_tokens`, times how slow a replica has been lately by the time between its tokens."""
    work = snapshot.token_load.copy()
    weigh = compiled.load(_KERNEL, "weigh")
    if weigh is not None:
        weigh(snapshot.token_time_s, snapshot.completion_rate_per_s, work)
    else:
        weigh_by_slowness(snapshot.token_time_s.tolist(), snapshot.completion_rate_per_s.tolist(), work)
    return work


def shortest_delay(snapshot: ClusterSnapshot, request: RequestInfo, *, delay_model: DelayModel) -> FloatArray:
    """Expected delay of this request on each replica, by the roofline and the replicas' speeds."""
    return delay_model.expected_delay_s(snapshot, request)


def size_split(
    snapshot: ClusterSnapshot,
    request: RequestInfo,
    *,
    threshold_tokens: int,
    num_long_replicas: int,
    context_weight: float = CONTEXT_WEIGHT,
    request_weight: float = REQUEST_WEIGHT,
) -> FloatArray:
    """`least_tokens` among the last replicas for prompts above the threshold, among the others for the rest.

    Size-interval task assignment (Harchol-Balter et al. 1999): short requests never wait behind long ones.
    """
    cost = least_tokens(snapshot, context_weight=context_weight, request_weight=request_weight)
    first_long = snapshot.num_replicas - num_long_replicas
    if request.prompt_tokens > threshold_tokens:
        cost[:first_long] = np.inf
    else:
        cost[first_long:] = np.inf
    return cost


def available_cost(cost: FloatArray, snapshot: ClusterSnapshot) -> FloatArray:
    """The cost with replicas that take no new requests out of the question.

    Where a heuristic rules all others out (its long replicas are drained), the fewest requests in flight decide.
    """
    if snapshot.available is None:
        return cost
    masked: FloatArray = np.where(snapshot.available, cost, np.inf)
    if np.isinf(masked).all():
        masked = np.where(snapshot.available, snapshot.outstanding_requests, np.inf)
    return masked


def choose(cost: FloatArray, rng: random.Random) -> int:
    """Index of the lowest cost; of several equal ones each is equally likely, by the given generator."""
    lowest = np.minimum.reduce(cost)
    best = (cost == lowest).nonzero()[0]
    return int(best[0] if len(best) == 1 else best[rng.randrange(len(best))])
