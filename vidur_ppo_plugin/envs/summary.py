"""What came of an episode: the figures of `compare`, of all its completed requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.clusters.drive import Arrival, Listener
from vidur_ppo_plugin.record.outcome import Distribution

CLASSES = ("short", "long")


class EpisodeLog(Listener):
    """Collects placements and completions."""

    def __init__(self, num_replicas: int) -> None:
        self._placements = np.zeros(num_replicas, np.int64)
        self._completions: list[Completion] = []
        self._num_taken = 0

    @property
    def num_completed(self) -> int:
        """Requests completed so far."""
        return len(self._completions)

    def on_decision(self, arrival: Arrival, replica: int) -> None:
        """A request was placed."""
        self.count(replica)

    def count(self, replica: int) -> None:
        """A request was placed."""
        self._placements[replica] += 1

    def on_completions(self, completions: Sequence[Completion]) -> None:
        """Requests were completed."""
        self._completions += completions

    def take_completions(self) -> list[Completion]:
        """Those since the last call."""
        taken = self._completions[self._num_taken :]
        self._num_taken = len(self._completions)
        return taken

    def summary(self, is_long: NDArray[np.bool_]) -> dict[str, Any]:
        """Mean and percentiles in seconds, also by class; NaN where nothing was completed. `is_long`: by request."""
        requests = np.array([done.request for done in self._completions], np.int64)
        arrived_at_s = np.array([done.arrived_at_s for done in self._completions])
        e2e_s = np.array([done.completed_at_s for done in self._completions]) - arrived_at_s
        ttft_s = np.array([done.first_token_at_s for done in self._completions]) - arrived_at_s
        e2e, ttft = Distribution.of(e2e_s), Distribution.of(ttft_s)
        summary: dict[str, Any] = {f"e2e_{name}": value for name, value in vars(e2e).items()}
        summary |= {f"ttft_{name}": value for name, value in vars(ttft).items()}
        for name, members in zip(CLASSES, (~is_long[requests], is_long[requests]), strict=True):
            of_class = Distribution.of(e2e_s[members])
            summary |= {f"e2e_mean_{name}": of_class.mean, f"e2e_p99_{name}": of_class.p99}
        num_placed = int(self._placements.sum())
        return summary | {
            "num_placed": num_placed,
            "num_completed": self.num_completed,
            "preemptions": sum(done.num_restarts for done in self._completions),
            "action_shares": self._placements / max(1, num_placed),
        }
