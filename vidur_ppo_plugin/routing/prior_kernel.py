"""The prior's logits as one compiled function; `prior.Prior` has the same in numpy."""

import math
from typing import Any

import numpy as np

from .compiled import compiled
from .slowness import weigh_by_slowness
from .snapshot import CONTEXT_WEIGHT, REQUEST_WEIGHT, ROW

# As in `prior.NAMES`.
NONE, LEAST_OUTSTANDING, LEAST_KV, LEAST_TOKENS, SHORTEST_DELAY, LOG_LEAST_TOKENS, LOG_LEAST_WORK = range(7)

_OUTSTANDING, _PREFILL, _CONTEXT = ROW["outstanding_requests"], ROW["prefill_tokens"], ROW["context_tokens"]
_KV_USED, _KV_TOTAL = ROW["kv_blocks_used"], ROW["kv_blocks_total"]
_SPEED, _CACHED = ROW["speed_factor"], ROW["cached_prompt_tokens"]
_TOKEN_TIME, _RATE = ROW["token_time_s"], ROW["completion_rate_per_s"]
_weigh_by_slowness = compiled(weigh_by_slowness)


def _weigh(token_time_s: Any, completion_rate_per_s: Any, costs: Any) -> None:
    _weigh_by_slowness(token_time_s, completion_rate_per_s, costs)


def _log_logits(behind: Any, weight: float, unit: float, logits: Any) -> None:
    for i in range(len(behind)):
        logits[i] = -weight * math.log1p(-behind[i] / unit)


#: For decisions that are made one by one: `slowness.weigh_by_slowness`, and logits of `Prior` on a logarithmic scale.
weigh = compiled(_weigh, keep=True)
log_logits = compiled(_log_logits, keep=True)


@compiled
def prior_logits(
    values: Any, expected_decode_tokens: float, kv_block_size: int, prompt_tokens: int, prior: Any, logits: Any
) -> None:
    """Write `Prior.logits` of a snapshot's figures; `prior`: `Prior.kernel_constants`."""
    kind, weight, unit, prefill_s, request_s, context_s = prior
    size = values.shape[1]
    costs = np.empty(size)
    for i in range(size):
        costs[i] = _cost(
            values, i, kind, prefill_s, request_s, context_s, expected_decode_tokens, kv_block_size, prompt_tokens
        )
    if kind == LOG_LEAST_WORK:
        _weigh_by_slowness(values[_TOKEN_TIME], values[_RATE], costs)
    lowest = costs.min()
    for i in range(size):
        if kind in (LOG_LEAST_TOKENS, LOG_LEAST_WORK):
            logits[i] = -weight * math.log1p(-(lowest - costs[i]) / unit)
        else:
            logits[i] = (lowest - costs[i]) * (weight / unit)


@compiled
def _cost(
    values: Any,
    i: int,
    kind: int,
    prefill_s: float,
    request_s: float,
    context_s: float,
    expected_decode_tokens: float,
    kv_block_size: int,
    prompt_tokens: int,
) -> float:
    """Of one replica: the operations of `heuristics`, in their order."""
    if kind == LEAST_OUTSTANDING:
        return values[_OUTSTANDING, i]  # type: ignore[no-any-return]
    if kind == LEAST_KV:
        return (values[_KV_USED, i] + values[_PREFILL, i] / kv_block_size) / values[_KV_TOTAL, i]  # type: ignore[no-any-return]
    if kind in (LEAST_TOKENS, LOG_LEAST_TOKENS, LOG_LEAST_WORK):
        return (  # type: ignore[no-any-return]
            values[_PREFILL, i] + CONTEXT_WEIGHT * values[_CONTEXT, i] + REQUEST_WEIGHT * values[_OUTSTANDING, i]
        )
    if kind == SHORTEST_DELAY:
        tokens = values[_PREFILL, i] + (prompt_tokens - values[_CACHED, i])
        iteration_s = (values[_OUTSTANDING, i] + 1.0) * request_s + (values[_CONTEXT, i] + tokens) * context_s
        return (tokens * prefill_s + expected_decode_tokens * iteration_s) / values[_SPEED, i]  # type: ignore[no-any-return]
    return 0.0
