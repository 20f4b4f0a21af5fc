"""The features of a small cluster in one compiled function; `features.FeatureTable` has the same in numpy."""

import math
from typing import Any

import numpy as np

from .compiled import compiled
from .snapshot import CONTEXT_WEIGHT, REQUEST_WEIGHT, ROW

_OUTSTANDING, _RUNNING = ROW["outstanding_requests"], ROW["running_requests"]
_PREFILL, _CONTEXT, _DECODED = ROW["prefill_tokens"], ROW["context_tokens"], ROW["decoded_tokens"]
_KV_USED, _KV_TOTAL, _OLDEST = ROW["kv_blocks_used"], ROW["kv_blocks_total"], ROW["oldest_wait_s"]
_LATENCY, _RATE = ROW["recent_latency_s"], ROW["completion_rate_per_s"]
_TOKEN_TIME, _TYPICAL = ROW["token_time_s"], ROW["typical_prompt_tokens"]
_CACHED = ROW["cached_prompt_tokens"]


def _observe(
    values: Any,
    waiting: Any,
    average: Any,
    last: Any,
    is_first: bool,
    trend_levels: Any,
    inverse_scales: Any,
    inverse_slot_scales: Any,
    ema_weight: float,
    prompt_tokens: float,
    request: Any,
    tail_preference: float,
) -> Any:
    """Features of replicas and of the request; advances `average` and `last`, or fills them if this is the first.

    `request` has the scaled figures of the request, whose logarithms come first in its vector.
    """
    size, num_levels, num_trends = values.shape[1], inverse_scales.size, trend_levels.size
    levels = np.empty((num_levels, size))
    for i in range(size):
        outstanding = values[_OUTSTANDING, i]
        levels[0, i] = outstanding - values[_RUNNING, i]
        levels[1, i] = values[_RUNNING, i]
        levels[2, i] = values[_PREFILL, i]
        levels[3, i] = values[_CONTEXT, i]
        levels[4, i] = values[_DECODED, i]
        levels[5, i] = values[_OLDEST, i]
        levels[6, i] = values[_LATENCY, i]
        levels[7, i] = values[_RATE, i]
        levels[8, i] = values[_PREFILL, i] + CONTEXT_WEIGHT * values[_CONTEXT, i] + REQUEST_WEIGHT * outstanding
        levels[9, i] = values[_KV_USED, i] / values[_KV_TOTAL, i]
        levels[10, i] = values[_TOKEN_TIME, i]
        levels[11, i] = values[_TYPICAL, i]
    num_slots = waiting.shape[0]
    replicas = np.empty((size, 2 * num_levels + 2 * num_trends + num_slots + 1), np.float32)
    for level in range(num_levels):
        total = 0.0
        for i in range(size):
            value = math.log1p(levels[level, i] * inverse_scales[level, 0])
            levels[level, i] = value
            total += value
        mean = total / size
        for i in range(size):
            replicas[i, level] = levels[level, i]
            replicas[i, num_levels + level] = levels[level, i] - mean
    for trend in range(num_trends):
        column = 2 * num_levels + trend
        for i in range(size):
            value = levels[trend_levels[trend], i]
            if is_first:
                average[trend, i] = last[trend, i] = value
            difference = value - average[trend, i]
            replicas[i, column] = difference
            replicas[i, column + num_trends] = value - last[trend, i]
            average[trend, i] += ema_weight * difference
            last[trend, i] = value
    column = 2 * num_levels + 2 * num_trends
    for i in range(size):
        for slot in range(num_slots):
            replicas[i, column + slot] = math.log1p(waiting[slot, i] * inverse_slot_scales[slot, 0])
        replicas[i, column + num_slots] = values[_CACHED, i] / prompt_tokens
    return replicas, _request_vector(request, levels[8], levels[0], tail_preference)


@compiled
def _request_vector(request: Any, loads: Any, waiting: Any, tail_preference: float) -> Any:
    size, num_figures = loads.size, len(request)
    vector = np.empty(num_figures + 6, np.float32)
    for index in range(num_figures):
        vector[index] = math.log1p(request[index])
    load = loads.sum() / size
    square = 0.0
    for i in range(size):
        square += (loads[i] - load) ** 2
    vector[num_figures] = load
    vector[num_figures + 1] = waiting.sum() / size
    vector[num_figures + 2] = math.sqrt(square / size)
    vector[num_figures + 3] = loads.max() - loads.min()
    vector[num_figures + 4] = math.log(size) / math.log(1024)
    vector[num_figures + 5] = tail_preference
    return vector


observe = compiled(_observe, keep=True)
