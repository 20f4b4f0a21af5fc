"""Compiled: what a request would add to everybody's latency on each replica, if nobody else arrived.

By the short way of `drain` where that covers it, otherwise by rolling copies of the replica forward.
"""

import math
from typing import Any

from .compiled import entry, helper
from .drain import drained
from .events import advance_cells, advance_row, submit_to_cells
from .layout import (
    ARRIVED,
    BATCH_HEADER,
    DONE,
    LOG_ARRIVED,
    LOG_COMPLETED,
    LOG_SIZE,
    NEXT,
    NUM_IDLE,
    OLDEST_BATCH,
    PARTIAL,
    QUEUE,
    RUNNING_BATCHES,
    SIZE,
)

# Number of the request that is tried out: after all others, where arrivals are equal.
_LAST = 1 << 62


@entry
def increase(
    rules: Any,
    times: Any,
    state: Any,
    scratch: Any,
    now_s: float,
    prompt_tokens: int,
    decode_tokens: int,
    power: float,
    until_s: float,
    result: Any,
) -> Any:
    """How much each replica's sum of latency ** power grows with the new request."""
    for row in range(len(state.cells)):
        outcome = increase_of_row(
            rules,
            times,
            state,
            scratch,
            row,
            now_s,
            prompt_tokens,
            decode_tokens,
            power,
            until_s,
            result[row : row + 1],
        )
        if outcome != DONE:
            return outcome
    return DONE


@helper
def increase_of_row(
    rules: Any,
    times: Any,
    state: Any,
    scratch: Any,
    row: int,
    now_s: float,
    prompt_tokens: int,
    decode_tokens: int,
    power: float,
    until_s: float,
    result: Any,
) -> Any:
    """How much one replica's sum of latency ** power grows with the new request, written to `result[0]`."""
    outcome = advance_row(rules, times, state, row, now_s)
    if outcome != DONE:
        return outcome
    result[0] = 0.0
    if until_s == math.inf:
        i, f, speed, work = state.cells[row], state.floats[row], times.speed_index[row], scratch.log
        placed = drained(rules, times, speed, i, f, now_s, prompt_tokens, decode_tokens, power, work)
        result[0] = placed - drained(rules, times, speed, i, f, now_s, 0, 0, power, work)
        if not math.isnan(result[0]):
            return DONE
        result[0] = 0.0
    for is_placed in range(2):
        i, f = scratch.cells[0], scratch.floats[0]
        i[:] = state.cells[row]
        scratch.signals[LOG_SIZE] = 0
        if is_placed:
            outcome = submit_to_cells(rules, i, f, _LAST, now_s, prompt_tokens, decode_tokens)
        if outcome == DONE:
            speed = times.speed_index[row]
            outcome = advance_cells(rules, times, speed, i, f, scratch.log, scratch.signals, row, until_s)
        if outcome != DONE:
            state.signals[LOG_SIZE + 1 :] = scratch.signals[LOG_SIZE + 1 :]
            return outcome
        total = _total(rules, i, f, scratch.log, scratch.signals[LOG_SIZE], until_s, power)
        result[0] += total if is_placed else -total
    return DONE


@helper
def _total(rules: Any, i: Any, f: Any, log: Any, num_completed: int, until_s: float, power: float) -> Any:
    """Sum of latency ** power of the requests in the log, and of those in flight as if they were completed now."""
    total = 0.0
    for k in range(num_completed):
        total += _raised(log[k, LOG_COMPLETED] - log[k, LOG_ARRIVED], power)
    for which in (QUEUE, PARTIAL):
        q = i[which]
        while q >= 0:
            total += _raised(until_s - f[q + ARRIVED], power)
            q = i[q + NEXT]
    for k in range(rules.idle, rules.idle + i[NUM_IDLE]):
        total += _raised(until_s - f[i[k] + ARRIVED], power)
    for number in range(i[RUNNING_BATCHES]):
        batch = rules.batches + rules.batch_cells * ((i[OLDEST_BATCH] + number) % rules.num_stages)
        for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * i[batch + SIZE], 2):
            total += _raised(until_s - f[i[k] + ARRIVED], power)
    return total


@helper
def _raised(latency_s: float, power: float) -> Any:
    return latency_s if power == 1.0 else latency_s**power
