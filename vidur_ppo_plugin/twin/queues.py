"""Lists of requests, and what admission and preemption do to a replica's books. Compiled helpers.

`i` and `f` are the cells of a replica's row, `q` is the place of a request in it (see `layout`).
"""

import math
from typing import Any

from .compiled import helper
from .layout import (
    ADMITTED,
    ARRIVED,
    BATCH_HEADER,
    BLOCKS,
    CONTEXT_TOKENS,
    ID,
    IS_DECODING,
    KV_USED,
    NEXT,
    NOW,
    PREFILL,
    PREFILL_TOKENS,
    PROCESSED,
    RESTARTS,
    SCHEDULED,
    SIZE,
)


@helper
def append(i: Any, which: int, q: int) -> None:
    """Add a request at the end of a linked list (`which`: the counter of its head)."""
    tail = i[which + 1]
    i[q + NEXT] = -1
    if tail < 0:
        i[which] = q
    else:
        i[tail + NEXT] = q
    i[which + 1] = q


@helper
def push_front(i: Any, which: int, q: int) -> None:
    """Add a request at the beginning of a linked list."""
    i[q + NEXT] = i[which]
    if i[which] < 0:
        i[which + 1] = q
    i[which] = q


@helper
def remove_after(i: Any, which: int, before: int) -> Any:
    """Take the request after `before` (-1: the first) out of a linked list."""
    q = i[which] if before < 0 else i[before + NEXT]
    after = i[q + NEXT]
    if before < 0:
        i[which] = after
    else:
        i[before + NEXT] = after
    if after < 0:
        i[which + 1] = before
    return q


@helper
def insert_by_arrival(i: Any, f: Any, which: int, q: int) -> None:
    """Add a request to a linked list that is in the order of arrival, ties by id."""
    if i[which + 1] < 0 or _is_earlier(i, f, i[which + 1], q):
        append(i, which, q)
        return
    before, at = -1, i[which]
    while _is_earlier(i, f, at, q):
        before, at = at, i[at + NEXT]
    i[q + NEXT] = at
    if before < 0:
        i[which] = q
    else:
        i[before + NEXT] = q


@helper
def _is_earlier(i: Any, f: Any, q: int, other: int) -> Any:
    if f[q + ARRIVED] != f[other + ARRIVED]:
        return f[q + ARRIVED] < f[other + ARRIVED]
    return i[q + ID] < i[other + ID]


@helper
def sort_by_arrival(i: Any, f: Any, first: int, count: int) -> None:
    """Sort a stretch of requests; those that arrived together keep their order."""
    for k in range(first + 1, first + count):
        q = i[k]
        arrived_s = f[q + ARRIVED]
        j = k
        while j > first and f[i[j - 1] + ARRIVED] > arrived_s:
            i[j] = i[j - 1]
            j -= 1
        i[j] = q


@helper
def move(i: Any, into: int, first: int, last: int) -> int:
    """Move the cells [first, last) to an earlier place; the place after them."""
    for k in range(first, last):
        i[into] = i[k]
        into += 1
    return into


@helper
def blocks_for(rules: Any, tokens: int) -> Any:
    """KV blocks that so many tokens fill."""
    return (tokens + rules.block_size - 1) // rules.block_size


@helper
def admit(i: Any, q: int, num_blocks: int) -> None:
    """Give a request its first blocks."""
    i[q + BLOCKS] = num_blocks
    i[KV_USED] += num_blocks
    i[ADMITTED] += 1


@helper
def free_blocks(i: Any, q: int) -> None:
    """Take a request's blocks back."""
    i[KV_USED] -= i[q + BLOCKS]
    i[ADMITTED] -= 1
    i[q + BLOCKS] = 0


@helper
def extend(rules: Any, i: Any, q: int) -> None:
    """Give a decoding request one block more if its tokens have outgrown those it has."""
    if i[q + PROCESSED] > i[q + BLOCKS] * rules.block_size:
        i[q + BLOCKS] += 1
        i[KV_USED] += 1


@helper
def restart(i: Any, q: int) -> None:
    """Preempt a request: its blocks are free, and what it had processed is to be prefilled again."""
    processed = i[q + PROCESSED]
    if i[q + IS_DECODING]:
        i[q + PREFILL] = processed
        i[q + IS_DECODING] = 0
    i[PREFILL_TOKENS] += processed
    i[CONTEXT_TOKENS] -= processed
    i[q + PROCESSED] = 0
    i[q + RESTARTS] += 1
    free_blocks(i, q)


@helper
def add_to_batch(i: Any, f: Any, batch: int, q: int, tokens: int) -> None:
    """Put a request with so many new tokens into a batch that is being formed (`batch`: its place)."""
    at = batch + BATCH_HEADER + 2 * i[batch + SIZE]
    i[at] = q
    i[at + 1] = tokens
    i[batch + SIZE] += 1
    if math.isnan(f[q + SCHEDULED]):
        f[q + SCHEDULED] = f[NOW]
