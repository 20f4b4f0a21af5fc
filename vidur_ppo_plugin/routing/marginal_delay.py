"""Marginal delay: what placing a request on each replica adds to everybody's remaining time.

For training credit only: it knows the true output lengths of the requests in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .delay_kernel import increase_compiled
from .reward import require
from .snapshot import FloatArray


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
            require(least <= value < math.inf, item.name, value, f"finite and >= {least}")


@dataclass(frozen=True, kw_only=True)
class ReplicaWork:
    """The requests in flight on one replica, in service order; privileged: it knows their true output lengths."""

    prefill_tokens: FloatArray  # prompt tokens still to prefill, 0 for those that decode
    decode_tokens: FloatArray  # iterations still to decode
    context_tokens: FloatArray  # tokens in context now
    ages_s: FloatArray


@dataclass(frozen=True, kw_only=True)
class ClusterWork:
    """The same of all replicas, one after the other: a numpy call costs more than the few numbers of one replica."""

    prefill_tokens: FloatArray
    decode_tokens: FloatArray
    context_tokens: FloatArray
    ages_s: FloatArray
    counts: NDArray[np.intp]  # requests of each replica

    @classmethod
    def of(cls, replicas: Sequence[ReplicaWork]) -> "ClusterWork":
        """Join the work of several replicas."""
        names = [item.name for item in fields(ReplicaWork)]
        columns = {name: np.concatenate([getattr(work, name) for work in replicas]) for name in names}
        return cls(**columns, counts=np.array([work.prefill_tokens.size for work in replicas], dtype=np.intp))


def marginal_delay(
    replicas: Sequence[ReplicaWork] | ClusterWork,
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
    require(0 < prompt_tokens < math.inf, "prompt_tokens", prompt_tokens, "finite and > 0")
    require(0 <= decode_tokens < math.inf, "decode_tokens", decode_tokens, "finite and >= 0")
    work = replicas if isinstance(replicas, ClusterWork) else ClusterWork.of(replicas)
    speeds = np.asarray(speed, dtype=np.float64)
    if speeds.shape != work.counts.shape:
        speeds = np.full(work.counts.shape, speeds)
    require(bool((speeds > 0.0).all()), "speed", speed, "> 0 for each replica")
    require(0.0 < latency_power < math.inf, "latency_power", latency_power, "finite and > 0")
    require(0.0 <= backlog_weight < math.inf, "backlog_weight", backlog_weight, "finite and >= 0")
    if latency_power == 1.0:
        return _compiled_increase(work, prompt_tokens, decode_tokens, speeds, cost, backlog_weight)
    drain = _Drain(work, cost)
    own_s, harm_s = drain.placed(prompt_tokens, decode_tokens)
    own_s, harm_s = own_s / speeds, harm_s / speeds[drain.replica]
    before_s = work.ages_s + drain.remaining_s() / speeds[drain.replica]
    grown = (before_s + harm_s) ** latency_power - before_s**latency_power
    costs = (age_s + own_s) ** latency_power + drain.sums(grown)
    token_s = cost.prefill_s_per_token / speeds
    added_s, backlog_s = prompt_tokens * token_s, drain.queued_tokens * token_s
    increase: FloatArray = costs + backlog_weight * added_s * (2.0 * backlog_s + added_s)
    return increase


def _compiled_increase(
    work: ClusterWork,
    prompt_tokens: float,
    decode_tokens: float,
    speeds: FloatArray,
    cost: DrainCost,
    backlog_weight: float,
) -> FloatArray:
    increase: FloatArray = increase_compiled(
        work.prefill_tokens,
        work.decode_tokens,
        work.context_tokens,
        work.counts,
        speeds,
        float(prompt_tokens),
        float(decode_tokens),
        float(backlog_weight),
        cost.prefill_s_per_token,
        cost.iteration_s,
        cost.iteration_s_per_request,
        cost.iteration_s_per_context_token,
        float(cost.prefill_chunk_tokens),
    )
    return increase


class _Drain:
    """Who decodes from when to when, counted in iterations of its replica, if nobody else arrived."""

    def __init__(self, work: ClusterWork, cost: DrainCost) -> None:
        self._cost = cost
        self._num_replicas = len(work.counts)
        self._counts = work.counts
        self.replica = np.arange(self._num_replicas).repeat(self._counts)  # of each request
        prefill_tokens = work.prefill_tokens
        self._lengths = work.decode_tokens
        self._contexts = work.context_tokens + prefill_tokens  # at its start
        self.queued_tokens = self.sums(prefill_tokens)  # of each replica
        before = self.queued_tokens.cumsum() - self.queued_tokens
        until_prefilled = prefill_tokens.cumsum() - before[self.replica]
        self._starts = np.ceil(until_prefilled / cost.prefill_chunk_tokens) * (prefill_tokens > 0)
        self._ends = self._starts + self._lengths

    def sums(self, values: FloatArray) -> FloatArray:
        """The sum over the requests of each replica."""
        sums: FloatArray = np.bincount(self.replica, weights=values, minlength=self._num_replicas).astype(np.float64)
        return sums

    def placed(self, prompt_tokens: float, decode_tokens: float) -> tuple[FloatArray, FloatArray]:
        """Latency on each replica of a request added at the end of its queue, and by how much it delays each other."""
        all_tokens = self.queued_tokens + prompt_tokens
        start = np.ceil(all_tokens / self._cost.prefill_chunk_tokens)
        end = start + decode_tokens
        alongside = (end[self.replica] - self._starts).clip(0.0, self._lengths)
        own_s = end * self._cost.iteration_s + self._chunks_s(end, all_tokens)
        own_s += self.sums(self._decode_s(alongside, self._contexts)) + self._decode_s(decode_tokens, prompt_tokens)
        harm_s: FloatArray = self._decode_s((self._ends - start[self.replica]).clip(0.0, decode_tokens), prompt_tokens)
        harm_s += self._chunks_s(self._ends, all_tokens[self.replica])
        harm_s -= self._chunks_s(self._ends, self.queued_tokens[self.replica])
        return own_s, harm_s

    def remaining_s(self) -> FloatArray:
        """Time until each request is done without the new one.

        Up to iteration x, one that decodes from b on adds a * (x - b) + k / 2 * (x - b) * (x - b - 1), k being the
        cost of a context token and a that of its first iteration; one that ends takes the same away from a later b
        on, with its longer context. Together: a polynomial in x whose coefficients change at starts and ends.
        """
        cost, half_k = self._cost, 0.5 * self._cost.iteration_s_per_context_token
        contexts = np.concatenate((self._contexts, self._contexts + self._lengths))
        points = np.concatenate((self._starts, self._ends))
        # Sorted by replica, then by iteration.
        keys = points + np.concatenate((self.replica, self.replica)) * (points.max(initial=0.0) + 1.0)
        order = keys.argsort()
        latest = keys[order].searchsorted(keys[self._ends.size :], side="right")
        points = points[order]
        sign = np.where(order < self._ends.size, 1.0, -1.0)
        first_s = cost.iteration_s_per_request + half_k * (2.0 * contexts[order] - 1.0)
        point_s = half_k * points
        terms = np.zeros((3, points.size + 1))
        terms[:, 1:] = sign * half_k, sign * (first_s - 2.0 * point_s), sign * (point_s - first_s) * points
        terms = terms.cumsum(axis=1)
        others = 2 * (self._counts.cumsum() - self._counts)[self.replica]  # points of the replicas before this one
        square, linear, constant = terms[:, latest] - terms[:, others]
        remaining_s: FloatArray = (square * self._ends + linear + cost.iteration_s) * self._ends + constant
        remaining_s += self._chunks_s(self._ends, self.queued_tokens[self.replica])
        return remaining_s

    def _chunks_s(self, iterations: FloatArray, tokens: FloatArray) -> Any:
        """What the prefill of so many tokens adds to the first so many iterations: full chunks, then the rest."""
        cost = self._cost
        full = tokens // cost.prefill_chunk_tokens
        full_s = max(0.0, cost.prefill_s_per_token * cost.prefill_chunk_tokens - cost.iteration_s)
        rest = tokens - full * cost.prefill_chunk_tokens
        rest_s = np.maximum(0.0, cost.prefill_s_per_token * rest - cost.iteration_s)
        return np.minimum(iterations, full) * full_s + (iterations > full) * rest_s

    def _decode_s(self, iterations: Any, context_tokens: Any) -> Any:
        """What a request adds to the iterations in which it decodes, its context growing by one after each."""
        cost = self._cost
        context_s = cost.iteration_s_per_context_token * (context_tokens + 0.5 * (iterations - 1.0))
        return iterations * (cost.iteration_s_per_request + context_s)
