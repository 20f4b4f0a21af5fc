"""What must not go unnoticed: a policy that sends everything to one replica, and latencies above a hard limit."""

import logging
import math
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vidur_ppo_plugin.flags import RunningFlags, require_value

logger = logging.getLogger(__name__)

# An alarm ends only when the share has fallen this much below the threshold: a share that hovers is one alarm.
_RELEASE_FACTOR = 0.95


class CollapseAlarm:
    """Warns once when one replica's share of the last `window` decisions exceeds the threshold. O(1) a decision."""

    def __init__(
        self, *, num_replicas: int, share_threshold: float = RunningFlags.collapse_share, window: int = 200
    ) -> None:
        require_value(num_replicas >= 1, "num_replicas", num_replicas, ">= 1")
        require_value(window >= 1, "window", window, ">= 1 decision")
        fair = 1.0 / num_replicas if num_replicas > 1 else 0.0
        right = f"above a fair share (1 / {num_replicas}) and below 1"
        require_value(fair < share_threshold < 1.0, "share_threshold", share_threshold, right)
        self._threshold = share_threshold
        self._window = window
        self._recent: deque[int] = deque()
        self._counts = [0] * num_replicas
        #: The replica that gets too much, -1 if none does.
        self.replica = -1
        #: How often the alarm has started.
        self.onsets = 0

    @property
    def active(self) -> bool:
        """Whether one replica gets too much now."""
        return self.replica >= 0

    @property
    def share(self) -> float:
        """The largest share of the recent decisions, 0 before the first."""
        return max(self._counts) / len(self._recent) if self._recent else 0.0

    def on_decision(self, replica: int) -> bool:
        """A request was sent to this replica (its index). Whether the alarm is active."""
        require_value(0 <= replica < len(self._counts), "replica", replica, f"an index below {len(self._counts)}")
        self._recent.append(replica)
        self._counts[replica] += 1
        if len(self._recent) > self._window:
            self._counts[self._recent.popleft()] -= 1
        candidate = replica  # only its count has grown, so no other can have crossed the threshold now
        if self.active and self._counts[self.replica] < _RELEASE_FACTOR * self._threshold * self._window:
            logger.info("collapse alarm over: replica %d is back below %.0f %%", self.replica, 100 * self._threshold)
            self.replica = -1
            candidate = self._counts.index(max(self._counts))  # another may have crossed it under this alarm
        if not self.active and len(self._counts) > 1:
            share = self._counts[candidate] / self._window
            if share > self._threshold:
                self.replica, self.onsets = candidate, self.onsets + 1
                message = "collapse alarm: replica %d got %.0f %% of the last %d decisions (threshold %.0f %%)"
                logger.warning(message, candidate, 100 * share, self._window, 100 * self._threshold)
        return self.active


class SafetyLimit:
    """Counts completed requests whose latency is above a hard limit; by flag, keeps new ones off stuck replicas."""

    def __init__(self, *, latency_limit_s: float, mask: bool = False) -> None:
        require_value(
            0.0 <= latency_limit_s < math.inf, "latency_limit_s", latency_limit_s, "> 0 seconds, or 0 for no limit"
        )
        require_value(latency_limit_s > 0.0 or not mask, "mask", mask, "False without a latency_limit_s")
        self._limit_s = latency_limit_s
        self._mask = mask
        #: Requests above the limit, ever.
        self.violations = 0
        #: Decisions in which at least one replica was masked, ever.
        self.masked_decisions = 0
        self._reported_violations = 0

    def on_completion(self, latency_s: float) -> bool:
        """A request has completed. Whether it was above the limit.

        Logged at the 1st, 2nd, 4th, 8th … violation: a bad run must not fill the disk.
        """
        require_value(0.0 <= latency_s < math.inf, "latency_s", latency_s, "finite and >= 0")
        if not 0.0 < self._limit_s < latency_s:
            return False
        self.violations += 1
        if self.violations & (self.violations - 1) == 0:
            message = "safety limit: a request took %.2f s, the limit is %.2f s (violation %d)"
            logger.warning(message, latency_s, self._limit_s, self.violations)
        return True

    def take_violations(self) -> int:
        """Violations since this was last asked: one update's worth."""
        new = self.violations - self._reported_violations
        self._reported_violations = self.violations
        return new

    def allowed(self, oldest_wait_s: ArrayLike) -> NDArray[np.bool_]:
        """Which replicas may be chosen: those whose oldest waiting request is within the limit, or all if none is."""
        waits_s = np.asarray(oldest_wait_s, dtype=np.float64)
        everyone: NDArray[np.bool_] = np.ones(waits_s.shape, dtype=np.bool_)
        if not self._mask:
            return everyone
        within: NDArray[np.bool_] = waits_s <= self._limit_s
        if within.all() or not within.any():
            return everyone
        self.masked_decisions += 1
        return within
