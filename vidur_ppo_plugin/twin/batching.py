"""How each replica scheduler forms its next batch: Vidur's `_get_next_batch`, line by line. Compiled helpers.

Where Vidur has a list of "preempted" requests (admitted ones that are in no batch), the twin has `idle`: requests are
taken from its front while a batch is formed, victims of preemption from its back.
"""

from typing import Any

from .compiling import helper
from .layout import (
    ADMITTED,
    BLOCKS,
    FIXED_CHUNK,
    IS_DECODING,
    KV_USED,
    NEXT,
    NUM_IDLE,
    ORCA,
    PARTIAL,
    PREFILL,
    PROCESSED,
    QUEUE,
    SARATHI,
)
from .queues import (
    add_to_batch,
    admit,
    blocks_for,
    extend,
    insert_by_arrival,
    keep_idle,
    push_front,
    remove_after,
    restart,
    sort_idle,
)

# How many requests of a queue fixed_chunk looks past (MAX_NUM_SKIPPED_REQUESTS in Vidur).
_MAX_SKIPPED = 10


@helper
def form_batch(rules: Any, state: Any, row: int, batch: int) -> int:
    """Fill a batch with the requests that run next; how many they are."""
    state.batch_sizes[row, batch] = 0
    if rules.scheduler == SARATHI:
        _sarathi(rules, state, row, batch)
    elif rules.scheduler == FIXED_CHUNK:
        _fixed_chunk(rules, state, row, batch)
    elif rules.scheduler == ORCA:
        _orca(rules, state, row, batch)
    else:
        _vllm(rules, state, row, batch)
    return state.batch_sizes[row, batch]  # type: ignore[no-any-return]


@helper
def _fits(rules: Any, state: Any, row: int, tokens: int) -> bool:
    """Whether a new request's prompt fits into the cache above the watermark."""
    free = rules.num_blocks - state.counters[row, KV_USED]
    return free - blocks_for(rules, tokens) >= rules.watermark_blocks  # type: ignore[no-any-return]


@helper
def _make_room(rules: Any, state: Any, row: int, slot: int, first: int, last: int) -> int:
    """Preempt idle requests from the back until a block is free; the new end of the list, -1 if `slot` fell too.

    sarathi and vllm put victims at the front of the queue, fixed_chunk in their place by arrival.
    """
    while rules.num_blocks - state.counters[row, KV_USED] < 1:
        victim = state.idle[row, last - 1] if last > first else slot
        restart(state, row, victim)
        if rules.scheduler == FIXED_CHUNK:
            insert_by_arrival(state, row, QUEUE, victim)
        else:
            push_front(state, row, QUEUE, victim)
        if last == first:
            return -1
        last -= 1
    return last


@helper
def _sarathi(rules: Any, state: Any, row: int, batch: int) -> None:
    """Decodes first, then begun prompts, then new ones, up to a chunk of tokens."""
    requests, counters, idle = state.requests, state.counters, state.idle
    first, last, num_tokens = 0, counters[row, NUM_IDLE], 0
    num_prefills = 0  # begun prompts are kept where the requests before them were taken from
    while first < last and state.batch_sizes[row, batch] != rules.max_batch_size:
        slot = idle[row, first]
        first += 1
        if not requests[row, slot, IS_DECODING]:
            idle[row, num_prefills] = slot
            num_prefills += 1
            continue
        end = _make_room(rules, state, row, slot, first, last)
        if end < 0:
            last = first
            continue
        last = end
        extend(rules, state, row, slot)
        add_to_batch(state, row, batch, slot, 1)
        num_tokens += 1
    num_skipped = 0
    for i in range(num_prefills):
        slot = idle[row, i]
        tokens = _chunk(rules, state, row, slot, num_tokens)
        if tokens == 0:
            idle[row, num_skipped] = slot
            num_skipped += 1
        else:
            add_to_batch(state, row, batch, slot, tokens)
            num_tokens += tokens
    counters[row, NUM_IDLE] = keep_idle(state, row, num_skipped, first, last)
    sort_idle(state, row, counters[row, NUM_IDLE])
    while counters[row, QUEUE] >= 0:
        slot = counters[row, QUEUE]
        if counters[row, ADMITTED] == rules.max_admitted or state.batch_sizes[row, batch] == rules.max_batch_size:
            break
        tokens = _chunk(rules, state, row, slot, num_tokens)
        if tokens == 0 or not _fits(rules, state, row, requests[row, slot, PREFILL]):
            break
        remove_after(state, row, QUEUE, -1)
        admit(state, row, slot, blocks_for(rules, requests[row, slot, PREFILL]))
        add_to_batch(state, row, batch, slot, tokens)
        num_tokens += tokens


@helper
def _chunk(rules: Any, state: Any, row: int, slot: int, num_tokens: int) -> int:
    """How many tokens of a prompt fit into a batch that has num_tokens."""
    left = state.requests[row, slot, PREFILL] - state.requests[row, slot, PROCESSED]
    return max(0, min(left, rules.max_batch_tokens - num_tokens))


@helper
def _vllm(rules: Any, state: Any, row: int, batch: int) -> None:
    """Whole prompts of new requests if any fit, otherwise decodes."""
    requests, counters = state.requests, state.counters
    num_tokens = 0
    while counters[row, QUEUE] >= 0:
        slot = counters[row, QUEUE]
        prompt_tokens = requests[row, slot, PREFILL]
        if not _fits(rules, state, row, prompt_tokens) or num_tokens + prompt_tokens > rules.max_batch_tokens:
            break
        if counters[row, ADMITTED] == rules.max_admitted or state.batch_sizes[row, batch] == rules.max_batch_size:
            break
        remove_after(state, row, QUEUE, -1)
        admit(state, row, slot, blocks_for(rules, prompt_tokens))
        add_to_batch(state, row, batch, slot, prompt_tokens)
        num_tokens += prompt_tokens
    if state.batch_sizes[row, batch] == 0:
        sort_idle(state, row, counters[row, NUM_IDLE])
        _add_decodes(rules, state, row, batch)


@helper
def _add_decodes(rules: Any, state: Any, row: int, batch: int) -> None:
    """Add idle requests, each decoding a token, in their order; preempt others where memory is short."""
    first, last = 0, state.counters[row, NUM_IDLE]
    while first < last and state.batch_sizes[row, batch] != rules.max_batch_size:
        slot = state.idle[row, first]
        first += 1
        end = _make_room(rules, state, row, slot, first, last)
        if end < 0:
            last = first
            continue
        last = end
        extend(rules, state, row, slot)
        add_to_batch(state, row, batch, slot, 1)
    state.counters[row, NUM_IDLE] = keep_idle(state, row, 0, first, last)


@helper
def _orca(rules: Any, state: Any, row: int, batch: int) -> None:
    """Decodes, then whole prompts; every request gets the blocks of the longest one, so nobody is preempted."""
    counters = state.counters
    first, last = 0, counters[row, NUM_IDLE]
    while first < last and state.batch_sizes[row, batch] != rules.max_batch_size:
        add_to_batch(state, row, batch, state.idle[row, first], 1)
        first += 1
    counters[row, NUM_IDLE] = keep_idle(state, row, 0, first, last)
    while counters[row, QUEUE] >= 0 and state.batch_sizes[row, batch] != rules.max_batch_size:
        if rules.num_blocks - counters[row, KV_USED] < rules.reserved_blocks:
            break
        slot = remove_after(state, row, QUEUE, -1)
        admit(state, row, slot, rules.reserved_blocks)
        add_to_batch(state, row, batch, slot, state.requests[row, slot, PREFILL])


@helper
def _fixed_chunk(rules: Any, state: Any, row: int, batch: int) -> None:
    """Decodes, then begun prompts, then new ones, up to a chunk of tokens."""
    _add_decodes(rules, state, row, batch)
    num_tokens = state.batch_sizes[row, batch]
    num_tokens = _add_prompts(rules, state, row, batch, PARTIAL, num_tokens)
    _add_prompts(rules, state, row, batch, QUEUE, num_tokens)


@helper
def _add_prompts(rules: Any, state: Any, row: int, batch: int, which: int, num_tokens: int) -> int:
    """Add chunks of the prompts in a list, looking past those that do not fit; tokens of the batch then.

    A request may be admitted although the batch has no tokens left for it: it then waits in the queue, with blocks.
    """
    requests, counters = state.requests, state.counters
    num_skipped, before, slot = 0, -1, counters[row, which]
    while slot >= 0 and num_skipped < _MAX_SKIPPED:
        after = requests[row, slot, NEXT]
        is_new = requests[row, slot, BLOCKS] == 0
        tokens = 0
        if not (is_new and counters[row, ADMITTED] == rules.max_admitted):
            if state.batch_sizes[row, batch] < rules.max_batch_size:
                prompt_tokens = requests[row, slot, PREFILL]
                fits = prompt_tokens <= rules.max_prompt_tokens and _fits(rules, state, row, prompt_tokens)
                if is_new and fits:
                    admit(state, row, slot, blocks_for(rules, prompt_tokens))
                if fits or not is_new:
                    tokens = _chunk(rules, state, row, slot, num_tokens)
        if tokens == 0:
            num_skipped += 1
            before = slot
        else:
            remove_after(state, row, which, before)
            add_to_batch(state, row, batch, slot, tokens)
            num_tokens += tokens
        slot = after
    return num_tokens
