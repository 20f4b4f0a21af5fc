"""The event machine of a replica: Vidur's events in Vidur's order.

Vidur orders events by time and, at equal times, by creation. Only the ends of stages lie in the future; all other
events happen at the moment at which they are created, so a ring of them is enough.

An arrival is the oldest event of its moment, and the decision about it comes right after the events that already
existed: of a batch that ends at that very moment, the router still sees the state before.
"""

import math
from typing import Any

from .batching import form_batch
from .compiling import helper
from .layout import (
    ARRIVED,
    BATCH_END,
    COMPLETION_RATE,
    CONTEXT_TOKENS,
    DECODED_TOKENS,
    DONE,
    END_SEQUENCE,
    FINISHED,
    FINISHED_DECODE_TOKENS,
    FIRST_EVENT,
    FIRST_TOKEN,
    FIXED_CHUNK,
    FREE,
    ID,
    IS_DECODING,
    LOG_ARRIVED,
    LOG_COMPLETED,
    LOG_FIRST_TOKEN,
    LOG_FULL,
    LOG_ID,
    LOG_RESTARTS,
    LOG_ROW,
    LOG_SCHEDULED,
    MARKER,
    MAX_STAGES,
    NEWEST_BATCH,
    NEXT,
    NEXT_BATCH,
    NO_SLOT,
    NOW,
    NUM_BATCHED_REQUESTS,
    NUM_BATCHES,
    NUM_EVENTS,
    NUM_IDLE,
    NUM_WAITING,
    OLDEST_BATCH,
    OUTSTANDING,
    PARTIAL,
    PREFILL,
    PREFILL_TOKENS,
    PROCESSED,
    PROMPT,
    QUEUE,
    RATE_UPDATED,
    RECENT_LATENCY,
    REPLICA_SCHEDULE,
    RESTARTS,
    RUNNING_BATCHES,
    RUNNING_STAGES,
    SCHEDULED,
    SEQUENCE,
    STAGE_ARRIVAL,
    STAGE_SCHEDULE,
    SUBMITTED,
    TARGET,
    TIME_UNKNOWN,
    TOTAL,
)
from .queues import append, free_blocks, insert_by_arrival, release_slot
from .timing import time_batch

# As in `sim.replica_source`: weight of the newest latency in the average, and what rates are averaged over.
LATENCY_WEIGHT = 0.1
RATE_WINDOW_S = 10.0


@helper
def advance_row(rules: Any, times: Any, state: Any, row: int, until_s: float) -> int:
    """Process a replica's events up to a decision at `until_s`; DONE, or why the machine has to stop before."""
    clocks, counters = state.clocks, state.counters
    if clocks[row, TARGET] != until_s:
        clocks[row, TARGET] = until_s
        counters[row, MARKER] = counters[row, SEQUENCE]
    while True:
        stage, end_s, order = _next_stage_end(rules, state, row)
        now_s = clocks[row, NOW]
        if counters[row, NUM_EVENTS] > 0:
            first = state.events[row, counters[row, FIRST_EVENT]]
            if not (end_s == now_s and order < first[1]):
                if now_s > until_s or (now_s == until_s and first[1] >= counters[row, MARKER]):
                    return DONE
                outcome = _handle(rules, times, state, row, first[0])
                if outcome != DONE:
                    return outcome  # type: ignore[no-any-return]
                counters[row, FIRST_EVENT] = (counters[row, FIRST_EVENT] + 1) % state.events.shape[1]
                counters[row, NUM_EVENTS] -= 1
                continue
        if end_s > until_s or end_s == math.inf or (end_s == until_s and order >= counters[row, MARKER]):
            return DONE
        clocks[row, NOW] = end_s
        _end_stage(rules, state, row, stage)


@helper
def submit_to_row(state: Any, row: int, number: int, arrived_s: float, prompt_tokens: int, decode_tokens: int) -> int:
    """Put a request into a replica's queue; the row must have advanced to its arrival. NO_SLOT if it is full."""
    requests, counters, clocks = state.requests, state.counters, state.clocks
    slot = counters[row, FREE]
    if slot < 0:
        return NO_SLOT
    counters[row, FREE] = requests[row, slot, NEXT]
    requests[row, slot, :] = 0
    requests[row, slot, PREFILL] = requests[row, slot, PROMPT] = prompt_tokens
    requests[row, slot, TOTAL] = prompt_tokens + decode_tokens
    requests[row, slot, ID] = number
    state.moments[row, slot, :] = math.nan
    state.moments[row, slot, ARRIVED] = arrived_s
    append(state, row, QUEUE, slot)
    counters[row, OUTSTANDING] += 1
    counters[row, PREFILL_TOKENS] += prompt_tokens
    # Requests that arrive at one moment are handed over together: one event for all of them.
    if clocks[row, SUBMITTED] != arrived_s:
        clocks[row, SUBMITTED] = arrived_s
        clocks[row, NOW] = arrived_s
        _push(state, row, REPLICA_SCHEDULE * MAX_STAGES)
    return DONE


@helper
def _next_stage_end(rules: Any, state: Any, row: int) -> Any:
    """The stage that ends next, when, and the order of that event."""
    stage, end_s, order = 0, state.stage_ends[row, 0], state.stages[row, 0, END_SEQUENCE]
    for other in range(1, rules.num_stages):
        other_s, other_order = state.stage_ends[row, other], state.stages[row, other, END_SEQUENCE]
        if other_s < end_s or (other_s == end_s and other_order < order):
            stage, end_s, order = other, other_s, other_order
    return stage, end_s, order


@helper
def _push(state: Any, row: int, code: int) -> None:
    counters, size = state.counters, state.events.shape[1]
    at = (counters[row, FIRST_EVENT] + counters[row, NUM_EVENTS]) % size
    state.events[row, at, 0] = code
    state.events[row, at, 1] = counters[row, SEQUENCE]
    counters[row, SEQUENCE] += 1
    counters[row, NUM_EVENTS] += 1


@helper
def _handle(rules: Any, times: Any, state: Any, row: int, code: int) -> int:
    """Process an immediate event; nothing has changed unless the outcome is DONE."""
    kind, stage = code // MAX_STAGES, code % MAX_STAGES
    if kind == STAGE_SCHEDULE:
        return _start_stage(rules, times, state, row, stage)  # type: ignore[no-any-return]
    if kind == REPLICA_SCHEDULE:
        _schedule_batch(rules, state, row)
    elif kind == STAGE_ARRIVAL:
        state.stages[row, stage, NUM_WAITING] += 1
        _push(state, row, STAGE_SCHEDULE * MAX_STAGES + stage)
    else:
        batch = state.counters[row, OLDEST_BATCH]
        if state.log_size[0] + state.batch_sizes[row, batch] > len(state.log):
            return LOG_FULL
        _end_batch(rules, state, row, batch)
        _push(state, row, REPLICA_SCHEDULE * MAX_STAGES)
    return DONE


@helper
def _schedule_batch(rules: Any, state: Any, row: int) -> None:
    counters = state.counters
    if counters[row, RUNNING_BATCHES] >= rules.num_stages or counters[row, RUNNING_STAGES] != 0:
        return
    batch = counters[row, NEWEST_BATCH]
    if form_batch(rules, state, row, batch) == 0:
        return
    counters[row, NEWEST_BATCH] = (batch + 1) % rules.num_stages
    counters[row, RUNNING_BATCHES] += 1
    counters[row, RUNNING_STAGES] += 1
    _push(state, row, STAGE_ARRIVAL * MAX_STAGES)


@helper
def _start_stage(rules: Any, times: Any, state: Any, row: int, stage: int) -> int:
    stages = state.stages
    if state.stage_ends[row, stage] != math.inf or stages[row, stage, NUM_WAITING] == 0:
        return DONE
    batch = stages[row, stage, NEXT_BATCH]
    if stage == 0 and not time_batch(rules, times, state, row, batch):
        return TIME_UNKNOWN
    is_last = stage == rules.num_stages - 1
    state.stage_ends[row, stage] = state.clocks[row, NOW] + state.batch_s[row, batch, 1 if is_last else 0]
    stages[row, stage, NEXT_BATCH] = (batch + 1) % rules.num_stages
    stages[row, stage, NUM_WAITING] -= 1
    stages[row, stage, END_SEQUENCE] = state.counters[row, SEQUENCE]
    state.counters[row, SEQUENCE] += 1
    return DONE


@helper
def _end_stage(rules: Any, state: Any, row: int, stage: int) -> None:
    state.stage_ends[row, stage] = math.inf
    _push(state, row, STAGE_SCHEDULE * MAX_STAGES + stage)
    if stage == rules.num_stages - 1:
        _push(state, row, BATCH_END * MAX_STAGES)
    else:
        _push(state, row, STAGE_ARRIVAL * MAX_STAGES + stage + 1)
    if stage == 0:
        state.counters[row, RUNNING_STAGES] -= 1
        _push(state, row, REPLICA_SCHEDULE * MAX_STAGES)


@helper
def _end_batch(rules: Any, state: Any, row: int, batch: int) -> None:
    """Progress of the batch's requests; whoever is not finished becomes idle, or waits for its next chunk."""
    requests, counters, now_s = state.requests, state.counters, state.clocks[row, NOW]
    size = state.batch_sizes[row, batch]
    counters[row, OLDEST_BATCH] = (batch + 1) % rules.num_stages
    counters[row, RUNNING_BATCHES] -= 1
    counters[row, NUM_BATCHES] += 1
    counters[row, NUM_BATCHED_REQUESTS] += size
    prefilled, processed, decoded = 0, 0, 0
    for i in range(size):
        slot, tokens = state.batch_slots[row, batch, i], state.batch_tokens[row, batch, i]
        if requests[row, slot, IS_DECODING]:
            decoded += 1
        else:
            prefilled += tokens
            if requests[row, slot, PROCESSED] + tokens == requests[row, slot, PREFILL]:
                requests[row, slot, IS_DECODING] = 1
                tokens += 1  # the end of prefill yields the first token
                decoded += 1
                if math.isnan(state.moments[row, slot, FIRST_TOKEN]):
                    state.moments[row, slot, FIRST_TOKEN] = now_s
        requests[row, slot, PROCESSED] += tokens
        processed += tokens
        if requests[row, slot, PROCESSED] == requests[row, slot, TOTAL]:
            _complete(state, row, slot)
        elif rules.scheduler == FIXED_CHUNK and not requests[row, slot, IS_DECODING]:
            insert_by_arrival(state, row, PARTIAL, slot)
        else:
            state.idle[row, counters[row, NUM_IDLE]] = slot
            counters[row, NUM_IDLE] += 1
    counters[row, PREFILL_TOKENS] -= prefilled
    counters[row, CONTEXT_TOKENS] += processed
    counters[row, DECODED_TOKENS] += decoded


@helper
def _complete(state: Any, row: int, slot: int) -> None:
    requests, counters, clocks, moments = state.requests, state.counters, state.clocks, state.moments
    now_s, arrived_s = clocks[row, NOW], moments[row, slot, ARRIVED]
    decode_tokens = requests[row, slot, TOTAL] - requests[row, slot, PROMPT]
    free_blocks(state, row, slot)
    counters[row, OUTSTANDING] -= 1
    counters[row, CONTEXT_TOKENS] -= requests[row, slot, PROCESSED]
    counters[row, DECODED_TOKENS] -= decode_tokens
    counters[row, FINISHED] += 1
    counters[row, FINISHED_DECODE_TOKENS] += decode_tokens
    latency_s, mean_s = now_s - arrived_s, clocks[row, RECENT_LATENCY]
    clocks[row, RECENT_LATENCY] = mean_s + LATENCY_WEIGHT * (latency_s - mean_s) if mean_s > 0 else latency_s
    decay = math.exp((clocks[row, RATE_UPDATED] - now_s) / RATE_WINDOW_S)
    clocks[row, COMPLETION_RATE] = clocks[row, COMPLETION_RATE] * decay + 1.0 / RATE_WINDOW_S
    clocks[row, RATE_UPDATED] = now_s
    entry = state.log[state.log_size[0]]
    entry[LOG_ID] = requests[row, slot, ID]
    entry[LOG_ROW] = row
    entry[LOG_ARRIVED] = arrived_s
    entry[LOG_SCHEDULED] = moments[row, slot, SCHEDULED]
    entry[LOG_FIRST_TOKEN] = moments[row, slot, FIRST_TOKEN]
    entry[LOG_COMPLETED] = now_s
    entry[LOG_RESTARTS] = requests[row, slot, RESTARTS]
    state.log_size[0] += 1
    release_slot(state, row, slot)
