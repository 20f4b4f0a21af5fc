"""Routers by name: snapshot and request in, replica out. They decide as the schedulers of that name in Vidur do.

A router may keep a state (whose turn it is, a random generator), so a run needs one of its own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import heuristics
from .delay_model import DelayModel
from .snapshot import ClusterSnapshot, FloatArray, RequestInfo

Router = Callable[[ClusterSnapshot, RequestInfo], int]
Cost = Callable[[ClusterSnapshot, RequestInfo], FloatArray]


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


#: Vidur's own; then ours.
STOCK = ("random", "round_robin", "lor")
HEURISTICS = (
    "power_of_two",
    "least_outstanding",
    "least_kv",
    "least_tokens",
    "least_work",
    "shortest_delay",
    "size_split",
)


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
    return CostRouter(_cost(name, rng, delay_model, dict(options or {})), rng)


class CostRouter:
    """Takes the replica of the lowest cost; ties are broken fairly."""

    def __init__(self, cost: Cost, rng: random.Random) -> None:
        self._cost = cost
        self._rng = rng

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        return heuristics.choose(heuristics.available_cost(self._cost(snapshot, request), snapshot), self._rng)

    def scored(self, snapshot: ClusterSnapshot, request: RequestInfo) -> Scored:
        """The same decision, and minus the costs."""
        cost = heuristics.available_cost(self._cost(snapshot, request), snapshot)
        return Scored(heuristics.choose(cost, self._rng), -cost)


def _next_available(router: Router) -> Router:
    """Vidur's own know nothing of drained replicas: as a load balancer would, take the next one that is open."""

    def route(snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        replica = router(snapshot, request)
        while snapshot.available is not None and not snapshot.available[replica]:
            replica = (replica + 1) % snapshot.num_replicas
        return replica

    return route


def _cost(name: str, rng: random.Random, delay_model: DelayModel | None, options: dict[str, Any]) -> Cost:
    if name == "shortest_delay":
        if delay_model is None:
            raise ValueError("shortest_delay needs a delay model")
        return lambda snapshot, request: heuristics.shortest_delay(snapshot, request, delay_model=delay_model)
    if name == "size_split":
        return lambda snapshot, request: heuristics.size_split(snapshot, request, **options)
    if name == "least_tokens":
        return lambda snapshot, request: heuristics.least_tokens(snapshot, **options)
    costs: dict[str, Cost] = {
        "least_outstanding": lambda snapshot, request: heuristics.least_outstanding(snapshot),
        "power_of_two": lambda snapshot, request: heuristics.power_of_two(snapshot, rng),
        "least_kv": lambda snapshot, request: heuristics.least_kv(snapshot),
        "least_work": lambda snapshot, request: heuristics.least_work(snapshot),
    }
    if name not in costs:
        raise ValueError(f"unknown router {name!r}: choose from {', '.join((*STOCK, *HEURISTICS))}")
    return costs[name]


class _RoundRobin:
    """Replicas in turn."""

    def __init__(self) -> None:
        self._counter = -1

    def __call__(self, snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        self._counter += 1
        return self._counter % snapshot.num_replicas
