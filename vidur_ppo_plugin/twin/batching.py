"""How each replica scheduler forms its next batch: Vidur's `_get_next_batch`, line by line. Compiled helpers.

Where Vidur has a list of "preempted" requests (admitted ones that are in no batch), the twin has `idle`: requests are
taken from its front while a batch is formed, victims of preemption from its back.
"""

from typing import Any

from .compiled import helper
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
    SIZE,
)
from .queues import (
    add_to_batch,
    admit,
    blocks_for,
    extend,
    insert_by_arrival,
    move,
    push_front,
    remove_after,
    restart,
    sort_by_arrival,
)

# How many requests of a queue fixed_chunk looks past (MAX_NUM_SKIPPED_REQUESTS in Vidur).
_MAX_SKIPPED = 10


@helper
def form_batch(rules: Any, i: Any, f: Any, batch: int) -> Any:
    """Fill a batch with the requests that run next; how many they are."""
    i[batch + SIZE] = 0
    if rules.scheduler == SARATHI:
        _sarathi(rules, i, f, batch)
    elif rules.scheduler == FIXED_CHUNK:
        _fixed_chunk(rules, i, f, batch)
    elif rules.scheduler == ORCA:
        _orca(rules, i, f, batch)
    else:
        _vllm(rules, i, f, batch)
    return i[batch + SIZE]


@helper
def _fits(rules: Any, i: Any, tokens: int) -> Any:
    """Whether a new request's prompt fits into the cache above the watermark."""
    return rules.num_blocks - i[KV_USED] - blocks_for(rules, tokens) >= rules.watermark_blocks


@helper
def _make_room(rules: Any, i: Any, f: Any, q: int, first: int, last: int) -> int:
    """Preempt idle requests from the back until a block is free; the new end of the list, -1 if `q` fell too.

    sarathi and vllm put victims at the front of the queue, fixed_chunk in their place by arrival.
    """
    while rules.num_blocks - i[KV_USED] < 1:
        victim = i[last - 1] if last > first else q
        restart(i, victim)
        if rules.scheduler == FIXED_CHUNK:
            insert_by_arrival(i, f, QUEUE, victim)
        else:
            push_front(i, QUEUE, victim)
        if last == first:
            return -1
        last -= 1
    return last


@helper
def _sarathi(rules: Any, i: Any, f: Any, batch: int) -> None:
    """Decodes first, then begun prompts, then new ones, up to a chunk of tokens."""
    first = rules.idle
    last = first + i[NUM_IDLE]
    num_tokens = 0
    prefills_end = first  # begun prompts are kept where the requests before them were taken from
    while first < last and i[batch + SIZE] != rules.max_batch_size:
        q = i[first]
        first += 1
        if not i[q + IS_DECODING]:
            i[prefills_end] = q
            prefills_end += 1
            continue
        last = _make_room(rules, i, f, q, first, last)
        if last < 0:
            last = first
            continue
        extend(rules, i, q)
        add_to_batch(i, f, batch, q, 1)
        num_tokens += 1
    skipped_end = rules.idle
    for k in range(rules.idle, prefills_end):
        q = i[k]
        tokens = _chunk(rules, i, q, num_tokens)
        if tokens == 0:
            i[skipped_end] = q
            skipped_end += 1
        else:
            add_to_batch(i, f, batch, q, tokens)
            num_tokens += tokens
    i[NUM_IDLE] = move(i, skipped_end, first, last) - rules.idle
    sort_by_arrival(i, f, rules.idle, i[NUM_IDLE])
    while i[QUEUE] >= 0 and i[ADMITTED] != rules.max_admitted and i[batch + SIZE] != rules.max_batch_size:
        q = i[QUEUE]
        tokens = _chunk(rules, i, q, num_tokens)
        if tokens == 0 or not _fits(rules, i, i[q + PREFILL]):
            break
        remove_after(i, QUEUE, -1)
        admit(i, q, blocks_for(rules, i[q + PREFILL]))
        add_to_batch(i, f, batch, q, tokens)
        num_tokens += tokens


@helper
def _chunk(rules: Any, i: Any, q: int, num_tokens: int) -> Any:
    """How many tokens of a prompt fit into a batch that has num_tokens."""
    return max(0, min(i[q + PREFILL] - i[q + PROCESSED], rules.max_batch_tokens - num_tokens))


@helper
def _vllm(rules: Any, i: Any, f: Any, batch: int) -> None:
    """Whole prompts of new requests if any fit, otherwise decodes."""
    num_tokens = 0
    while i[QUEUE] >= 0 and i[ADMITTED] != rules.max_admitted and i[batch + SIZE] != rules.max_batch_size:
        q = i[QUEUE]
        prompt_tokens = i[q + PREFILL]
        if not _fits(rules, i, prompt_tokens) or num_tokens + prompt_tokens > rules.max_batch_tokens:
            break
        remove_after(i, QUEUE, -1)
        admit(i, q, blocks_for(rules, prompt_tokens))
        add_to_batch(i, f, batch, q, prompt_tokens)
        num_tokens += prompt_tokens
    if i[batch + SIZE] == 0:
        sort_by_arrival(i, f, rules.idle, i[NUM_IDLE])
        _add_decodes(rules, i, f, batch)


@helper
def _add_decodes(rules: Any, i: Any, f: Any, batch: int) -> None:
    """Add idle requests, each decoding a token, in their order; preempt others where memory is short."""
    first = rules.idle
    last = first + i[NUM_IDLE]
    while first < last and i[batch + SIZE] != rules.max_batch_size:
        q = i[first]
        first += 1
        last = _make_room(rules, i, f, q, first, last)
        if last < 0:
            last = first
            continue
        extend(rules, i, q)
        add_to_batch(i, f, batch, q, 1)
    i[NUM_IDLE] = move(i, rules.idle, first, last) - rules.idle


@helper
def _orca(rules: Any, i: Any, f: Any, batch: int) -> None:
    """Decodes, then whole prompts; every request gets the blocks of the longest one, so nobody is preempted."""
    first = rules.idle
    last = first + i[NUM_IDLE]
    while first < last and i[batch + SIZE] != rules.max_batch_size:
        add_to_batch(i, f, batch, i[first], 1)
        first += 1
    i[NUM_IDLE] = move(i, rules.idle, first, last) - rules.idle
    while i[QUEUE] >= 0 and i[batch + SIZE] != rules.max_batch_size:
        if rules.num_blocks - i[KV_USED] < rules.reserved_blocks:
            break
        q = remove_after(i, QUEUE, -1)
        admit(i, q, rules.reserved_blocks)
        add_to_batch(i, f, batch, q, i[q + PREFILL])


@helper
def _fixed_chunk(rules: Any, i: Any, f: Any, batch: int) -> None:
    """Decodes, then begun prompts, then new ones, up to a chunk of tokens."""
    _add_decodes(rules, i, f, batch)
    num_tokens = _add_prompts(rules, i, f, batch, PARTIAL, i[batch + SIZE])
    _add_prompts(rules, i, f, batch, QUEUE, num_tokens)


@helper
def _add_prompts(rules: Any, i: Any, f: Any, batch: int, which: int, num_tokens: int) -> int:
    """Add chunks of the prompts in a list, looking past those that do not fit; tokens of the batch then.

    A request may be admitted although the batch has no tokens left for it: it then waits in the queue, with blocks.
    """
    num_skipped, before, q = 0, -1, i[which]
    while q >= 0 and num_skipped < _MAX_SKIPPED:
        after = i[q + NEXT]
        tokens = 0
        if i[batch + SIZE] < rules.max_batch_size:
            prompt_tokens = i[q + PREFILL]
            may_come_in = i[q + BLOCKS] == 0 and i[ADMITTED] != rules.max_admitted
            if may_come_in and prompt_tokens <= rules.max_prompt_tokens and _fits(rules, i, prompt_tokens):
                admit(i, q, blocks_for(rules, prompt_tokens))
            if i[q + BLOCKS] > 0:
                tokens = _chunk(rules, i, q, num_tokens)
        if tokens == 0:
            num_skipped += 1
            before = q
        else:
            remove_after(i, which, before)
            add_to_batch(i, f, batch, q, tokens)
            num_tokens += tokens
        q = after
    return num_tokens
