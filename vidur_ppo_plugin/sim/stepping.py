"""A Vidur simulation that stops at every placement decision and goes on once it is told the replica.

Vidur's `Simulator.run` asks its global scheduler from inside the event loop. Here the loop is turned inside out: events
are handled one by one until a request has to be placed, and the scheduler hands over what was decided meanwhile.
"""

import heapq
import io
import logging
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vidur.events.global_schedule_event import GlobalScheduleEvent
from vidur.simulator import Simulator

from vidur_ppo_plugin.flags import PPOModularFlags, speed_factors
from vidur_ppo_plugin.learn.credit.analytic import DrainCost
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from .credit import ActionRewards, RewardTracker
from .flags import known_flags, to_arguments
from .launch import parse
from .replica_source import VidurReplicaSource
from .roofline_predictor import build_roofline
from .schedulers import prefill_chunk_size
from .twin_filler import TwinFiller

# Who places requests here is not one of Vidur's schedulers; and nothing that Vidur could write is wanted.
_FIXED_FLAGS: dict[str, Any] = {
    "global_scheduler_config_type": "round_robin",
    "metrics_config_write_metrics": False,
    "metrics_config_store_plots": False,
    "metrics_config_enable_chrome_trace": False,
}


class Completion(NamedTuple):
    """What happened to a request, known by its place in the order of arrivals."""

    completed_at_s: float
    request: int
    replica: int
    arrived_at_s: float
    first_token_at_s: float
    num_restarts: int


def simulation_config(flags: Mapping[str, Any]) -> Any:
    """Vidur's config of the cluster and workload that flags describe; ValueError says what is wrong with a flag."""
    with _configured(flags) as config:
        return config


class SteppedVidur:
    """A simulation: `next_request`, look at it, `place` it, and again."""

    def __init__(
        self, vidur_flags: Mapping[str, Any], flags: PPOModularFlags, *, has_exact_credit: bool = False
    ) -> None:
        """`vidur_flags`: cluster and workload; of `flags` what is seen of a replica and what a placement is worth.

        `has_exact_credit`: marginal delay by forward simulation in a twin, not by the linear model of `ppo_modular`;
        ValueError if the twin does not cover the cluster.
        """
        with _configured(vidur_flags) as config, _quiet(), _random_numbers_untouched():
            self._simulator = Simulator(config)
        scheduler = self._simulator.scheduler
        scheduler.schedule = self._hand_over
        self._replica_ids = list(scheduler._replica_schedulers)
        replica_schedulers = list(scheduler._replica_schedulers.values())
        speeds = speed_factors(config.execution_time_predictor_config, self.num_replicas)
        self._source = VidurReplicaSource(
            replica_schedulers,
            speed_factors=speeds,
            num_waiting_slots=flags.max_queue_requests_per_replica,
            on_completion=self._on_completion,
            is_compiled=True,
        )
        self._flags = flags
        self._filler = TwinFiller(config, replica_schedulers) if has_exact_credit else None
        roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
        cost = DrainCost.from_roofline(roofline, prefill_chunk_size(config))
        self._credit = RewardTracker(flags, self._source, cost=cost, speed_factors=speeds)
        arrivals = sorted(self._simulator._event_queue, key=lambda item: item[0])
        self._indices = {event._request.id: index for index, (_, event) in enumerate(arrivals)}
        # The event whose requests are being placed, those that are left, and where the others go.
        self._event: Any = None
        self._queue: deque[Any] = deque()
        self._placements: list[tuple[Any, Any]] = []
        self._completions: list[Completion] = []
        #: The moment of the decision, at the end that of the last completion.
        self.now_s = 0.0

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self._replica_ids)

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its index. None once everything is completed."""
        while not self._queue:
            if self._event is not None:
                self._handle(self._event)
                self._event = None
            if not self._simulator._event_queue:
                self._check_drained()
                return None
            _, event = heapq.heappop(self._simulator._event_queue)
            queue = self._simulator.scheduler._request_queue
            if isinstance(event, GlobalScheduleEvent) and queue:
                self._event = event
                self._queue.extend(sorted(queue, key=lambda request: request.arrived_at))
                queue.clear()
                self.now_s = event.time
            else:
                self._handle(event)
        return self._indices[self._queue[0].id]

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""
        return self._source.request_info(self._queue[0])

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""
        return self._source.snapshot(self.now_s)

    def placement_rewards(self) -> ActionRewards:
        """marginal_delay: the reward of placing the request on each replica."""
        request = self._queue[0]
        if self._filler is None:
            return self._credit.of_every_action(request, self.now_s, None)
        twin = self._filler.fill(self.now_s)
        # Placed at this very moment: Vidur hands them over once all of the moment are placed.
        for replica_id, placed in self._placements:
            replica = self._replica_ids.index(replica_id)
            twin.submit(replica, self.now_s, placed.num_prefill_tokens, placed.num_decode_tokens)
        return -twin.marginal_delay(
            self.now_s,
            request.num_prefill_tokens,
            request.num_decode_tokens,
            **self._flags.credit_weights,
        )

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        request = self._queue.popleft()
        self._source.on_dispatch(replica, request)
        self._placements.append((self._replica_ids[replica], request))

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""
        taken, self._completions = self._completions, []
        return sorted(taken)

    def _handle(self, event: Any) -> None:
        simulator = self._simulator
        simulator._set_time(event._time)
        simulator._add_events(event.handle_event(simulator.scheduler, simulator.metric_store))

    def _hand_over(self) -> list[tuple[Any, Any]]:
        """In place of the scheduler's `schedule`: what was decided."""
        placements, self._placements = self._placements, []
        return placements

    def _on_completion(self, replica: int, request: Any) -> None:
        self.now_s = request._completed_at
        self._completions.append(
            Completion(
                request._completed_at,
                self._indices[request.id],
                replica,
                request._arrived_at,
                request._prefill_completed_at,
                request.num_restarts,
            )
        )

    def _check_drained(self) -> None:
        pending = self._simulator.scheduler.get_pending_requests()
        if pending:
            raise ValueError(
                f"{len(pending)} requests can never run: their prompts exceed the KV cache, the batch or the longest "
                f"request of the replica scheduler"
            )


@contextmanager
def _configured(flags: Mapping[str, Any]) -> Iterator[Any]:
    """A config, and for as long as somebody builds a simulation of it the directories that it names."""
    with tempfile.TemporaryDirectory(prefix="vidur-ppo-") as name:
        paths = {
            "metrics_config_output_dir": str(Path(name) / "output"),
            "roofline_execution_time_predictor_config_cache_dir": str(Path(name) / "cache"),
        }
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                config = parse(to_arguments({**flags, **_FIXED_FLAGS, **paths}, known_flags()))
        except SystemExit:  # as a command line, Vidur's parser ends the process
            raise ValueError(said.getvalue().strip()) from None
        yield config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Vidur logs when it builds a cluster: episodes come by the thousand."""
    vidur = logging.getLogger("vidur")
    level = vidur.level
    vidur.setLevel(logging.WARNING)
    try:
        yield
    finally:
        vidur.setLevel(level)


@contextmanager
def _random_numbers_untouched() -> Iterator[None]:
    """Vidur seeds the generators that everybody shares; whoever learns here may be using them."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
