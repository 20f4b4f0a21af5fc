"""Marginal delay at latency power 1 in one compiled pass; `marginal_delay` has the same in numpy, for any power."""

import math
from typing import Any

import numpy as np

from .compiled import compilable, compiled


@compilable
def _chunks_s(iterations: float, tokens: float, chunk_tokens: float, token_s: float, iteration_s: float) -> float:
    """What the prefill of so many tokens adds to the first so many iterations: full chunks, then the rest."""
    full = tokens // chunk_tokens
    added_s = min(iterations, full) * max(0.0, token_s * chunk_tokens - iteration_s)
    if iterations > full:
        added_s += max(0.0, token_s * (tokens - full * chunk_tokens) - iteration_s)
    return added_s


@compilable
def _decode_s(iterations: float, context_tokens: float, request_s: float, context_s: float) -> float:
    """What a request adds to the iterations in which it decodes, its context growing by one after each."""
    return iterations * (request_s + context_s * (context_tokens + 0.5 * (iterations - 1.0)))


def increase(
    prefill_tokens: Any,
    decode_tokens: Any,
    context_tokens: Any,
    counts: Any,
    speeds: Any,
    new_prompt: float,
    new_decode: float,
    backlog_weight: float,
    token_s: float,
    iteration_s: float,
    request_s: float,
    context_s: float,
    chunk_tokens: float,
) -> Any:
    """What placing the new request on each replica adds; the costs are those of `DrainCost`."""
    result = np.empty(counts.size)
    first = 0
    for replica in range(counts.size):
        last = first + counts[replica]
        queued = 0.0
        for k in range(first, last):
            queued += prefill_tokens[k]
        all_tokens = queued + new_prompt
        start = math.ceil(all_tokens / chunk_tokens)
        end = start + new_decode
        total_s = end * iteration_s + _chunks_s(end, all_tokens, chunk_tokens, token_s, iteration_s)
        total_s += _decode_s(new_decode, new_prompt, request_s, context_s)
        prefilled = 0.0
        for k in range(first, last):
            prefilled += prefill_tokens[k]
            its_start = math.ceil(prefilled / chunk_tokens) if prefill_tokens[k] > 0.0 else 0.0
            its_end = its_start + decode_tokens[k]
            alongside = min(max(end - its_start, 0.0), decode_tokens[k])
            total_s += _decode_s(alongside, context_tokens[k] + prefill_tokens[k], request_s, context_s)
            total_s += _decode_s(min(max(its_end - start, 0.0), new_decode), new_prompt, request_s, context_s)
            total_s += _chunks_s(its_end, all_tokens, chunk_tokens, token_s, iteration_s)
            total_s -= _chunks_s(its_end, queued, chunk_tokens, token_s, iteration_s)
        added_s = new_prompt * token_s / speeds[replica]
        backlog_s = queued * token_s / speeds[replica]
        result[replica] = total_s / speeds[replica] + backlog_weight * added_s * (2.0 * backlog_s + added_s)
        first = last
    return result


increase_compiled = compiled(increase)
