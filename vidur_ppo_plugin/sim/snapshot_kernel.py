"""Brings a snapshot's figures that depend on the time up to date, in one compiled pass; for `replica_source`."""

import math
from typing import Any

from vidur_ppo_plugin.routing.compiled import compiled
from vidur_ppo_plugin.routing.snapshot import ROW

_OLDEST, _RATE = ROW["oldest_wait_s"], ROW["completion_rate_per_s"]


def _age(values: Any, waiting: Any, rate_updated_s: Any, now_s: float, rate_window_s: float) -> None:
    heads, size = waiting.shape[0] // 2, values.shape[1]
    for slot in range(heads, 2 * heads):
        for i in range(size):
            waiting[slot, i] = max(now_s - waiting[slot, i], 0.0)
    for i in range(size):
        values[_OLDEST, i] = waiting[heads, i]
        values[_RATE, i] *= math.exp((rate_updated_s[i] - now_s) / rate_window_s)


age = compiled(_age, keep=True)
