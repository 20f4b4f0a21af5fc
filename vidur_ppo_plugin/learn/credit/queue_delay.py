"""The reward `queue_delay`: minus the time that requests spend in the system between two decisions."""

import math

from vidur_ppo_plugin.flags import require_value


class QueueDelay:
    """Minus the time-integral of the requests in the system; with power p, of the growth of their age^p.

    Summed over a fully drained run this is minus the sum of latency^p (p = 1: Little's law). An event costs O(1);
    taking the reward costs O(1) for p = 1 and O(requests in flight) otherwise.
    """

    def __init__(self, *, latency_power: float = 1.0) -> None:
        require_value(0.0 < latency_power < math.inf, "latency_power", latency_power, "finite and > 0")
        self._power = latency_power
        self.start_run()

    def start_run(self) -> None:
        """A new simulation, whose clock starts again; what was in flight is forgotten."""
        self._in_flight: dict[int, list[float]] = {}  # arrived_at_s, age^p already charged
        self._now_s = -math.inf
        self._pending = 0.0

    def on_arrival(self, now_s: float, request_id: int) -> None:
        """A request enters the system."""
        require_value(request_id not in self._in_flight, "request_id", request_id, "of a request not in flight")
        self._advance(now_s)
        self._in_flight[request_id] = [now_s, 0.0]

    def on_completion(self, now_s: float, request_id: int) -> None:
        """A request leaves the system."""
        require_value(request_id in self._in_flight, "request_id", request_id, "of a request in flight")
        self._advance(now_s)
        self._charge(self._in_flight.pop(request_id))

    def take(self, now_s: float) -> float:
        """The reward since the last take, up to `now_s`."""
        self._advance(now_s)
        for entry in self._in_flight.values() if self._power != 1.0 else ():
            self._charge(entry)
        taken, self._pending = self._pending, 0.0
        return taken

    def _advance(self, now_s: float) -> None:
        require_value(self._now_s <= now_s < math.inf, "now_s", now_s, f"finite and >= {self._now_s}")
        if self._power == 1.0 and self._in_flight:
            self._pending -= len(self._in_flight) * (now_s - self._now_s)
        self._now_s = now_s

    def _charge(self, entry: list[float]) -> None:
        if self._power != 1.0:
            grown = (self._now_s - entry[0]) ** self._power
            self._pending -= grown - entry[1]
            entry[1] = grown
