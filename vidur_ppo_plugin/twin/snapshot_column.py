"""A replica's column of a snapshot, read off its cells; `sim.replica_source` computes the same figures from Vidur."""

from typing import Any

from vidur_ppo_plugin.routing.averages import decayed_rate
from vidur_ppo_plugin.routing.snapshot import ROW

from .compiled import helper
from .layout import (
    ADMITTED,
    ARRIVED,
    COMPLETION_RATE,
    CONTEXT_TOKENS,
    DECODED_TOKENS,
    KV_USED,
    NEXT,
    OUTSTANDING,
    PREFILL,
    PREFILL_TOKENS,
    QUEUE,
    RATE_UPDATED,
    RECENT_LATENCY,
    TOKEN_TIME,
    TYPICAL_PROMPT,
)

_OUTSTANDING, _RUNNING = ROW["outstanding_requests"], ROW["running_requests"]
_PREFILL, _CONTEXT, _DECODED = ROW["prefill_tokens"], ROW["context_tokens"], ROW["decoded_tokens"]
_KV_USED, _KV_TOTAL, _OLDEST = ROW["kv_blocks_used"], ROW["kv_blocks_total"], ROW["oldest_wait_s"]
_LATENCY, _RATE = ROW["recent_latency_s"], ROW["completion_rate_per_s"]
_TOKEN_TIME, _TYPICAL = ROW["token_time_s"], ROW["typical_prompt_tokens"]
_SPEED, _CACHED = ROW["speed_factor"], ROW["cached_prompt_tokens"]


@helper
def write_column(
    rules: Any, i: Any, f: Any, now_s: float, speed_factor: float, values: Any, waiting: Any, column: int
) -> None:
    """Write a replica's column of a snapshot: `values` and `waiting` are those of `ClusterSnapshot`."""
    values[_OUTSTANDING, column] = i[OUTSTANDING]
    values[_RUNNING, column] = i[ADMITTED]
    values[_PREFILL, column] = i[PREFILL_TOKENS]
    values[_CONTEXT, column] = i[CONTEXT_TOKENS]
    values[_KV_USED, column] = i[KV_USED]
    values[_KV_TOTAL, column] = rules.num_blocks
    values[_OLDEST, column] = max(now_s - f[i[QUEUE] + ARRIVED], 0.0) if i[QUEUE] >= 0 else 0.0
    values[_DECODED, column] = i[DECODED_TOKENS]
    values[_LATENCY, column] = f[RECENT_LATENCY]
    values[_RATE, column] = decayed_rate(f[COMPLETION_RATE], f[RATE_UPDATED], now_s)
    values[_TOKEN_TIME, column] = f[TOKEN_TIME]
    values[_TYPICAL, column] = f[TYPICAL_PROMPT]
    values[_SPEED, column] = speed_factor
    values[_CACHED, column] = 0.0
    num_shown, q = len(waiting) // 2, i[QUEUE]
    for k in range(num_shown):
        if q >= 0:
            waiting[k, column] = i[q + PREFILL]
            waiting[num_shown + k, column] = max(now_s - f[q + ARRIVED], 0.0)
            q = i[q + NEXT]
        else:
            waiting[k, column] = waiting[num_shown + k, column] = 0.0
