"""Reads what is left to do off a twin's cells, in one compiled pass."""

from typing import Any

import numpy as np

from vidur_ppo_plugin.routing.delay_kernel import increase
from vidur_ppo_plugin.twin.compiling import entry, helper
from vidur_ppo_plugin.twin.layout import (
    ARRIVED,
    BATCH_HEADER,
    ID,
    IS_DECODING,
    NEXT,
    NUM_IDLE,
    OLDEST_BATCH,
    OUTSTANDING,
    PARTIAL,
    PREFILL,
    PROCESSED,
    QUEUE,
    RUNNING_BATCHES,
    SIZE,
    TOTAL,
)


@helper
def _insert(i: Any, requests: Any, count: int, q: int) -> int:
    """Add a request to those of a replica, which are in the order of their dispatch; the new number of them."""
    k = count
    while k > 0 and i[requests[k - 1] + ID] > i[q + ID]:
        requests[k] = requests[k - 1]
        k -= 1
    requests[k] = q
    return count + 1


@helper
def _requests_of(rules: Any, i: Any, requests: Any) -> None:
    """The places of a replica's requests: running, idle, begun and waiting ones."""
    count = 0
    for number in range(i[RUNNING_BATCHES]):
        batch = rules.batches + rules.batch_cells * ((i[OLDEST_BATCH] + number) % rules.num_stages)
        for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * i[batch + SIZE], 2):
            count = _insert(i, requests, count, i[k])
    for k in range(rules.idle, rules.idle + i[NUM_IDLE]):
        count = _insert(i, requests, count, i[k])
    for which in (PARTIAL, QUEUE):
        q = i[which]
        while q >= 0:
            count = _insert(i, requests, count, q)
            q = i[q + NEXT]


@entry
def read_work(rules: Any, cells: Any, floats: Any, now_s: float, columns: Any) -> None:
    """Prompt tokens to prefill, iterations to decode, tokens in context and age of every request in flight."""
    at = 0
    for row in range(len(cells)):
        i, f = cells[row], floats[row]
        requests = np.empty(i[OUTSTANDING], np.int64)
        _requests_of(rules, i, requests)
        for q in requests:
            done = i[q + PROCESSED]
            if i[q + IS_DECODING]:
                columns[0, at] = 0.0
                columns[1, at] = i[q + TOTAL] - done
            else:  # the end of prefill yields the first token
                columns[0, at] = i[q + PREFILL] - done
                columns[1, at] = i[q + TOTAL] - i[q + PREFILL] - 1
            columns[2, at] = done
            columns[3, at] = now_s - f[q + ARRIVED]
            at += 1


@entry
def increase_all(
    rules: Any,
    cells: Any,
    floats: Any,
    prompt_tokens: Any,
    decode_tokens: Any,
    speeds: Any,
    backlog_weights: Any,
    token_s: float,
    iteration_s: float,
    request_s: float,
    context_s: float,
    chunk_tokens: float,
    result: Any,
) -> None:
    """`routing.delay_kernel.increase` for the next request of every cluster: [clusters, replicas]."""
    size = len(speeds)
    counts = np.empty(size, np.int64)
    for c in range(len(prompt_tokens)):
        rows = cells[c * size : (c + 1) * size]
        for replica in range(size):
            counts[replica] = rows[replica, OUTSTANDING]
        columns = np.empty((4, counts.sum()))
        read_work(rules, rows, floats[c * size : (c + 1) * size], 0.0, columns)
        result[c] = increase(
            columns[0],
            columns[1],
            columns[2],
            counts,
            speeds,
            float(prompt_tokens[c]),
            float(decode_tokens[c] - 1),  # the end of prefill yields the first token
            backlog_weights[c],
            token_s,
            iteration_s,
            request_s,
            context_s,
            chunk_tokens,
        )
