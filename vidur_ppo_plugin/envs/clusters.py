"""What an episode runs on: a cluster that stops at every placement, in the compiled twin or in Vidur itself."""

from typing import Any, Protocol

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.sim.stepping import Completion, SteppedVidur
from vidur_ppo_plugin.sim.twin_filler import twin_config
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin
from vidur_ppo_plugin.workload.requests import Requests


class SteppedCluster(Protocol):
    """A run of some requests: `next_request`, look at it, `place` it, and again."""

    #: The moment of the decision, at the end that of the last completion.
    now_s: float

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its index. None once everything is completed."""

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""

    def placement_rewards(self) -> FloatArray:
        """marginal_delay: the reward of placing the request on each replica."""

    def place(self, replica: int) -> None:
        """Send the request to a replica."""

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""


class Backend(Protocol):
    """Starts runs of a scenario."""

    def start(self, seed: int, requests: Requests) -> SteppedCluster:
        """A run of the requests of a seed."""


class VidurBackend:
    """Runs in Vidur; marginal delay comes from a twin that is put into Vidur's state."""

    def __init__(self, scenario: Scenario, config: Any, flags: PPOModularFlags) -> None:
        """`config`: Vidur's; ValueError if marginal delay is wanted where the twin does not cover the cluster."""
        if flags.reward_mode == "marginal_delay":
            twin_config(config)
        self._scenario = scenario
        self._flags = flags

    def start(self, seed: int, requests: Requests) -> SteppedVidur:
        """A run of the requests of a seed: Vidur draws the same ones itself."""
        has_exact_credit = self._flags.reward_mode == "marginal_delay"
        vidur_flags = self._scenario.vidur_flags(seed, len(requests))
        return SteppedVidur(vidur_flags, self._flags, has_exact_credit=has_exact_credit)


class TwinBackend:
    """Runs in the twin."""

    def __init__(self, config: Any, flags: PPOModularFlags) -> None:
        """`config`: Vidur's; ValueError names what the twin does not cover."""
        self._config = twin_config(config)
        self._flags = flags

    def start(self, seed: int, requests: Requests) -> "SteppedTwin":
        """A run of the requests."""
        return SteppedTwin(self._config, requests, self._flags)


class SteppedTwin:
    """A run in the twin, with the same answers as `SteppedVidur`."""

    def __init__(self, config: TwinConfig, requests: Requests, flags: PPOModularFlags) -> None:
        self._twin = Twin(config)
        self._source = TwinReplicaSource(self._twin, num_waiting_slots=flags.max_queue_requests_per_replica)
        self._requests = requests
        self._flags = flags
        self._index = -1
        self.now_s = 0.0

    def next_request(self) -> int | None:
        """Go on until a request has to be placed: its index. None once everything is completed."""
        self._index += 1
        if self._index == len(self._requests):
            self._twin.drain()
            return None
        self.now_s = float(self._requests.arrived_at_s[self._index])
        self._twin.advance(self.now_s)
        return self._index

    def request_info(self) -> RequestInfo:
        """What a router knows of the request to place; call it once for each."""
        return self._source.request_info(int(self._requests.prompt_tokens[self._index]), self.now_s)

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment."""
        return self._source.snapshot(self.now_s)

    def placement_rewards(self) -> FloatArray:
        """marginal_delay: the reward of placing the request on each replica."""
        flags = self._flags
        return -self._twin.marginal_delay(
            self.now_s,
            *self._lengths(),
            latency_power=flags.latency_power,
            backlog_weight=flags.backlog_weight,
        )

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        self._twin.submit(replica, self.now_s, *self._lengths())

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""
        done = self._twin.completions()
        if not len(done):
            return []
        columns = (
            done.completed_at_s,
            done.index,
            done.replica,
            done.arrived_at_s,
            done.first_token_at_s,
            done.num_restarts,
        )
        completions = sorted(Completion(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
        if self._index == len(self._requests):
            self.now_s = completions[-1].completed_at_s
        return completions

    def _lengths(self) -> tuple[int, int]:
        requests, index = self._requests, self._index
        return int(requests.prompt_tokens[index]), int(requests.decode_tokens[index])
