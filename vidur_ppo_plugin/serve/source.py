"""Fills `ClusterSnapshot`s of real replicas: from what the router sent and saw, and from what backends report.

The router knows at once what it sends and what comes back. Reports are up to a poll interval old; they say what the
router cannot see: who waits, how full the KV cache is, and what others send to the same backend. So the counters are
the router's own, and a report sets what is to be added to them. A report that has grown stale adds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vidur_ppo_plugin.routing.averages import (
    Arrivals,
    counted_rate,
    decayed_rate,
    mean_output,
    moved_average,
    updated_typical_prompt,
)
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, FloatArray, RequestInfo

from .reports import Report

_OUTSTANDING = ROW["outstanding_requests"]
_RUNNING = ROW["running_requests"]
_PREFILL = ROW["prefill_tokens"]
_CONTEXT = ROW["context_tokens"]
_KV_USED = ROW["kv_blocks_used"]
_KV_TOTAL = ROW["kv_blocks_total"]
_OLDEST = ROW["oldest_wait_s"]
_DECODED = ROW["decoded_tokens"]
_LATENCY = ROW["recent_latency_s"]
_RATE = ROW["completion_rate_per_s"]
_TOKEN_TIME = ROW["token_time_s"]
_TYPICAL = ROW["typical_prompt_tokens"]
_SPEED = ROW["speed_factor"]

# Tokens of a prompt that somebody else sent: nobody tells us, so as many as ours have in the mean.
_PROMPT_WEIGHT = 0.02


@dataclass(frozen=True)
class Assumptions:
    """Figures assumed where backends do not say: vLLM's usual block, and the cache of an 80 GB device."""

    kv_block_size: int = 16
    kv_blocks_total: int = 30_000
    decode_tokens: float = 128.0
    ttft_s: float = 0.5
    tbt_s: float = 0.03


class RequestInFlight:
    """A request on its way through one backend, and its progress."""

    __slots__ = ("is_hidden", "max_tokens", "num_tokens", "prompt_tokens", "replica", "sent_at_s", "started_at_s")

    def __init__(
        self, replica: "Replica", prompt_tokens: int, sent_at_s: float, *, is_hidden: bool, max_tokens: int | None
    ) -> None:
        self.replica = replica
        self.prompt_tokens = prompt_tokens
        self.sent_at_s = sent_at_s
        #: Whether its progress cannot be seen, because the answer comes in one piece; then it is estimated.
        self.is_hidden = is_hidden
        self.max_tokens = max_tokens
        self.started_at_s: float | None = None
        self.num_tokens = 0


class Replica:
    """What the router knows of one backend; numbers that a snapshot shows are in its column of `own`."""

    def __init__(self, name: str, assumed: Assumptions, speed_factor: float = 1.0) -> None:
        self.name = name
        self.own = [0.0] * len(ROWS)
        self.own[_SPEED] = speed_factor
        self.own[_KV_TOTAL] = assumed.kv_blocks_total
        #: Requests that have shown no token yet, in the order they were sent.
        self.unstarted: dict[RequestInFlight, None] = {}
        self.hidden: dict[RequestInFlight, None] = {}
        #: How many of the unstarted ones are thought to wait, rather than to be worked on.
        self.num_waiting = 0
        self.rate_updated_s = 0.0
        self.has_report = False
        #: What others have there, by the last report: requests, of which waiting, and tokens in context.
        self.foreign_requests = self.foreign_waiting = self.foreign_context = 0.0
        #: KV blocks in use beyond those that our context tokens fill.
        self.extra_kv_blocks = 0.0
        self.ttft_s, self.tbt_s = assumed.ttft_s, assumed.tbt_s
        self._ttft_total: tuple[float, float] | None = None
        self._tbt_total: tuple[float, float] | None = None

    @property
    def completion_rate_per_s(self) -> float:
        """Requests completed there per second, as of the last completion."""
        return self.own[_RATE]

    def take_times(self, report: Report) -> None:
        """Mean times of what happened between two reports."""
        self.ttft_s = _mean_since(self._ttft_total, report.ttft_s, self.ttft_s)
        self.tbt_s = _mean_since(self._tbt_total, report.tbt_s, self.tbt_s)
        self._ttft_total, self._tbt_total = report.ttft_s, report.tbt_s


class VllmReplicaSource:
    """A `ReplicaSource` over backends that speak vLLM's API and metrics; times are seconds of one clock."""

    def __init__(self, *, assumed: Assumptions | None = None, num_waiting_slots: int = 0) -> None:
        """`num_waiting_slots`: how many waiting requests of each replica a snapshot shows one by one."""
        self.assumed = assumed or Assumptions()
        self.replicas: list[Replica] = []
        self._num_waiting_slots = num_waiting_slots
        self._kv_block_size = self.assumed.kv_block_size
        self._finished_requests = 0
        self._finished_decode_tokens = 0
        self._mean_prompt_tokens = 0.0
        self._arrivals = Arrivals()

    # --- Who is there ---

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    def add(self, name: str, speed_factor: float = 1.0) -> Replica:
        """Add a replica."""
        replica = Replica(name, self.assumed, speed_factor)
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica; requests on their way there may finish."""
        self.replicas.remove(replica)

    # --- What the router sends and sees ---

    def request_info(self, prompt_tokens: int, now_s: float) -> RequestInfo:
        """What a router knows of a request that arrives now; call it once for each request, in order."""
        mean = self._mean_prompt_tokens
        self._mean_prompt_tokens = mean + _PROMPT_WEIGHT * (prompt_tokens - mean) if mean else prompt_tokens
        return self._arrivals.request_info(prompt_tokens, now_s)

    def on_dispatch(
        self, replica: Replica, prompt_tokens: int, now_s: float, *, is_hidden: bool, max_tokens: int | None = None
    ) -> RequestInFlight:
        """A request was sent; `is_hidden`: its answer will come in one piece."""
        flight = RequestInFlight(replica, prompt_tokens, now_s, is_hidden=is_hidden, max_tokens=max_tokens)
        replica.own[_OUTSTANDING] += 1
        replica.own[_PREFILL] += prompt_tokens
        replica.own[_TYPICAL] = updated_typical_prompt(replica.own[_TYPICAL], prompt_tokens)
        replica.unstarted[flight] = None
        if is_hidden:
            replica.hidden[flight] = None
        if replica.num_waiting or not replica.has_report:
            # Whoever comes behind a queue waits too. Without a report, all but the first are thought to wait.
            replica.num_waiting = min(replica.num_waiting + 1, len(replica.unstarted) - 1)
        return flight

    def on_tokens(self, flight: RequestInFlight, num_tokens: int, now_s: float) -> None:
        """Tokens came back (or are thought to have been made)."""
        own = flight.replica.own
        if flight.started_at_s is None:
            self._start(flight, now_s)
        flight.num_tokens += num_tokens
        own[_CONTEXT] += num_tokens
        own[_DECODED] += num_tokens

    def _start(self, flight: RequestInFlight, now_s: float) -> None:
        replica = flight.replica
        flight.started_at_s = now_s
        replica.own[_PREFILL] -= flight.prompt_tokens
        replica.own[_CONTEXT] += flight.prompt_tokens
        del replica.unstarted[flight]
        replica.num_waiting = max(0, min(replica.num_waiting - 1, len(replica.unstarted)))

    def on_end(self, flight: RequestInFlight, now_s: float, *, completed_tokens: int | None) -> None:
        """A request has ended: completed with so many tokens, or (None) failed or given up."""
        replica, own = flight.replica, flight.replica.own
        own[_OUTSTANDING] -= 1
        replica.hidden.pop(flight, None)
        if flight.started_at_s is None:
            own[_PREFILL] -= flight.prompt_tokens
            del replica.unstarted[flight]
            replica.num_waiting = max(0, min(replica.num_waiting, len(replica.unstarted)))
        else:
            own[_CONTEXT] -= flight.prompt_tokens + flight.num_tokens
            own[_DECODED] -= flight.num_tokens
        if completed_tokens is None:
            return
        self._finished_requests += 1
        self._finished_decode_tokens += completed_tokens
        own[_LATENCY] = moved_average(own[_LATENCY], now_s - flight.sent_at_s)
        self._take_token_time(flight, now_s, completed_tokens)
        own[_RATE] = counted_rate(own[_RATE], replica.rate_updated_s, now_s)
        replica.rate_updated_s = now_s

    def _take_token_time(self, flight: RequestInFlight, now_s: float, num_tokens: int) -> None:
        """Seen in a stream; of an answer in one piece, what the backend reports."""
        replica, own = flight.replica, flight.replica.own
        if num_tokens < 2 or flight.started_at_s is None or (flight.is_hidden and not replica.has_report):
            return
        token_s = replica.tbt_s if flight.is_hidden else (now_s - flight.started_at_s) / (num_tokens - 1)
        own[_TOKEN_TIME] = moved_average(own[_TOKEN_TIME], token_s)

    # --- What backends report ---

    def on_report(self, replica: Replica, report: Report) -> None:
        """A backend has reported: what it has beyond what we know of is somebody else's."""
        own, outstanding = replica.own, replica.own[_OUTSTANDING]
        replica.has_report = True
        replica.take_times(report)
        if report.kv_blocks_total is not None:
            own[_KV_TOTAL] = report.kv_blocks_total
        if report.kv_block_size is not None:
            self._kv_block_size = report.kv_block_size
        replica.num_waiting = int(min(report.waiting, len(replica.unstarted)))
        replica.foreign_requests = max(0.0, report.running + report.waiting - outstanding)
        replica.foreign_waiting = min(replica.foreign_requests, max(0.0, report.waiting - replica.num_waiting))
        replica.extra_kv_blocks = replica.foreign_context = 0.0
        if report.kv_used_fraction is not None:
            used_blocks = report.kv_used_fraction * own[_KV_TOTAL]
            replica.extra_kv_blocks = used_blocks - own[_CONTEXT] / self._kv_block_size
            if replica.foreign_requests:
                replica.foreign_context = max(0.0, replica.extra_kv_blocks * self._kv_block_size)

    def on_stale(self, replica: Replica) -> None:
        """A backend has not reported for too long: the router goes by what it knows itself."""
        replica.has_report = False
        replica.foreign_requests = replica.foreign_waiting = replica.foreign_context = 0.0
        replica.extra_kv_blocks = 0.0
        replica.num_waiting = max(0, len(replica.unstarted) - 1)

    def estimate_hidden(self, replica: Replica, now_s: float) -> None:
        """Bring requests whose progress cannot be seen to where they should be by now, by the backend's mean times."""
        for flight in list(replica.hidden):
            since_start_s = now_s - flight.sent_at_s - replica.ttft_s
            if since_start_s < 0:
                continue
            expected = 1 + int(since_start_s / max(replica.tbt_s, 1e-4))
            if flight.max_tokens is not None:
                expected = min(expected, flight.max_tokens)
            if expected > flight.num_tokens:
                self.on_tokens(flight, expected - flight.num_tokens, now_s)

    # --- What a decision sees ---

    @property
    def expected_decode_tokens(self) -> float:
        """Mean output length of the finished requests, or the initial guess before any has finished."""
        return mean_output(self._finished_requests, self._finished_decode_tokens, self.assumed.decode_tokens)

    def snapshot(self, now_s: float, replicas: Sequence[Replica] | None = None) -> ClusterSnapshot:
        """The cluster as of `now_s`: all replicas, or those given, in their order."""
        shown = self.replicas if replicas is None else replicas
        block_size, slots = self._kv_block_size, self._num_waiting_slots
        values = np.array([replica.own for replica in shown]).T.copy()
        waiting = np.zeros((2 * slots, len(shown))) if slots else None
        for column, replica in enumerate(shown):
            self._complete(values, column, replica, now_s, block_size)
            if replica.num_waiting:
                _show_waiting(values, waiting, column, replica, now_s, slots)
        return ClusterSnapshot(
            now_s,
            values,
            kv_block_size=block_size,
            expected_decode_tokens=self.expected_decode_tokens,
            waiting=waiting,
        )

    def _complete(self, values: FloatArray, column: int, replica: Replica, now_s: float, block_size: int) -> None:
        own = replica.own
        foreign, foreign_waiting = replica.foreign_requests, replica.foreign_waiting
        outstanding = own[_OUTSTANDING] + foreign
        values[_RUNNING, column] = outstanding - replica.num_waiting - foreign_waiting
        values[_KV_USED, column] = min(max(own[_CONTEXT] / block_size + replica.extra_kv_blocks, 0.0), own[_KV_TOTAL])
        if own[_RATE]:
            values[_RATE, column] = decayed_rate(own[_RATE], replica.rate_updated_s, now_s)
        if foreign:
            values[_OUTSTANDING, column] = outstanding
            values[_PREFILL, column] += foreign_waiting * self._mean_prompt_tokens
            values[_CONTEXT, column] += replica.foreign_context


def _show_waiting(
    values: FloatArray, waiting: FloatArray | None, column: int, replica: Replica, now_s: float, slots: int
) -> None:
    """Backends serve in order of arrival: those that wait are the last ones that were sent."""
    first = len(replica.unstarted) - replica.num_waiting
    for slot, flight in enumerate(islice(replica.unstarted, first, first + max(1, slots))):
        age_s = now_s - flight.sent_at_s
        if slot == 0:
            values[_OLDEST, column] = age_s
        if waiting is not None:
            waiting[slot, column] = flight.prompt_tokens
            waiting[slots + slot, column] = age_s


def _mean_since(before: tuple[float, float] | None, now: tuple[float, float] | None, known: float) -> float:
    """Mean of what was added to a sum and its count; the known one where nothing was, or the server is a new one."""
    if now is None:
        return known
    total, count = now if before is None or now[1] < before[1] else (now[0] - before[0], now[1] - before[1])
    return total / count if count > 0 and total >= 0 else known
