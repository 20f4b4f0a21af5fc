"""The backends: which there are, which are up, which take new requests."""

import logging
import math
from collections.abc import Collection

import numpy as np

from .breaker import CircuitBreaker
from .settings import check_url
from .source import Replica, VllmReplicaSource

logger = logging.getLogger(__name__)


class Backend:
    """One vLLM server, and what the router knows of its health."""

    def __init__(self, url: str, replica: Replica, breaker: CircuitBreaker) -> None:
        self.url = url
        #: How logs and metrics call it.
        self.name = url.partition("://")[2]
        self.replica = replica
        self.breaker = breaker
        #: Whether it answers health checks; a new one has to do so first.
        self.is_up = False
        self.is_draining = False
        self.is_removed = False
        self.in_flight = 0
        self.failed_checks = 0
        #: Models that it serves, as it says; None before it has said so.
        self.models: dict[str, dict[str, object]] | None = None
        #: When its metrics were last read; None if they are too old to go by.
        self.reported_at_s: float | None = None
        #: Whether it was said that it has no metrics that can be read.
        self.is_known_silent = False

    def serves(self, model: str) -> bool:
        """Whether it may serve a model; one that has not said what it serves may."""
        return self.models is None or model in self.models

    def describe(self, now_s: float) -> dict[str, object]:
        """State of the backend as plain values, for people and for the admin paths."""
        return {
            "url": self.url,
            "is_up": self.is_up,
            "is_draining": self.is_draining,
            "circuit": self.breaker.state,
            "in_flight": self.in_flight,
            "models": sorted(self.models or ()),
            "metrics_age_s": None if self.reported_at_s is None else round(now_s - self.reported_at_s, 3),
        }


class NoBackendError(Exception):
    """No backend can take a request; `is_busy`: because all that could are full."""

    def __init__(self, is_busy: bool) -> None:
        super().__init__("all backends are busy" if is_busy else "no backend is available")
        self.is_busy = is_busy


class Fleet:
    """All backends; told what happens to each of them."""

    def __init__(self, source: VllmReplicaSource, *, max_in_flight: int, breaker_failures: int) -> None:
        self.source = source
        self.backends: list[Backend] = []
        self._max_in_flight = max_in_flight
        self._breaker_failures = breaker_failures

    def add(self, url: str, speed_factor: float = 1.0) -> Backend:
        """Add a backend; SettingsError if the address is not valid, ValueError if it is there already."""
        url = check_url(url)
        if any(backend.url == url for backend in self.backends):
            raise ValueError(f"backend {url} is there already")
        replica = self.source.add(url, speed_factor)
        backend = Backend(url, replica, CircuitBreaker(failures=self._breaker_failures))
        self.backends.append(backend)
        return backend

    def find(self, url: str) -> Backend:
        """The backend with an address; ValueError if there is none."""
        wanted = check_url(url)
        for backend in self.backends:
            if backend.url == wanted:
                return backend
        raise ValueError(f"there is no backend {url}; there are {', '.join(b.url for b in self.backends) or 'none'}")

    def remove(self, backend: Backend) -> None:
        """Forget a backend; requests that it works on are finished."""
        self.backends.remove(backend)
        self.source.remove(backend.replica)
        backend.is_removed = True

    def members(
        self, now_s: float, *, model: str = "", excluded: Collection[Backend] = (), only: Backend | None = None
    ) -> tuple[list[Backend], "np.ndarray[tuple[int], np.dtype[np.bool_]] | None"]:
        """The backends that a decision sees, and which of them may be chosen (None: all); NoBackendError without any.

        Whoever is down is not seen at all, as if it were not there: an idle-looking dead replica would make the others
        look busy. Those that are drained or full are seen and not chosen. A model that nobody has is for any of them to
        refuse. `only`: the one that a request has to go to, even while it drains.
        """
        up = [backend for backend in self.backends if backend.is_up and backend.breaker.allows(now_s)]
        is_known = bool(model) and any(b.models is not None and model in b.models for b in self.backends)
        full = self._max_in_flight
        meant = [
            backend is only if only is not None else not backend.is_draining and (not is_known or backend.serves(model))
            for backend in up
        ]
        open_to = [
            is_meant and backend.in_flight < full and backend not in excluded
            for is_meant, backend in zip(meant, up, strict=True)
        ]
        if all(open_to) and up:
            return up, None
        if not any(open_to):
            is_busy = any(is_meant and backend.in_flight >= full for is_meant, backend in zip(meant, up, strict=True))
            raise NoBackendError(is_busy)
        return up, np.array(open_to)

    def retry_after_s(self) -> int:
        """When a client that was turned away may come again: once a tenth of the requests should have been served."""
        in_flight = sum(backend.in_flight for backend in self.backends)
        rate_per_s = sum(backend.replica.completion_rate_per_s for backend in self.backends)
        return max(1, min(60, math.ceil(0.1 * in_flight / max(rate_per_s, 0.01))))

    def on_connect_failure(self, backend: Backend) -> None:
        """A connection was refused: the backend is down, no need to wait for the health check."""
        self.set_down(backend, "does not accept connections")

    def set_down(self, backend: Backend, why: str) -> None:
        """Send nothing more to a backend until it answers a health check."""
        if backend.is_up:
            backend.is_up = False
            logger.warning("backend %s is down: it %s", backend.name, why)

    def set_up(self, backend: Backend) -> None:
        """The backend answers its health checks again."""
        backend.failed_checks = 0
        if not backend.is_up:
            backend.is_up = True
            backend.breaker.on_success()
            logger.info("backend %s is up", backend.name)
