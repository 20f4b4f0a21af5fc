"""A shortcut through iterations in which nothing happens but decoding. Compiled helper.

While nobody waits, nobody finishes and memory suffices, a one-stage replica runs the same batch again and again; only
the context grows. Then each iteration is a handful of operations, the same ones that the event machine would make, and
the requests are brought up to date at the end. Most iterations of most runs are of that kind.
"""

from typing import Any

from .compiled import helper
from .layout import (
    ADMITTED,
    BATCH_HEADER,
    BLOCKS,
    CONTEXT_TOKENS,
    DECODED_TOKENS,
    END_S,
    FIRST_STAGE,
    IS_DECODING,
    KV_USED,
    NUM_BATCHED_REQUESTS,
    NUM_BATCHES,
    OLDEST_BATCH,
    ORCA,
    PROCESSED,
    QUEUE,
    SIZE,
    TOTAL,
)
from .queues import blocks_for
from .timing import MS, layers_ms


@helper
def skip_steady(rules: Any, layers: Any, slopes: Any, slowness: float, i: Any, f: Any, until_s: float) -> None:
    """Go on to the last iteration of the running batch that ends before `until_s` or completes a request."""
    batch = rules.batches + rules.batch_cells * i[OLDEST_BATCH]
    size = i[batch + SIZE]
    if i[QUEUE] >= 0 or i[ADMITTED] != size:
        return
    num_left = _iterations_left(rules, i, batch, size)
    num_skipped, end_s, context_tokens = 0, f[FIRST_STAGE + END_S], i[CONTEXT_TOKENS]
    while num_skipped < num_left - 1 and end_s < until_s:
        context_tokens += size
        num_skipped += 1
        decode_ms = rules.decode_launch_ms + context_tokens * slopes[size]
        end_s += layers_ms(rules, layers, size, decode_ms * slowness, 0.0) * MS
    if num_skipped == 0:
        return
    f[FIRST_STAGE + END_S] = end_s
    i[CONTEXT_TOKENS] = context_tokens
    i[DECODED_TOKENS] += num_skipped * size
    i[NUM_BATCHES] += num_skipped
    i[NUM_BATCHED_REQUESTS] += num_skipped * size
    for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * size, 2):
        q = i[k]
        i[q + PROCESSED] += num_skipped
        if rules.scheduler != ORCA:
            added = max(0, blocks_for(rules, i[q + PROCESSED]) - i[q + BLOCKS])
            i[q + BLOCKS] += added
            i[KV_USED] += added


@helper
def _iterations_left(rules: Any, i: Any, batch: int, size: int) -> Any:
    """How often the batch will run, the present time included, until a request is finished; 1 if memory is short."""
    num_left = 1 << 62
    for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * size, 2):
        q = i[k]
        if not i[q + IS_DECODING]:
            return 1
        num_left = min(num_left, i[q + TOTAL] - i[q + PROCESSED])
    if rules.scheduler == ORCA:
        return num_left
    free = rules.num_blocks - i[KV_USED]
    # Enough for every request to begin as many blocks as it can.
    if free > size * (blocks_for(rules, num_left) + 1):
        return num_left
    for k in range(batch + BATCH_HEADER, batch + BATCH_HEADER + 2 * size, 2):
        q = i[k]
        free -= max(0, blocks_for(rules, i[q + PROCESSED] + num_left - 1) - i[q + BLOCKS])
    return num_left if free >= 1 else 1
