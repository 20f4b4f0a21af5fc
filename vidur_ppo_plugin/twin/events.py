"""The event machine of a replica: Vidur's events in Vidur's order.

Vidur orders events by time and, at equal times, by creation. Only the ends of stages lie in the future; all other
events happen at the moment at which they are created, so a ring of them is enough.

An arrival is the oldest event of its moment, and the decision about it comes right after the events that already
existed: of a batch that ends at that very moment, the router still sees the state before.
"""

import math
from typing import Any

from vidur_ppo_plugin.routing.averages import counted_rate, moved_average, updated_typical_prompt

from .batching import form_batch
from .compiled import helper
from .layout import (
    ARRIVED,
    BATCH_END,
    BATCH_HEADER,
    COMPLETION_RATE,
    CONTEXT_TOKENS,
    DECODED_TOKENS,
    DONE,
    END_ORDER,
    END_S,
    FINISHED,
    FINISHED_DECODE_TOKENS,
    FIRST_EVENT,
    FIRST_STAGE,
    FIRST_TOKEN,
    FIXED_CHUNK,
    FREE,
    ID,
    IS_DECODING,
    LAST_S,
    LOG_ARRIVED,
    LOG_COMPLETED,
    LOG_FIRST_TOKEN,
    LOG_FULL,
    LOG_ID,
    LOG_RESTARTS,
    LOG_ROW,
    LOG_SCHEDULED,
    LOG_SIZE,
    MARKER,
    MAX_STAGES,
    MIDDLE_S,
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
    REQUEST_CELLS,
    RESTARTS,
    RUNNING_BATCHES,
    RUNNING_STAGES,
    SCHEDULED,
    SEQUENCE,
    SIZE,
    STAGE_ARRIVAL,
    STAGE_CELLS,
    STAGE_SCHEDULE,
    SUBMITTED,
    TARGET,
    TIME_UNKNOWN,
    TOKEN_TIME,
    TOTAL,
    TYPICAL_PROMPT,
)
from .queues import append, free_blocks, insert_by_arrival
from .steady import skip_steady
from .timing import time_batch

# MARKER while there are events before the decision.
_NOT_REACHED = -1


@helper
def advance_row(rules: Any, times: Any, state: Any, row: int, until_s: float) -> Any:
    """Process a replica's events up to a decision at `until_s`; DONE, or why the machine has to stop before."""
    speed = times.speed_index[row]
    return advance_cells(
        rules, times, speed, state.cells[row], state.floats[row], state.log, state.signals, row, until_s
    )


@helper
def advance_cells(
    rules: Any, times: Any, speed: int, i: Any, f: Any, log: Any, signals: Any, row: int, until_s: float
) -> Any:
    """Process the events of one replica, given by its cells (which may be a copy of a row's), up to `until_s`."""
    slopes, lines, layers, slowness = (
        times.decode_slopes,
        times.prefill_lines,
        times.layers[speed],
        times.slowness[speed],
    )
    if f[TARGET] != until_s:
        f[TARGET] = until_s
        i[MARKER] = _NOT_REACHED
    while True:
        stage = _next_stage_end(rules, i, f)
        end_s, order = f[stage + END_S], i[stage + END_ORDER]
        first = rules.events + i[FIRST_EVENT]
        is_immediate = i[NUM_EVENTS] > 0 and not (end_s == f[NOW] and order < i[first + 1])
        if not is_immediate and rules.num_stages == 1 and end_s < until_s:
            skip_steady(rules, layers, slopes, slowness, i, f, until_s)
            end_s = f[stage + END_S]
        time_s = f[NOW] if is_immediate else end_s
        if time_s >= until_s:
            # What is created from here on comes after the decision.
            if i[MARKER] == _NOT_REACHED:
                i[MARKER] = i[SEQUENCE]
            if time_s > until_s or time_s == math.inf or (i[first + 1] if is_immediate else order) >= i[MARKER]:
                return DONE
        if not is_immediate:
            f[NOW] = end_s
            _end_stage(rules, i, f, stage)
            continue
        kind, its_stage = i[first] // MAX_STAGES, FIRST_STAGE + STAGE_CELLS * (i[first] % MAX_STAGES)
        if kind == STAGE_SCHEDULE:
            if not _start_stage(rules, layers, slopes, lines, slowness, i, f, signals, its_stage):
                return TIME_UNKNOWN
        elif kind == REPLICA_SCHEDULE:
            _schedule_batch(rules, i, f)
        elif kind == STAGE_ARRIVAL:
            i[its_stage + NUM_WAITING] += 1
            _push(rules, i, i[first] + (STAGE_SCHEDULE - STAGE_ARRIVAL) * MAX_STAGES)
        elif not _end_batch(rules, i, f, log, signals, row):
            return LOG_FULL
        i[FIRST_EVENT] = (i[FIRST_EVENT] + 2) % rules.num_event_cells
        i[NUM_EVENTS] -= 1


@helper
def submit_to_cells(
    rules: Any, i: Any, f: Any, number: int, arrived_s: float, prompt_tokens: int, decode_tokens: int
) -> int:
    """Put a request into a replica's queue; the cells must have advanced to its arrival. NO_SLOT if they are full."""
    q = i[FREE]
    if q < 0:
        return NO_SLOT
    i[FREE] = i[q + NEXT]
    i[q : q + REQUEST_CELLS] = 0
    i[q + PREFILL] = i[q + PROMPT] = prompt_tokens
    i[q + TOTAL] = prompt_tokens + decode_tokens
    i[q + ID] = number
    f[q + SCHEDULED] = f[q + FIRST_TOKEN] = math.nan
    f[q + ARRIVED] = arrived_s
    append(i, QUEUE, q)
    i[OUTSTANDING] += 1
    i[PREFILL_TOKENS] += prompt_tokens
    f[TYPICAL_PROMPT] = updated_typical_prompt(f[TYPICAL_PROMPT], prompt_tokens)
    # Requests that arrive at one moment are handed over together: one event for all of them.
    if f[SUBMITTED] != arrived_s:
        f[SUBMITTED] = arrived_s
        f[NOW] = arrived_s
        _push(rules, i, REPLICA_SCHEDULE * MAX_STAGES)
    return DONE


@helper
def _next_stage_end(rules: Any, i: Any, f: Any) -> int:
    """The place of the stage that ends next."""
    best = FIRST_STAGE
    for number in range(1, rules.num_stages):
        stage = FIRST_STAGE + STAGE_CELLS * number
        end_s, best_s = f[stage + END_S], f[best + END_S]
        if end_s < best_s or (end_s == best_s and i[stage + END_ORDER] < i[best + END_ORDER]):
            best = stage
    return best


@helper
def _push(rules: Any, i: Any, code: int) -> None:
    at = rules.events + (i[FIRST_EVENT] + 2 * i[NUM_EVENTS]) % rules.num_event_cells
    i[at] = code
    i[at + 1] = i[SEQUENCE]
    i[SEQUENCE] += 1
    i[NUM_EVENTS] += 1


@helper
def _batch_place(rules: Any, number: int) -> Any:
    return rules.batches + rules.batch_cells * number


@helper
def _schedule_batch(rules: Any, i: Any, f: Any) -> None:
    if i[RUNNING_BATCHES] >= rules.num_stages or i[RUNNING_STAGES] != 0:
        return
    if form_batch(rules, i, f, _batch_place(rules, i[NEWEST_BATCH])) == 0:
        return
    i[NEWEST_BATCH] = (i[NEWEST_BATCH] + 1) % rules.num_stages
    i[RUNNING_BATCHES] += 1
    i[RUNNING_STAGES] += 1
    _push(rules, i, STAGE_ARRIVAL * MAX_STAGES)


@helper
def _start_stage(
    rules: Any, layers: Any, slopes: Any, lines: Any, slowness: float, i: Any, f: Any, signals: Any, stage: int
) -> bool:
    """Let a stage begin with its next batch, if there is one; False if the time of the batch is unknown."""
    if f[stage + END_S] != math.inf or i[stage + NUM_WAITING] == 0:
        return True
    batch = _batch_place(rules, i[stage + NEXT_BATCH])
    if stage == FIRST_STAGE and not time_batch(rules, layers, slopes, lines, slowness, i, f, signals, batch):
        return False
    is_last = stage == FIRST_STAGE + STAGE_CELLS * (rules.num_stages - 1)
    f[stage + END_S] = f[NOW] + (f[batch + LAST_S] if is_last else f[batch + MIDDLE_S])
    i[stage + NEXT_BATCH] = (i[stage + NEXT_BATCH] + 1) % rules.num_stages
    i[stage + NUM_WAITING] -= 1
    i[stage + END_ORDER] = i[SEQUENCE]
    i[SEQUENCE] += 1
    return True


@helper
def _end_stage(rules: Any, i: Any, f: Any, stage: int) -> None:
    f[stage + END_S] = math.inf
    number = (stage - FIRST_STAGE) // STAGE_CELLS
    _push(rules, i, STAGE_SCHEDULE * MAX_STAGES + number)
    if number == rules.num_stages - 1:
        _push(rules, i, BATCH_END * MAX_STAGES)
    else:
        _push(rules, i, STAGE_ARRIVAL * MAX_STAGES + number + 1)
    if number == 0:
        i[RUNNING_STAGES] -= 1
        _push(rules, i, REPLICA_SCHEDULE * MAX_STAGES)


@helper
def _end_batch(rules: Any, i: Any, f: Any, log: Any, signals: Any, row: int) -> bool:
    """Progress of the oldest batch's requests; whoever is not finished becomes idle, or waits for its next chunk.

    False, and nothing has changed, if the log has no room for those that may be finished.
    """
    batch = _batch_place(rules, i[OLDEST_BATCH])
    size = i[batch + SIZE]
    if signals[LOG_SIZE] + size > len(log):
        return False
    i[OLDEST_BATCH] = (i[OLDEST_BATCH] + 1) % rules.num_stages
    i[RUNNING_BATCHES] -= 1
    i[NUM_BATCHES] += 1
    i[NUM_BATCHED_REQUESTS] += size
    prefilled, processed, decoded = 0, 0, 0
    for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * size, 2):
        q, tokens = i[k], i[k + 1]
        if i[q + IS_DECODING]:
            decoded += 1
        else:
            prefilled += tokens
            if i[q + PROCESSED] + tokens == i[q + PREFILL]:
                i[q + IS_DECODING] = 1
                tokens += 1  # the end of prefill yields the first token
                decoded += 1
                if math.isnan(f[q + FIRST_TOKEN]):
                    f[q + FIRST_TOKEN] = f[NOW]
        i[q + PROCESSED] += tokens
        processed += tokens
        if i[q + PROCESSED] == i[q + TOTAL]:
            _complete(i, f, log[signals[LOG_SIZE]], row, q)
            signals[LOG_SIZE] += 1
        elif rules.scheduler == FIXED_CHUNK and not i[q + IS_DECODING]:
            insert_by_arrival(i, f, PARTIAL, q)
        else:
            i[rules.idle + i[NUM_IDLE]] = q
            i[NUM_IDLE] += 1
    i[PREFILL_TOKENS] -= prefilled
    i[CONTEXT_TOKENS] += processed
    i[DECODED_TOKENS] += decoded
    _push(rules, i, REPLICA_SCHEDULE * MAX_STAGES)
    return True


@helper
def _complete(i: Any, f: Any, entry: Any, row: int, q: int) -> None:
    """Take a finished request out of the books and write it into the log."""
    decode_tokens = i[q + TOTAL] - i[q + PROMPT]
    free_blocks(i, q)
    i[OUTSTANDING] -= 1
    i[CONTEXT_TOKENS] -= i[q + PROCESSED]
    i[DECODED_TOKENS] -= decode_tokens
    i[FINISHED] += 1
    i[FINISHED_DECODE_TOKENS] += decode_tokens
    f[RECENT_LATENCY] = moved_average(f[RECENT_LATENCY], f[NOW] - f[q + ARRIVED])
    if decode_tokens > 1:
        f[TOKEN_TIME] = moved_average(f[TOKEN_TIME], (f[NOW] - f[q + FIRST_TOKEN]) / (decode_tokens - 1))
    f[COMPLETION_RATE] = counted_rate(f[COMPLETION_RATE], f[RATE_UPDATED], f[NOW])
    f[RATE_UPDATED] = f[NOW]
    entry[LOG_ID] = i[q + ID]
    entry[LOG_ROW] = row
    entry[LOG_ARRIVED] = f[q + ARRIVED]
    entry[LOG_SCHEDULED] = f[q + SCHEDULED]
    entry[LOG_FIRST_TOKEN] = f[q + FIRST_TOKEN]
    entry[LOG_COMPLETED] = f[NOW]
    entry[LOG_RESTARTS] = i[q + RESTARTS]
    i[q + NEXT] = i[FREE]
    i[FREE] = q
