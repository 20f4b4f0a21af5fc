"""Marginal delay by a linear model of costs: what placing a request on each replica adds to everybody's remaining time.

For training credit only: it knows the true output lengths of the requests in flight.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vidur_ppo_plugin.flags import require_value
from vidur_ppo_plugin.hardware import Roofline
from vidur_ppo_plugin.routing.compiled import compilable, compiled
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.snapshot import FloatArray

_NOTHING = np.empty(0)


@dataclass(frozen=True, kw_only=True)
class DrainCost:
    """What work costs on a replica of speed 1, in seconds."""

    prefill_s_per_token: float
    iteration_s: float  # what a decode iteration takes in any case: reading the weights
    iteration_s_per_request: float
    iteration_s_per_context_token: float
    prefill_chunk_tokens: int = 512  # prompt tokens that one iteration takes along

    def __post_init__(self) -> None:
        """Refuse negative costs."""
        for item in fields(self):
            least = 1 if item.name == "prefill_chunk_tokens" else 0
            value = getattr(self, item.name)
            require_value(least <= value < math.inf, item.name, value, f"finite and >= {least}")

    @classmethod
    def from_roofline(cls, roofline: Roofline, chunk_size: int) -> "DrainCost":
        """What a roofline says of replicas that prefill in chunks of `chunk_size` tokens."""
        slopes = DelayModel.from_roofline(roofline, chunk_size)
        stage_ms = roofline.stage_time_ms([1], [0], is_last_stage=True)
        return cls(
            prefill_s_per_token=slopes.prefill_s_per_token,
            iteration_s=stage_ms * roofline.num_pipeline_stages * 1e-3,
            iteration_s_per_request=slopes.iteration_s_per_request,
            iteration_s_per_context_token=slopes.iteration_s_per_context_token,
            prefill_chunk_tokens=chunk_size,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterWork:
    """The requests in flight, replica after replica, each in service order; it knows their true output lengths.

    One array for all replicas: a numpy call costs more than the few numbers of one replica.
    """

    prefill_tokens: FloatArray  # prompt tokens still to prefill, 0 for those that decode
    decode_tokens: FloatArray  # iterations still to decode
    context_tokens: FloatArray  # tokens in context now
    ages_s: FloatArray
    counts: NDArray[np.intp]  # requests of each replica


def marginal_delay(
    work: ClusterWork,
    *,
    prompt_tokens: float,
    decode_tokens: float,
    speed: ArrayLike,
    cost: DrainCost,
    latency_power: float = 1.0,
    backlog_weight: float = 0.0,
    age_s: float = 0.0,
) -> FloatArray:
    """What placing the request on each replica adds to the total remaining time: its own, and the harm to others.

    As if nobody else arrived: prompts are prefilled first come first served, a chunk an iteration (which then
    takes the chunk's time, at least `iteration_s`), while the others decode a token an iteration. Counted in
    iterations a request at the end of the queue moves nobody; it makes iterations longer, by its prefill for those
    who still run then, by its share and context for those who decode alongside. So all replicas together cost
    O(requests), and a sort if `latency_power` is not 1: then it is the growth of the sum of (age + remaining)^power.
    `backlog_weight` times the growth of (seconds of prefill)^2 stands for the harm to those who come later.

    Within this linear model the result is exact. The model leaves out: limits of memory and batch size, preemption,
    decode tokens taking room in a chunk, and the part of prefill that grows with the square of the prompt.
    """
    require_value(0 < prompt_tokens < math.inf, "prompt_tokens", prompt_tokens, "finite and > 0")
    require_value(0 <= decode_tokens < math.inf, "decode_tokens", decode_tokens, "finite and >= 0")
    speeds = np.asarray(speed, dtype=np.float64)
    if speeds.shape != work.counts.shape:
        speeds = np.full(work.counts.shape, speeds)
    require_value(bool((speeds > 0.0).all()), "speed", speed, "> 0 for each replica")
    require_value(0.0 < latency_power < math.inf, "latency_power", latency_power, "finite and > 0")
    require_value(0.0 <= backlog_weight < math.inf, "backlog_weight", backlog_weight, "finite and >= 0")
    increased: FloatArray = _increase_compiled(
        work.prefill_tokens,
        work.decode_tokens,
        work.context_tokens,
        work.counts,
        speeds,
        work.ages_s,
        _NOTHING if latency_power == 1.0 else _decoding_s(work, cost),
        float(prompt_tokens),
        float(decode_tokens),
        float(age_s),
        float(latency_power),
        float(backlog_weight),
        cost.prefill_s_per_token,
        cost.iteration_s,
        cost.iteration_s_per_request,
        cost.iteration_s_per_context_token,
        float(cost.prefill_chunk_tokens),
    )
    return increased


def _decoding_s(work: ClusterWork, cost: DrainCost) -> FloatArray:
    """Time until each request is done without the new one, but for what prefill adds to it.

    Up to iteration x, one that decodes from b on adds a * (x - b) + k / 2 * (x - b) * (x - b - 1), k being the
    cost of a context token and a that of its first iteration; one that ends takes the same away from a later b
    on, with its longer context. Together: a polynomial in x whose coefficients change at starts and ends.
    """
    counts, prefill_tokens = work.counts, work.prefill_tokens
    replica = np.arange(len(counts)).repeat(counts)  # of each request
    queued = np.bincount(replica, weights=prefill_tokens, minlength=len(counts))
    until_prefilled = prefill_tokens.cumsum() - (queued.cumsum() - queued)[replica]
    starts = np.ceil(until_prefilled / cost.prefill_chunk_tokens) * (prefill_tokens > 0)
    ends = starts + work.decode_tokens
    half_k, first_context = 0.5 * cost.iteration_s_per_context_token, work.context_tokens + prefill_tokens
    contexts = np.concatenate((first_context, first_context + work.decode_tokens))
    points = np.concatenate((starts, ends))
    # Sorted by replica, then by iteration.
    keys = points + np.concatenate((replica, replica)) * (points.max(initial=0.0) + 1.0)
    order = keys.argsort()
    latest = keys[order].searchsorted(keys[ends.size :], side="right")
    points = points[order]
    sign = np.where(order < ends.size, 1.0, -1.0)
    first_s = cost.iteration_s_per_request + half_k * (2.0 * contexts[order] - 1.0)
    point_s = half_k * points
    terms = np.zeros((3, points.size + 1))
    terms[:, 1:] = sign * half_k, sign * (first_s - 2.0 * point_s), sign * (point_s - first_s) * points
    terms = terms.cumsum(axis=1)
    others = 2 * (counts.cumsum() - counts)[replica]  # points of the replicas before this one
    square, linear, constant = terms[:, latest] - terms[:, others]
    decoding_s: FloatArray = (square * ends + linear + cost.iteration_s) * ends + constant
    return decoding_s


# --- The formula ---


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


@compilable
def increase(
    prefill_tokens: Any,
    decode_tokens: Any,
    context_tokens: Any,
    counts: Any,
    speeds: Any,
    ages_s: Any,
    decoding_s: Any,
    new_prompt: float,
    new_decode: float,
    new_age_s: float,
    power: float,
    backlog_weight: float,
    token_s: float,
    iteration_s: float,
    request_s: float,
    context_s: float,
    chunk_tokens: float,
) -> Any:
    """What placing the new request on each replica adds; the costs are those of `DrainCost`.

    `decoding_s`: what `_decoding_s` gives; with power 1 it is not looked at.
    """
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
        # Seconds of the new request and, with power 1, of those that it delays.
        total_s = end * iteration_s + _chunks_s(end, all_tokens, chunk_tokens, token_s, iteration_s)
        total_s += _decode_s(new_decode, new_prompt, request_s, context_s)
        prefilled, growth = 0.0, 0.0
        for k in range(first, last):
            prefilled += prefill_tokens[k]
            its_start = math.ceil(prefilled / chunk_tokens) if prefill_tokens[k] > 0.0 else 0.0
            its_end = its_start + decode_tokens[k]
            alongside = min(max(end - its_start, 0.0), decode_tokens[k])
            total_s += _decode_s(alongside, context_tokens[k] + prefill_tokens[k], request_s, context_s)
            decoding = _decode_s(min(max(its_end - start, 0.0), new_decode), new_prompt, request_s, context_s)
            after = _chunks_s(its_end, all_tokens, chunk_tokens, token_s, iteration_s)
            before = _chunks_s(its_end, queued, chunk_tokens, token_s, iteration_s)
            if power == 1.0:
                total_s += decoding
                total_s += after
                total_s -= before
            else:
                alone_s = ages_s[k] + (decoding_s[k] + before) / speeds[replica]
                growth += (alone_s + (decoding + after - before) / speeds[replica]) ** power - alone_s**power
        added_s = new_prompt * token_s / speeds[replica]
        backlog_s = queued * token_s / speeds[replica]
        own = total_s / speeds[replica]
        if power != 1.0:
            own = (new_age_s + own) ** power + growth
        result[replica] = own + backlog_weight * added_s * (2.0 * backlog_s + added_s)
        first = last
    return result


_increase_compiled = compiled(increase)
