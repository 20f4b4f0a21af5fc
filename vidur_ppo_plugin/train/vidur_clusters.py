"""The clusters of an episode in Vidur itself: some hundred times as slow, for what the twin does not cover."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.clusters.drive import Run, drive
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.features import build_observer
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.routing.routers import Router
from vidur_ppo_plugin.routing.snapshot import FloatArray
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.sim.stepping import SteppedVidur
from vidur_ppo_plugin.twin.layout import IntArray
from vidur_ppo_plugin.twin.policy_kernels import Trajectories, choose_replica
from vidur_ppo_plugin.twin.twin import Completions, in_order
from vidur_ppo_plugin.twin.vector import VectorObservation
from vidur_ppo_plugin.workload.requests import Requests

from .clusters import Cluster
from .episodes import Episode


class VidurClusters:
    """What training wants of `twin.policy_twin.PolicyTwin`, from Vidur, one cluster after the other."""

    def __init__(
        self, episode: Episode, cluster: Cluster, flags: PPOModularFlags, requests: Sequence[Requests]
    ) -> None:
        self._runs = [
            _Stream(episode, number, cluster, replace(flags, tail_preference=preference), part)
            for number, (part, preference) in enumerate(zip(requests, episode.tail_preferences, strict=True))
        ]

    def play(
        self,
        actor: Actor,
        steps: int,
        *,
        temperature: float = 0.0,
        epsilon: float = 0.0,
        uniforms: FloatArray | None = None,
        forced: NDArray[np.integer] | None = None,
        with_credit: bool = False,
        latency_power: float = 1.0,
        backlog_weight: float = 0.0,
    ) -> Trajectories:
        """What `PolicyTwin.play` does."""
        shape = (len(self._runs), steps)
        numbers = np.zeros((*shape, 2)) if uniforms is None else uniforms
        actions = np.full(shape, -1) if forced is None else np.asarray(forced, np.int64)
        weights = (latency_power, backlog_weight) if with_credit else None
        parts = [
            run.play(actor, (temperature, epsilon), numbers[cluster], actions[cluster], weights)
            for cluster, run in enumerate(self._runs)
        ]
        return Trajectories(*(np.stack(columns) for columns in zip(*parts, strict=True)))

    def observe(self) -> VectorObservation:
        """What the policy sees at the next request of every cluster."""
        rows = [(run.replicas, run.request, run.load, run.in_flight) for run in self._runs]
        return VectorObservation(*(np.stack(columns) for columns in zip(*rows, strict=True)))

    @property
    def oldest_wait_s(self) -> FloatArray:
        """The longest wait in a queue that the router sees, at the next request of each cluster."""
        return np.array([run.oldest_wait_s for run in self._runs])

    @property
    def in_flight(self) -> FloatArray:
        """[clusters, replicas]: requests in flight at the next request."""
        return np.stack([run.in_flight for run in self._runs])

    def completions(self) -> tuple[IntArray, Completions]:
        """Requests completed since the last call: their clusters, and what happened to them."""
        rows = [(cluster, done) for cluster, run in enumerate(self._runs) for done in run.simulation.take_completions()]
        completions = completions_of([done for _, done in rows])
        return np.array([cluster for cluster, _ in rows], np.int64), completions


def completions_of(done: Sequence[Completion]) -> Completions:
    """Completions as arrays."""
    return Completions(
        index=np.array([one.request for one in done], np.int64),
        replica=np.array([one.replica for one in done], np.int64),
        arrived_at_s=np.array([one.arrived_at_s for one in done]),
        scheduled_at_s=np.full(len(done), np.nan),  # nobody asks for it here
        first_token_at_s=np.array([one.first_token_at_s for one in done]),
        completed_at_s=np.array([one.completed_at_s for one in done]),
        num_restarts=np.array([one.num_restarts for one in done], np.int64),
    )


class _Stream:
    """One cluster, always at a request that has to be placed."""

    def __init__(
        self, episode: Episode, number: int, cluster: Cluster, flags: PPOModularFlags, requests: Requests
    ) -> None:
        self.simulation = SteppedVidur(
            episode.at_scale(number).vidur_flags(episode.seeds[number], episode.num_requests),
            num_waiting_slots=flags.max_queue_requests_per_replica,
            # Exact where the twin covers the cluster, as in the twin itself.
            has_exact_credit=cluster.twin is not None,
        )
        visibility = Visibility(report_delay_s=episode.report_delay_s, drains=episode.drains(requests))
        self._run = Run(self.simulation, visibility=visibility)
        self._observer = build_observer(flags, cluster.delay_model)
        self._go_on()

    def _go_on(self) -> None:
        """To the next request."""
        arrival = self._run.next_arrival()
        if arrival is None:
            raise RuntimeError("the simulation is over: there is no request left to place")
        self._arrival = arrival
        self.in_flight = arrival.snapshot.outstanding_requests.copy()
        self.load = arrival.snapshot.token_load.copy()
        observation, self._prior_logits, _ = self._observer.observe(arrival.seen, arrival.request)
        self.replicas, self.request = observation.replicas, observation.request
        self.oldest_wait_s = float(arrival.seen.oldest_wait_s.max())

    def play(
        self,
        actor: Actor,
        exploration: tuple[float, float],
        uniforms: FloatArray,
        forced: IntArray,
        credit_weights: tuple[float, float] | None,
    ) -> tuple[NDArray[np.generic], ...]:
        """Decisions one after the other: the arrays of `Trajectories` for this cluster; without weights no credit."""
        rows = []
        for numbers, action in zip(uniforms.tolist(), forced.tolist(), strict=True):
            logits = actor.logits(self.replicas, self.request, self._prior_logits)
            replica = action if action >= 0 else int(choose_replica(logits, *exploration, *numbers))
            if replica < 0:
                raise FloatingPointError(f"the policy's logits are not finite: {logits.tolist()}")
            credit = np.zeros(len(logits))
            if credit_weights is not None:
                power, backlog_weight = credit_weights
                credit = -self.simulation.marginal_delay(latency_power=power, backlog_weight=backlog_weight)
            seen = self.replicas, self.request, self._prior_logits
            rows.append((*seen, logits, replica, credit, self.load, self.in_flight, self.oldest_wait_s))
            self._run.place(self._arrival, replica)
            self._go_on()
        return tuple(np.stack(column) for column in zip(*rows, strict=True))


def play_in_vidur(
    vidur_flags: Mapping[str, Any], router: Router, *, visibility: Visibility, num_waiting_slots: int
) -> Completions:
    """Serve the requests of a simulation as a router places them; what happened to each, in their order."""
    simulation = SteppedVidur(vidur_flags, num_waiting_slots=num_waiting_slots)
    drive(simulation, router, visibility=visibility)
    return in_order(completions_of(simulation.take_completions()))
