"""`Twin`: a cluster as Vidur simulates it, some hundred times as fast, that can be copied and rolled forward."""

from dataclasses import dataclass

import numpy as np

from vidur_ppo_plugin.workload.requests import Requests

from . import forks, kernels, layout
from .config import TwinConfig
from .layout import FloatArray, IntArray, State
from .machine import Machine


@dataclass(frozen=True)
class Completions:
    """Requests that were completed, in the order of replicas and times in which the twin got to them."""

    index: IntArray
    replica: IntArray
    arrived_at_s: FloatArray
    scheduled_at_s: FloatArray
    first_token_at_s: FloatArray
    completed_at_s: FloatArray
    num_restarts: IntArray

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, log: FloatArray) -> "Completions":
        """Completions made of entries of a twin's log."""
        return cls(
            index=log[:, layout.LOG_ID].astype(np.int64),
            replica=log[:, layout.LOG_ROW].astype(np.int64),
            arrived_at_s=log[:, layout.LOG_ARRIVED].copy(),
            scheduled_at_s=log[:, layout.LOG_SCHEDULED].copy(),
            first_token_at_s=log[:, layout.LOG_FIRST_TOKEN].copy(),
            completed_at_s=log[:, layout.LOG_COMPLETED].copy(),
            num_restarts=log[:, layout.LOG_RESTARTS].astype(np.int64),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a twin, which it can be restored to."""

    state: State
    now_s: float
    num_submitted: int
    log: list[FloatArray]


class Twin(Machine):
    """A cluster whose replicas are told of requests, one by one, in the order of their arrivals."""

    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        #: No event before this moment can be added any more.
        self.now_s = 0.0
        self.num_submitted = 0
        self._finished = np.zeros(2, np.int64)

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not completed by the moment that the twin was brought to."""
        return int(kernels.num_outstanding(self.state))

    def submit(self, replica: int, arrived_at_s: float, prompt_tokens: int, decode_tokens: int) -> int:
        """Hand a request to a replica at its arrival; its index, which counts submissions."""
        if not 0 <= replica < self.num_replicas:
            raise ValueError(f"replica must be in 0 ... {self.num_replicas - 1}, got {replica}")
        self._check_now(arrived_at_s)
        _check_lengths(prompt_tokens, decode_tokens)
        index = self.num_submitted
        self._call(kernels.submit, replica, index, float(arrived_at_s), int(prompt_tokens), int(decode_tokens))
        self.num_submitted += 1
        self.now_s = arrived_at_s
        return index

    def submit_all(
        self, replicas: IntArray, arrived_at_s: FloatArray, prompt_tokens: IntArray, decode_tokens: IntArray
    ) -> int:
        """`submit` for each of many requests whose placements are known; the index of the first."""
        num_requests, first = len(replicas), self.num_submitted
        if num_requests == 0:
            return first
        arrived_at_s = np.ascontiguousarray(arrived_at_s, np.float64)
        if arrived_at_s[0] < self.now_s or np.any(np.diff(arrived_at_s) < 0):
            raise ValueError(f"arrived_at_s must be in order, from {self.now_s} on")
        if np.min(replicas) < 0 or np.max(replicas) >= self.num_replicas:
            raise ValueError(f"replicas must be in 0 ... {self.num_replicas - 1}")
        _check_lengths(int(np.min(prompt_tokens)), int(np.min(decode_tokens)))
        position = np.zeros(1, np.int64)
        columns = [np.ascontiguousarray(column, np.int64) for column in (replicas, prompt_tokens, decode_tokens)]
        self._call(kernels.submit_all, position, columns[0], first, arrived_at_s, columns[1], columns[2])
        self.num_submitted += num_requests
        self.now_s = float(arrived_at_s[-1])
        return first

    def advance(self, until_s: float) -> None:
        """Process everything that comes before a decision at `until_s`."""
        self._check_now(until_s)
        self._call(kernels.advance, float(until_s))
        self.now_s = until_s

    def drain(self) -> None:
        """Run until all requests are completed; ValueError if some never will be, because they do not fit."""
        self._call(kernels.advance, np.inf)
        self.now_s = max(self.now_s, float(self.state.floats[:, layout.NOW].max()))
        if self.num_in_flight:
            raise ValueError(
                f"{self.num_in_flight} requests can never run on {self.config.replica_scheduler}: their prompts exceed "
                f"the KV cache ({self.config.num_blocks} blocks of {self.config.block_size} tokens), the batch "
                f"({self.config.max_batch_tokens} tokens) or the longest request ({self.config.max_request_tokens})"
            )

    def observe(self, now_s: float, values: FloatArray, waiting: FloatArray) -> tuple[int, int]:
        """`advance`, and write the arrays of a snapshot; requests completed so far, and their output tokens."""
        self._check_now(now_s)
        self._call(kernels.observe, float(now_s), self._speed_factors, values, waiting, self._finished)
        self.now_s = now_s
        return int(self._finished[0]), int(self._finished[1])

    def marginal_delay(
        self,
        arrived_at_s: float,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        latency_power: float = 1.0,
        backlog_weight: float = 0.0,
        horizon_s: float = np.inf,
    ) -> FloatArray:
        """What a request that arrives now would add, on each replica, to the sum of all latencies ** latency_power.

        As if nobody else arrived. Privileged: it knows the true output lengths, so it is for training credit and for
        bounds on what a router can reach. Exact with an infinite horizon: summed over the placements of a drained run
        it equals the sum of latency ** latency_power. With a finite one, requests count as completed at the horizon.

        `backlog_weight` times the growth of (seconds of prefill) ** 2 stands for the harm to those who come later.
        """
        _check_lengths(prompt_tokens, decode_tokens)
        self.advance(arrived_at_s)
        self._prepare_forks()
        lengths, until_s = (int(prompt_tokens), int(decode_tokens)), float(arrived_at_s + horizon_s)
        result = np.empty(self.num_replicas)
        self._call(forks.increase, self._scratch, float(arrived_at_s), *lengths, float(latency_power), until_s, result)
        if backlog_weight:
            prefill_tokens = self.state.cells[:, layout.PREFILL_TOKENS]
            result += backlog_weight * self._backlog_growth(prefill_tokens, prompt_tokens)
        return result

    def completions(self) -> Completions:
        """What was completed since the last call; the twin forgets it."""
        return Completions.of(self._take_log())

    def checkpoint(self) -> Checkpoint:
        """The present moment, to `restore` later."""
        return Checkpoint(layout.copied(self.state), self.now_s, self.num_submitted, list(self._log))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of this twin or of one with the same config."""
        if self.state.cells.shape == checkpoint.state.cells.shape:
            layout.copy_into(self.state, checkpoint.state)
        else:
            self.state = layout.copied(checkpoint.state)
        self.now_s, self.num_submitted = checkpoint.now_s, checkpoint.num_submitted
        self._log = list(checkpoint.log)

    def reset(self, now_s: float = 0.0, *, first_index: int = 0) -> None:
        """Start anew, with nothing in flight; requests are counted from `first_index` on."""
        layout.clear(self.rules, self.state)
        self.state.signals[:] = 0
        self.now_s, self.num_submitted, self._log = now_s, first_index, []

    def copy(self) -> "Twin":
        """An independent twin at the same moment."""
        twin = Twin(self.config)
        twin.restore(self.checkpoint())
        return twin

    def _check_now(self, moment_s: float) -> None:
        if not moment_s >= self.now_s:
            raise ValueError(f"the time must be >= {self.now_s} s, where the twin is, got {moment_s}")


def run(config: TwinConfig, requests: Requests, replicas: IntArray) -> Completions:
    """Serve requests whose placements are known; the completions in the order of the requests."""
    twin = Twin(config)
    twin.submit_all(replicas, requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
    twin.drain()
    return in_order(twin.completions())


def in_order(completions: Completions) -> Completions:
    """Completions sorted by the index of the request."""
    order = np.argsort(completions.index)
    return Completions(*(getattr(completions, name)[order] for name in completions.__dataclass_fields__))


def _check_lengths(prompt_tokens: int, decode_tokens: int) -> None:
    if prompt_tokens < 1 or decode_tokens < 1:
        raise ValueError(f"prompt_tokens and decode_tokens must be >= 1, got {prompt_tokens} and {decode_tokens}")
