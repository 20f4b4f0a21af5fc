"""What `Twin` and `VectorTwin` share: a state, and calling kernels on it until they have all they need."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import layout
from .config import TwinConfig
from .layout import FloatArray, State

# Requests that each replica has room for to begin with, and completions that are kept until somebody asks for them.
_INITIAL_REQUESTS = 64
_LOG_SIZE = 4096


class Machine:
    """The replicas of one or more equal clusters."""

    def __init__(self, config: TwinConfig, num_clusters: int = 1) -> None:
        self.config = config
        self.rules = config.rules
        self.state: State = layout.new_state(
            self.rules,
            num_clusters * config.num_replicas,
            num_requests=_INITIAL_REQUESTS,
            log_size=max(_LOG_SIZE, 2 * layout.max_running(self.rules)),
        )
        self._num_clusters = num_clusters
        self._log: list[FloatArray] = []
        self._speed_factors = np.array(config.speed_factors)
        self._scratch = layout.scratch_for(self.rules, self.state)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of a cluster."""
        return self.config.num_replicas

    def _times(self) -> layout.Times:
        times = self.config.times.arrays
        if self._num_clusters > 1:
            times = times._replace(speed_index=np.tile(times.speed_index, self._num_clusters))
        return times

    def _call(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Run a kernel until it is done, adding whatever it runs out of."""
        while True:
            outcome = kernel(self.rules, self._times(), self.state, *arguments)
            if outcome == layout.DONE:
                return
            self._provide(outcome)

    def _provide(self, outcome: int) -> None:
        """Add what a kernel has run out of."""
        if outcome == layout.TIME_UNKNOWN:
            self.config.times.add(*self.state.signals[layout.MISSING_TOKENS :].tolist())
        elif outcome == layout.LOG_FULL:
            self._empty_log()
        else:
            self.state = layout.grown(self.rules, self.state)

    def _prepare_forks(self) -> None:
        """Room for one request more on every replica, and a row to try it out in."""
        while self.state.cells[:, layout.FREE].min() < 0:
            self.state = layout.grown(self.rules, self.state)
        if self._scratch.cells.shape[1] != self.state.cells.shape[1]:
            self._scratch = layout.scratch_for(self.rules, self.state)

    def _backlog_growth(self, prefill_tokens: Any, prompt_tokens: Any) -> Any:
        """How much (seconds of prefill) ** 2 grows with a prompt on each replica."""
        token_s = self.config.prefill_s_per_token / self._speed_factors
        added_s = prompt_tokens * token_s
        return added_s * (2.0 * prefill_tokens * token_s + added_s)

    def _take_log(self) -> FloatArray:
        """The completed requests since the last call."""
        self._empty_log()
        rows = np.concatenate(self._log) if self._log else np.zeros((0, layout.NUM_LOG_COLUMNS))
        self._log = []
        return rows

    def _empty_log(self) -> None:
        size = int(self.state.signals[layout.LOG_SIZE])
        if size:
            self._log.append(self.state.log[:size].copy())
            self.state.signals[layout.LOG_SIZE] = 0
