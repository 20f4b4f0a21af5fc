"""Lists of requests, and what admission, progress and preemption do to a replica's books. Compiled helpers."""

import math
from typing import Any

from .compiling import helper
from .layout import (
    ADMITTED,
    ARRIVED,
    BLOCKS,
    CONTEXT_TOKENS,
    FREE,
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
)


@helper
def append(state: Any, row: int, which: int, slot: int) -> None:
    """Add a request at the end of a linked list (`which`: the counter of its head)."""
    tail = state.counters[row, which + 1]
    state.requests[row, slot, NEXT] = -1
    if tail < 0:
        state.counters[row, which] = slot
    else:
        state.requests[row, tail, NEXT] = slot
    state.counters[row, which + 1] = slot


@helper
def push_front(state: Any, row: int, which: int, slot: int) -> None:
    """Add a request at the beginning of a linked list."""
    head = state.counters[row, which]
    state.requests[row, slot, NEXT] = head
    state.counters[row, which] = slot
    if head < 0:
        state.counters[row, which + 1] = slot


@helper
def remove_after(state: Any, row: int, which: int, before: int) -> int:
    """Take the request after `before` (-1: the first) out of a linked list; its slot."""
    requests, counters = state.requests, state.counters
    slot = counters[row, which] if before < 0 else requests[row, before, NEXT]
    after = requests[row, slot, NEXT]
    if before < 0:
        counters[row, which] = after
    else:
        requests[row, before, NEXT] = after
    if after < 0:
        counters[row, which + 1] = before
    return slot


@helper
def insert_by_arrival(state: Any, row: int, which: int, slot: int) -> None:
    """Add a request to a linked list that is in the order of arrival, ties by id."""
    requests, moments = state.requests, state.moments
    arrived_s, number = moments[row, slot, ARRIVED], requests[row, slot, ID]
    tail = state.counters[row, which + 1]
    if tail < 0 or _is_earlier(moments[row, tail, ARRIVED], requests[row, tail, ID], arrived_s, number):
        append(state, row, which, slot)
        return
    before, at = -1, state.counters[row, which]
    while _is_earlier(moments[row, at, ARRIVED], requests[row, at, ID], arrived_s, number):
        before, at = at, requests[row, at, NEXT]
    requests[row, slot, NEXT] = at
    if before < 0:
        state.counters[row, which] = slot
    else:
        requests[row, before, NEXT] = slot


@helper
def _is_earlier(arrived_s: float, number: int, other_s: float, other_number: int) -> bool:
    return arrived_s < other_s or (arrived_s == other_s and number < other_number)


@helper
def sort_idle(state: Any, row: int, count: int) -> None:
    """Sort the first idle requests by arrival; those that arrived together keep their order."""
    idle, moments = state.idle, state.moments
    for i in range(1, count):
        slot = idle[row, i]
        arrived_s = moments[row, slot, ARRIVED]
        j = i
        while j > 0 and moments[row, idle[row, j - 1], ARRIVED] > arrived_s:
            idle[row, j] = idle[row, j - 1]
            j -= 1
        idle[row, j] = slot


@helper
def keep_idle(state: Any, row: int, kept: int, first: int, last: int) -> int:
    """Move the idle requests [first, last) behind the `kept` ones at the beginning; how many there are then."""
    for i in range(first, last):
        state.idle[row, kept + i - first] = state.idle[row, i]
    return kept + last - first


@helper
def blocks_for(rules: Any, tokens: int) -> int:
    """KV blocks that so many tokens fill."""
    return (tokens + rules.block_size - 1) // rules.block_size


@helper
def admit(state: Any, row: int, slot: int, num_blocks: int) -> None:
    """Give a request its first blocks."""
    state.requests[row, slot, BLOCKS] = num_blocks
    state.counters[row, KV_USED] += num_blocks
    state.counters[row, ADMITTED] += 1


@helper
def free_blocks(state: Any, row: int, slot: int) -> None:
    """Take a request's blocks back."""
    state.counters[row, KV_USED] -= state.requests[row, slot, BLOCKS]
    state.counters[row, ADMITTED] -= 1
    state.requests[row, slot, BLOCKS] = 0


@helper
def extend(rules: Any, state: Any, row: int, slot: int) -> None:
    """Give a decoding request one block more if its tokens have outgrown those it has."""
    requests = state.requests
    if requests[row, slot, PROCESSED] > requests[row, slot, BLOCKS] * rules.block_size:
        requests[row, slot, BLOCKS] += 1
        state.counters[row, KV_USED] += 1


@helper
def restart(state: Any, row: int, slot: int) -> None:
    """Preempt a request: its blocks are free, and what it had processed is to be prefilled again."""
    requests, counters = state.requests, state.counters
    processed = requests[row, slot, PROCESSED]
    if requests[row, slot, IS_DECODING]:
        requests[row, slot, PREFILL] = processed
        requests[row, slot, IS_DECODING] = 0
    counters[row, PREFILL_TOKENS] += processed
    counters[row, CONTEXT_TOKENS] -= processed
    requests[row, slot, PROCESSED] = 0
    requests[row, slot, RESTARTS] += 1
    free_blocks(state, row, slot)


@helper
def add_to_batch(state: Any, row: int, batch: int, slot: int, tokens: int) -> None:
    """Put a request with so many new tokens into a batch that is being formed."""
    size = state.batch_sizes[row, batch]
    state.batch_slots[row, batch, size] = slot
    state.batch_tokens[row, batch, size] = tokens
    state.batch_sizes[row, batch] = size + 1
    if math.isnan(state.moments[row, slot, SCHEDULED]):
        state.moments[row, slot, SCHEDULED] = state.clocks[row, NOW]


@helper
def release_slot(state: Any, row: int, slot: int) -> None:
    """Put a slot back on the list of free ones."""
    state.requests[row, slot, NEXT] = state.counters[row, FREE]
    state.counters[row, FREE] = slot
