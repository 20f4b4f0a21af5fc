"""What is averaged over the recent past: the same for every source of snapshots, so that a policy knows them all.

Whoever fills snapshots (Vidur, the twin, real replicas) keeps the numbers; how they move is written here.
"""

import math
from typing import Any

from .compiled import compilable
from .snapshot import ROW, RequestInfo

#: Weight of the newest value in an average of values, and the time over which rates are averaged.
NEWEST_WEIGHT = 0.1
RATE_WINDOW_S = 10.0
#: Prompt tokens that `typical_prompt_tokens` remembers.
PROMPT_MEMORY_TOKENS = 65536.0

_OLDEST, _RATE = ROW["oldest_wait_s"], ROW["completion_rate_per_s"]


@compilable
def moved_average(mean: float, value: float) -> float:
    """A moving average after one more value; 0 stands for none so far."""
    return mean + NEWEST_WEIGHT * (value - mean) if mean > 0 else value


@compilable
def decayed_rate(rate_per_s: float, updated_s: float, now_s: float) -> float:
    """An event rate as of `now_s` that was `rate` at `updated_s`, if nothing has happened since."""
    return rate_per_s * math.exp((updated_s - now_s) / RATE_WINDOW_S)


@compilable
def counted_rate(rate_per_s: float, updated_s: float, now_s: float) -> float:
    """An event rate at `now_s`, after one more event."""
    return decayed_rate(rate_per_s, updated_s, now_s) + 1.0 / RATE_WINDOW_S


@compilable
def updated_typical_prompt(typical_tokens: float, prompt_tokens: float) -> float:
    """`typical_prompt_tokens` of a replica after one more prompt was sent there.

    Long prompts that have replicas of their own only pay if the router remembers whose they are.
    """
    if typical_tokens == 0.0:
        return float(prompt_tokens)
    return typical_tokens + (1.0 - math.exp(-prompt_tokens / PROMPT_MEMORY_TOKENS)) * (prompt_tokens - typical_tokens)


@compilable
def mean_output(finished_requests: float, decode_tokens: float, initial_tokens: float) -> float:
    """Mean output of the requests that have finished, or the initial guess before any has."""
    return decode_tokens / finished_requests if finished_requests > 0 else initial_tokens


@compilable
def bring_to_now(values: Any, waiting: Any, rate_updated_s: Any, now_s: float) -> None:
    """Turn arrival times of waiting requests into ages, and let completion rates decay, in a snapshot's arrays.

    `waiting`: as in `ClusterSnapshot`, but with arrival times for ages, infinite where nobody waits.
    """
    heads = len(waiting) // 2
    for i in range(values.shape[1]):
        for slot in range(heads, 2 * heads):
            waiting[slot, i] = max(now_s - waiting[slot, i], 0.0)
        values[_OLDEST, i] = waiting[heads, i]
        values[_RATE, i] = decayed_rate(values[_RATE, i], rate_updated_s[i], now_s)


class Arrivals:
    """What a router knows of the arrivals so far."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._rate_per_s = 0.0

    def request_info(self, prompt_tokens: int, now_s: float) -> RequestInfo:
        """The request that arrives now; call it once for each request, in order."""
        last_s = now_s if self._last_s is None else self._last_s
        rate_per_s = decayed_rate(self._rate_per_s, last_s, now_s)
        self._rate_per_s = rate_per_s + 1.0 / RATE_WINDOW_S
        self._last_s = now_s
        return RequestInfo(prompt_tokens, now_s, now_s - last_s, rate_per_s)
