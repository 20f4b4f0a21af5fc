"""How long everybody on a replica still takes if nobody else arrives, in a few dozen steps. Compiled helper.

The event machine makes a step an iteration and touches every request of its batch. Here, an iteration with prompts in
it costs a handful of operations, and iterations that only decode are summed up to the next completion: contexts grow by
one token an iteration, so their times form an arithmetic series. Sums are made in another order than Vidur's, so
results differ in the last digits (see tests/twin/test_drain.py); use it for credit, not for outcomes.

Covered is what is usual: one stage, sarathi or fixed_chunk, and no more requests than fit into a batch and into memory,
so that nobody waits for room or is preempted. For everything else the answer is NaN, and the event machine must do it.
"""

import math
from typing import Any

from .compiled import helper
from .layout import (
    ARRIVED,
    BATCH_HEADER,
    END_S,
    FIRST_STAGE,
    FIXED_CHUNK,
    IS_DECODING,
    NEXT,
    NUM_EVENTS,
    NUM_IDLE,
    OLDEST_BATCH,
    OUTSTANDING,
    PARTIAL,
    PREFILL,
    PROCESSED,
    QUEUE,
    RUNNING_BATCHES,
    SARATHI,
    SIZE,
    TOTAL,
)
from .queues import blocks_for
from .timing import MS, layers_ms

# Columns of the two lists of requests: prompts, in the order in which they are prefilled, and decodes, in the order in
# which they finish. END: the number of the iteration that completes it; LEFT: prompt tokens to prefill.
LEFT, CACHED, LENGTH, ARRIVED_AT = range(4)
END = 0


@helper
def drained(
    rules: Any, times: Any, speed: int, i: Any, f: Any, now_s: float, prompt: int, output: int, power: float, work: Any
) -> Any:
    """Sum of latency ** power of a replica's requests, with one more that arrives now; as it is if `prompt` is 0.

    NaN if that is not covered. `work`: any memory of at least four columns and two rows for each request.
    """
    half = len(work) // 2
    if not _is_covered(rules, i, prompt, output, half):
        return math.nan
    prompts, decodes = work[:half], work[half:]
    layers, slopes, slowness = times.layers[speed], times.decode_slopes, times.slowness[speed]
    total, num_prompts, num_decodes, context = _collect(rules, i, f, power, prompts, decodes)
    clock_s = f[FIRST_STAGE + END_S] if i[RUNNING_BATCHES] > 0 else now_s
    if prompt > 0:
        row = prompts[num_prompts]
        row[LEFT], row[CACHED], row[LENGTH], row[ARRIVED_AT] = prompt, 0, prompt + output, now_s
        num_prompts += 1
    # Prompts from `first` on are not prefilled, decodes from `done` on are not finished.
    iteration, first, done = 0, 0, 0
    while first < num_prompts or done < num_decodes:
        running, steps = num_decodes - done, 1
        if first == num_prompts:
            steps = int(decodes[done, END]) - iteration
            if running >= len(slopes):
                return math.nan
            mean_context = context + 0.5 * running * (steps - 1)
            decode_ms = (rules.decode_launch_ms + mean_context * slopes[running]) * slowness
            clock_s += steps * layers_ms(rules, layers, running, decode_ms, 0.0) * MS
        else:
            clock_s += _mixed_s(rules, times, speed, prompts[first:num_prompts], running, context)
        if math.isnan(clock_s):  # a table lacks an entry
            return math.nan
        iteration += steps
        context += running * steps
        while done < num_decodes and decodes[done, END] <= iteration:
            total += _raised(clock_s - decodes[done, ARRIVED_AT], power)
            context -= decodes[done, LENGTH]
            done += 1
        while first < num_prompts and prompts[first, LEFT] == 0:
            row = prompts[first]
            left = row[LENGTH] - row[CACHED] - 1  # the end of prefill yields the first token
            if left == 0:
                total += _raised(clock_s - row[ARRIVED_AT], power)
            else:
                _insert(decodes, done, num_decodes, iteration + left, row[LENGTH], row[ARRIVED_AT])
                num_decodes += 1
                context += row[CACHED] + 1
            first += 1
    return total


@helper
def _collect(rules: Any, i: Any, f: Any, power: float, prompts: Any, decodes: Any) -> Any:
    """The requests of a replica as they are when the running batch ends.

    Returns the sum for those that it completes, the numbers of prompts and of decodes, and the decodes' context.
    """
    total, num_prompts, num_decodes, context = 0.0, 0, 0, 0.0
    if i[RUNNING_BATCHES] > 0:
        end_s = f[FIRST_STAGE + END_S]
        batch = rules.batches + rules.batch_cells * i[OLDEST_BATCH]
        for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * i[batch + SIZE], 2):
            q = i[k]
            processed = i[q + PROCESSED] + i[k + 1]
            if not i[q + IS_DECODING]:
                if processed < i[q + PREFILL]:
                    _add_prompt(i, f, q, processed, prompts[num_prompts])
                    num_prompts += 1
                    continue
                processed += 1
            if processed == i[q + TOTAL]:
                total += _raised(end_s - f[q + ARRIVED], power)
                continue
            _insert(decodes, 0, num_decodes, i[q + TOTAL] - processed, i[q + TOTAL], f[q + ARRIVED])
            num_decodes += 1
            context += processed
    for k in range(rules.idle, rules.idle + i[NUM_IDLE]):
        q = i[k]
        if i[q + IS_DECODING]:
            _insert(decodes, 0, num_decodes, i[q + TOTAL] - i[q + PROCESSED], i[q + TOTAL], f[q + ARRIVED])
            num_decodes += 1
            context += i[q + PROCESSED]
        else:
            _add_prompt(i, f, q, i[q + PROCESSED], prompts[num_prompts])
            num_prompts += 1
    for which in (PARTIAL, QUEUE):
        q = i[which]
        while q >= 0:
            _add_prompt(i, f, q, i[q + PROCESSED], prompts[num_prompts])
            num_prompts += 1
            q = i[q + NEXT]
    return total, num_prompts, num_decodes, context


@helper
def _mixed_s(rules: Any, times: Any, speed: int, prompts: Any, running: int, context: float) -> Any:
    """Seconds of an iteration with the decodes that run and as much of the prompts as fits; takes it off them."""
    layers, slopes, lines = times.layers[speed], times.decode_slopes, times.prefill_lines
    budget, num_tokens, num_decodes, prefill_ms = rules.max_batch_tokens - running, running, running, 0.0
    for k in range(len(prompts)):
        tokens, cached = int(min(prompts[k, LEFT], budget)), prompts[k, CACHED]
        if tokens == 0:
            break
        if tokens == 1:  # Vidur takes it for a decode
            num_decodes += 1
            context += cached
        elif tokens >= len(lines):
            return math.nan
        elif cached < lines[tokens, 0]:
            prefill_ms += lines[tokens, 1] + lines[tokens, 2] * cached
        else:  # also where the table has no entry yet: the sum is NaN then
            prefill_ms += lines[tokens, 3] + lines[tokens, 4] * cached
        budget -= tokens
        num_tokens += tokens
        prompts[k, LEFT] -= tokens
        prompts[k, CACHED] += tokens
    if num_decodes >= len(slopes) or num_tokens >= len(layers):
        return math.nan
    decode_ms = rules.decode_launch_ms + context * slopes[num_decodes] if num_decodes > 0 else 0.0
    slowness = times.slowness[speed]
    return layers_ms(rules, layers, num_tokens, decode_ms * slowness, prefill_ms * slowness) * MS


@helper
def _is_covered(rules: Any, i: Any, prompt: int, output: int, room: int) -> Any:
    if rules.num_stages != 1 or (rules.scheduler != SARATHI and rules.scheduler != FIXED_CHUNK):
        return False
    if i[NUM_EVENTS] > 0 and i[RUNNING_BATCHES] > 0:
        return False
    num_requests = i[OUTSTANDING] + 1
    if num_requests > min(rules.max_admitted, rules.max_batch_size, rules.max_batch_tokens - 1) or num_requests > room:
        return False
    num_blocks, num_begun = blocks_for(rules, prompt + output) + 1, 0
    if prompt > rules.max_prompt_tokens:
        return False
    if i[RUNNING_BATCHES] > 0:
        batch = rules.batches + rules.batch_cells * i[OLDEST_BATCH]
        for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * i[batch + SIZE], 2):
            q = i[k]
            num_blocks += blocks_for(rules, i[q + TOTAL]) + 1
            num_begun += not i[q + IS_DECODING] and i[q + PROCESSED] + i[k + 1] < i[q + PREFILL]
    for k in range(rules.idle, rules.idle + i[NUM_IDLE]):
        q = i[k]
        num_blocks += blocks_for(rules, i[q + TOTAL]) + 1
        num_begun += not i[q + IS_DECODING]
    for which in (PARTIAL, QUEUE):
        q = i[which]
        while q >= 0:
            num_blocks += blocks_for(rules, i[q + TOTAL]) + 1
            num_begun += which == PARTIAL
            q = i[q + NEXT]
    # The order of several begun prompts depends on more than is looked at here.
    return num_begun <= 1 and num_blocks <= rules.num_blocks - rules.watermark_blocks


@helper
def _add_prompt(i: Any, f: Any, q: int, processed: int, row: Any) -> None:
    row[LEFT] = i[q + PREFILL] - processed
    row[CACHED] = processed
    row[LENGTH] = i[q + TOTAL]
    row[ARRIVED_AT] = f[q + ARRIVED]


@helper
def _insert(decodes: Any, first: int, last: int, end: float, length: float, arrived_s: float) -> None:
    """Put a request in its place among those that finish from `first` to `last`."""
    at = last
    while at > first and decodes[at - 1, END] > end:
        decodes[at] = decodes[at - 1]
        at -= 1
    decodes[at, END], decodes[at, LENGTH], decodes[at, ARRIVED_AT] = end, length, arrived_s


@helper
def _raised(latency_s: float, power: float) -> Any:
    return latency_s if power == 1.0 else latency_s**power
