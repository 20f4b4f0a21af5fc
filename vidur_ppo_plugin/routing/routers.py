"""Routers by name: snapshot and request in, replica out. They decide as the schedulers of that name in Vidur do.

A router may keep a state (whose turn it is, a random generator), so a run needs one of its own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .delay_model import DelayModel
from .heuristics import HEURISTICS, STOCK, Cost, available_cost, choose, drawn_cost
from .snapshot import ClusterSnapshot, FloatArray, RequestInfo

__all__ = ["HEURISTICS", "STOCK", "CostRouter", "Router", "Scored", "build_router", "scored"]

Router = Callable[[ClusterSnapshot, RequestInfo], int]


@dataclass(frozen=True)
class Scored:
    """A decision and what it was made by: a score per replica, the highest wins. None where a router has none."""

    replica: int
    scores: FloatArray | None


def scored(router: Router, snapshot: ClusterSnapshot, request: RequestInfo) -> Scored:
    """The decision of any router, with its scores if it has some."""
    decide = getattr(router, "scored", None)
    result: Scored = Scored(router(snapshot, request), None) if decide is None else decide(snapshot, request)
    return result


def build_router(
    name: str, *, seed: int, delay_model: DelayModel | None = None, options: Mapping[str, Any] | None = None
) -> Router:
    """A router with the same seed for ties as the scheduler of that name; `options` are the flags of the latter."""
    rng = random.Random(seed)
    if name == "round_robin":
        return _next_available(_RoundRobin())
    if name == "random":
        return _next_available(lambda snapshot, request: rng.randrange(snapshot.num_replicas))
    if name == "lor":  # Vidur's: waiting requests only, and the first replica on ties
        return _next_available(lambda snapshot, request: int(np.argmin(snapshot.waiting_requests)))
    if name not in HEURISTICS:
        raise ValueError(f"unknown router {name!r}: choose from {', '.join((*STOCK, *HEURISTICS))}")
    heuristic = HEURISTICS[name]
    return CostRouter(heuristic.bind(delay_model, options), rng, num_drawn=heuristic.num_drawn)


class CostRouter:
    """Takes the replica of the lowest cost; ties are broken fairly."""

    def __init__(self, cost: Cost, rng: random.Random, *, num_drawn: int = 0) -> None:
        """`num_drawn`: only so many replicas, drawn at random for each request, are compared; 0: all."""
        self._cost = cost
        self._rng = rng
        self._num_drawn = num_drawn

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        if self._num_drawn:
            return choose(self._costs(snapshot, request), self._rng)
        # Written out: it is half of what the simplest decision takes.
        cost = self._cost(snapshot, request)
        return choose(cost if snapshot.available is None else available_cost(cost, snapshot), self._rng)

    def scored(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Scored:
        """The replica that a call would give, with minus its costs as scores."""
        cost = self._costs(snapshot, request)
        return Scored(choose(cost, self._rng), -cost)

    def _costs(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        cost = self._cost(snapshot, request)
        if self._num_drawn:
            cost = drawn_cost(cost, snapshot, self._num_drawn, self._rng)
        return cost if snapshot.available is None else available_cost(cost, snapshot)


def _next_available(router: Router) -> Router:
    """A stock router, but where it takes a drained replica, of which it knows nothing, the next one that is open."""

    def route(snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        replica = router(snapshot, request)
        while snapshot.available is not None and not snapshot.available[replica]:
            replica = (replica + 1) % snapshot.num_replicas
        return replica

    return route


class _RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._counter = -1

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        self._counter += 1
        return self._counter % snapshot.num_replicas
