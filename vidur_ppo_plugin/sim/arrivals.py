"""Arrivals at a lower rate than the workload's, for the stages of a curriculum.

Vidur makes all arrival events before a run begins. With a curriculum, the gap before each arrival is stretched by the
load of the stage in which the arrival before it happened: load 0.5 doubles it. The stage may depend on what was
learned, so an arrival's time is known only once the arrival before it has happened; early events wait for that.
"""

from collections import deque
from collections.abc import Callable
from typing import Any


class ArrivalClock:
    """Decides when requests really arrive. Stretches gaps, never shrinks them: a load is at most 1."""

    def __init__(self, load: Callable[[], float]) -> None:
        self._load = load
        self._last_nominal_s = 0.0
        self._last_s = 0.0
        # Requests whose event came, but whose turn has not; and the one that is due next.
        self._early: deque[Any] = deque()
        self._due: Any = None

    def on_event(self, request: Any, time_s: float) -> tuple[bool, list[tuple[float, Any]]]:
        """An arrival event: whether the request arrives now, and events to schedule (time, request)."""
        if self._due is request:
            self._due = None
            self._last_s = time_s
            return True, self._next()
        self._early.append(request)
        return False, self._next() if self._due is None else []

    def _next(self) -> list[tuple[float, Any]]:
        """The arrival that follows the last one, if its event has come."""
        if not self._early:
            return []
        request = self._early.popleft()
        nominal_s = request._arrived_at
        gap_s = nominal_s - self._last_nominal_s
        self._last_nominal_s = nominal_s
        # Never before the event itself: rounding may put the stretched time a hair earlier.
        arrives_s = max(nominal_s, self._last_s + gap_s / self._load())
        request._arrived_at = arrives_s
        self._due = request
        return [(arrives_s, request)]


def apply() -> None:
    """Let arrival events ask the scheduler's `arrival_clock`, where it has one; once."""
    from vidur.events.request_arrival_event import RequestArrivalEvent

    stock = RequestArrivalEvent.handle_event
    if hasattr(stock, "asks_arrival_clock"):
        return

    def handle_event(self: Any, scheduler: Any, metrics_store: Any) -> list[Any]:
        clock = getattr(scheduler, "arrival_clock", None)
        if clock is None:
            return list(stock(self, scheduler, metrics_store))
        arrives_now, later = clock.on_event(self._request, self._time)
        events = list(stock(self, scheduler, metrics_store)) if arrives_now else []
        return events + [RequestArrivalEvent(time_s, request) for time_s, request in later]

    handle_event.asks_arrival_clock = True  # type: ignore[attr-defined]
    RequestArrivalEvent.handle_event = handle_event
