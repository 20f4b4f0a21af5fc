"""The one loop: advance the cluster to the next request, look, ask the router, place.

`drive` runs it to the end. Who is called instead of calling (a global scheduler in Vidur, an environment) enters it
through the same `Run`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vidur_ppo_plugin.routing.routers import Router
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility

from .cluster import Cluster, Completion


class Arrival(NamedTuple):
    """A request that has to be placed, and what is known at this moment."""

    #: The request's number in the cluster.
    number: int
    request: RequestInfo
    #: The replicas as they are.
    snapshot: ClusterSnapshot
    #: The replicas as the router sees them.
    seen: ClusterSnapshot


class Listener:
    """Is told what happens in a run; whoever listens overrides what it wants to hear."""

    def on_completions(self, completions: Sequence[Completion]) -> None:
        """Requests were completed, in the order of time."""

    def on_arrival(self, arrival: Arrival) -> None:
        """A request has to be placed; the router has not been asked yet."""

    def on_decision(self, arrival: Arrival, replica: int) -> None:
        """The router has chosen; the request is not yet on its way, so the cluster can still be asked about it."""

    def on_end(self, now_s: float, snapshot: ClusterSnapshot) -> None:
        """The run is over."""


class Run:
    """A run of a cluster: who hears of it, and what the router sees."""

    def __init__(
        self, cluster: Cluster, listeners: Sequence[Listener] = (), *, visibility: Visibility | None = None
    ) -> None:
        """`visibility`: what the router sees; everything unless given."""
        self.cluster = cluster
        self.visibility = Visibility() if visibility is None else visibility
        self._listeners = tuple(listeners)

    def next_arrival(self) -> Arrival | None:
        """The next request to place; None if the cluster has none."""
        number = self.cluster.next_request()
        self._tell_completions()
        if number is None:
            return None
        request, snapshot = self.cluster.request_info(), self.cluster.snapshot()
        arrival = Arrival(number, request, snapshot, self.visibility.view(snapshot))
        for listener in self._listeners:
            listener.on_arrival(arrival)
        return arrival

    def place(self, arrival: Arrival, replica: int) -> None:
        """Send the request to a replica."""
        for listener in self._listeners:
            listener.on_decision(arrival, replica)
        self.cluster.place(replica)
        self.visibility.on_dispatch(replica, arrival.request.prompt_tokens)

    def go(self, router: Router) -> None:
        """Place every request that the cluster has to place."""
        while (arrival := self.next_arrival()) is not None:
            self.place(arrival, router(arrival.seen, arrival.request))

    def end(self) -> None:
        """Nothing will happen any more: tell what was completed, and that it is over."""
        if not self._listeners:
            return
        self._tell_completions()
        now_s, snapshot = self.cluster.now_s, self.cluster.snapshot()
        for listener in self._listeners:
            listener.on_end(now_s, snapshot)

    def _tell_completions(self) -> None:
        if not self._listeners:  # whoever runs the cluster takes them at the end
            return
        completions = self.cluster.take_completions()
        if completions:
            for listener in self._listeners:
                listener.on_completions(completions)


def drive(
    cluster: Cluster, router: Router, listeners: Sequence[Listener] = (), *, visibility: Visibility | None = None
) -> None:
    """Run a cluster to its end, each request placed by the router."""
    run = Run(cluster, listeners, visibility=visibility)
    run.go(router)
    run.end()
