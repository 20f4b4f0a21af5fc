"""What a router gets to see of the replicas: reports may be old, and some replicas may take no new requests.

A replica's report reaches the router `report_delay_s` after it was made; what the router itself has sent since then is
known at once and added. Reports are made at arrivals, so the one that a decision sees is the newest that is old enough.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import Drain, VisibilityFlags, drains_of

from .averages import updated_typical_prompt
from .snapshot import ROW, ClusterSnapshot

__all__ = ["Drain", "Visibility"]

_OUTSTANDING = ROW["outstanding_requests"]
_PREFILL = ROW["prefill_tokens"]
_TYPICAL = ROW["typical_prompt_tokens"]


class Visibility:
    """Turns the truth into what the router sees; one for each run."""

    def __init__(self, *, report_delay_s: float = 0.0, drains: tuple[Drain, ...] = ()) -> None:
        self._delay_s = report_delay_s
        self._drains = drains
        # Reports on their way, oldest first: the snapshot, and how many requests had been sent when it was made.
        self._reports: deque[tuple[ClusterSnapshot, int]] = deque()
        # Requests sent since the oldest of those reports: replica and prompt tokens.
        self._sent: deque[tuple[int, int]] = deque()
        self._num_sent = 0

    @classmethod
    def from_flags(cls, flags: VisibilityFlags, num_replicas: int) -> "Visibility":
        """What a scheduler's flags let the router see; ValueError naming the flag."""
        return cls(report_delay_s=flags.report_delay_s, drains=drains_of(flags, num_replicas))

    @property
    def is_clear(self) -> bool:
        """Whether the router sees everything at once and may send anywhere."""
        return not self._delay_s and not self._drains

    def view(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """What the router sees where the truth is `snapshot`; call it once for each decision."""
        seen = self._delayed(snapshot) if self._delay_s else snapshot
        seen.available = self.available(snapshot.now_s, snapshot.num_replicas)
        return seen

    def on_dispatch(self, replica: int, prompt_tokens: int) -> None:
        """The router has sent a request: it knows that, whatever replicas report."""
        if self._delay_s:
            self._sent.append((replica, prompt_tokens))
            self._num_sent += 1

    def available(self, now_s: float, num_replicas: int) -> NDArray[np.bool_] | None:
        """Which replicas take new requests; None for all of them, also if none would be left."""
        closed = [drain.replica for drain in self._drains if drain.from_s <= now_s < drain.to_s]
        if not closed or len(set(closed)) >= num_replicas:
            return None
        mask = np.ones(num_replicas, dtype=np.bool_)
        mask[closed] = False
        return mask

    def _delayed(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        self._reports.append((snapshot, self._num_sent))
        while len(self._reports) > 1 and self._reports[1][0].now_s <= snapshot.now_s - self._delay_s:
            self._reports.popleft()
        # Before the first report has arrived, the router knows the replicas as they were at its first decision: empty.
        report, num_sent_then = self._reports[0]
        while self._num_sent - len(self._sent) < num_sent_then:
            self._sent.popleft()
        values = report.values.copy()
        for replica, prompt_tokens in self._sent:
            values[_OUTSTANDING, replica] += 1
            values[_PREFILL, replica] += prompt_tokens
            values[_TYPICAL, replica] = updated_typical_prompt(values[_TYPICAL, replica], prompt_tokens)
        return ClusterSnapshot(
            snapshot.now_s,
            values,
            kv_block_size=report.kv_block_size,
            expected_decode_tokens=report.expected_decode_tokens,
            waiting=report.waiting,
        )
