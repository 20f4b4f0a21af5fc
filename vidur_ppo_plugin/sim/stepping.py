"""A Vidur simulation that stops at every placement decision and goes on once it is told the replica.

Vidur's `Simulator.run` asks its global scheduler from inside the event loop. Here the loop is turned inside out: events
are handled one by one until a request has to be placed, and the scheduler hands over what was decided meanwhile.
"""

import heapq
import io
import logging
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
from vidur.events.global_schedule_event import GlobalScheduleEvent
from vidur.simulator import Simulator

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.learn.credit.exact import ShadowTwin

from .cluster import VidurCluster
from .flags import known_flags, to_arguments
from .launch import parse
from .twin_config import twin_config

# Who places requests here is not one of Vidur's schedulers; and nothing that Vidur could write is wanted.
_FIXED_FLAGS: dict[str, Any] = {
    "global_scheduler_config_type": "round_robin",
    "metrics_config_write_metrics": False,
    "metrics_config_store_plots": False,
    "metrics_config_enable_chrome_trace": False,
}


def simulation_config(flags: Mapping[str, Any]) -> Any:
    """Vidur's config of the cluster and workload that flags describe; ValueError says what is wrong with a flag."""
    with _configured(flags) as config:
        return config


class SteppedVidur(VidurCluster):
    """A whole simulation as a cluster: it runs until a request has to be placed."""

    def __init__(
        self,
        vidur_flags: Mapping[str, Any],
        *,
        num_waiting_slots: int = 0,
        has_exact_credit: bool = False,
    ) -> None:
        """`vidur_flags`: cluster and workload.

        `has_exact_credit`: marginal delay by forward simulation in a twin, not by the linear model; ValueError if the
        twin does not cover the cluster.
        """
        with _configured(vidur_flags) as config, _quiet(), _random_numbers_untouched():
            self._simulator = Simulator(config)
        scheduler = self._simulator.scheduler
        scheduler.schedule = self.take_placements
        super().__init__(
            config,
            scheduler._replica_schedulers,
            num_waiting_slots=num_waiting_slots,
            is_compiled=True,
            tells_completions=True,
            shadow=ShadowTwin(twin_config(config)) if has_exact_credit else None,
        )
        arrivals = sorted(self._simulator._event_queue, key=lambda item: item[0])
        self._numbers = {event._request.id: number for number, (_, event) in enumerate(arrivals)}
        # The event whose requests are being placed.
        self._event: Any = None

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its number in order of arrival. None once everything is completed."""
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
                self.queue(sorted(queue, key=lambda request: request.arrived_at), event.time)
                queue.clear()
            else:
                self._handle(event)
        return super().next_request()

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time; of one moment, in the order of arrival."""
        return sorted(super().take_completions())

    def _number(self, request: Any) -> int:
        """The request's place in the order of arrivals."""
        return self._numbers[request.id]

    def _handle(self, event: Any) -> None:
        simulator = self._simulator
        simulator._set_time(event._time)
        simulator._add_events(event.handle_event(simulator.scheduler, simulator.metric_store))

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
