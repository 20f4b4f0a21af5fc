"""How slow replicas are, by what they report: the router is not told their speeds.

A replica of half the speed takes about twice as long from token to token. But that time also grows with what a replica
has to do, and it is an average of few requests, so replicas of equal speed differ too: by less than 15 % in 99 of 100
cases (by a third where documents come). Small differences therefore count for nothing, and large ones not fully.
"""

import math
from typing import Any

import numpy as np

from .compiled import compilable

# Differences of the logarithm of the time between tokens from the cluster's median: nothing counts up to the first,
# everything from the second on, and no more than the third.
_IGNORED, _TRUSTED, _MOST = 0.15, 0.3, 0.5
# How much of a difference is made up for. With all of it a fast replica gets so much that first tokens come late there.
_SHARE = 0.6
# Completions, relative to the mean of the cluster, from which on a replica is judged in full: one that has completed
# next to nothing lately (it was drained) is not to be judged by how fast it was then.
_ENOUGH = 1.0 / 3.0


@compilable
def weigh_by_slowness(token_time_s: Any, completion_rate_per_s: Any, costs: Any) -> None:
    """Multiply the cost of each replica by how slow it is, 1 being usual.

    Nothing is known of a replica whose time is 0.
    """
    size = len(costs)
    logs, number = np.empty(size), 0
    for i in range(size):
        if token_time_s[i] > 0.0:
            logs[number] = math.log(token_time_s[i])
            number += 1
    if number < 2:
        return
    known = logs[:number]
    known.sort()
    median = 0.5 * (known[(number - 1) // 2] + known[number // 2])
    if known[number - 1] - median <= _IGNORED and median - known[0] <= _IGNORED:
        return
    total_per_s = 0.0
    for i in range(size):  # one by one: some `sum` are more exact, and compiled code must find the same
        total_per_s += completion_rate_per_s[i]
    enough_per_s = _ENOUGH * total_per_s / size
    for i in range(size):
        if token_time_s[i] > 0.0 and completion_rate_per_s[i] > 0.0:
            slower = math.log(token_time_s[i]) - median
            trust = min(max((abs(slower) - _IGNORED) / (_TRUSTED - _IGNORED), 0.0), 1.0)
            trust *= min(completion_rate_per_s[i] / enough_per_s, 1.0)
            costs[i] *= math.exp(_SHARE * trust * min(max(slower, -_MOST), _MOST))
