"""What an episode runs on: a cluster that stops at every placement, in the compiled twin or in Vidur itself."""

from typing import Any, Protocol

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.sim.stepping import Completion, SteppedVidur
from vidur_ppo_plugin.sim.twin_filler import twin_config
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Completions, Twin
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


def twin_of(config: Any, scenario: Scenario) -> TwinConfig:
    """The twin of a Vidur config; ValueError if there is none, with a way out."""
    try:
        return twin_config(config)
    except ValueError as error:
        way_out = "use backend='vidur' with reward_mode='queue_delay' or 'hybrid'"
        raise ValueError(f"scenario {scenario.name!r}: {error}; {way_out}") from error


def start_in_vidur(scenario: Scenario, seed: int, flags: PPOModularFlags) -> SteppedVidur:
    """A run of the requests of a seed, which Vidur draws itself; marginal delay is that of a twin in Vidur's state."""
    has_exact_credit = flags.reward_mode == "marginal_delay"
    return SteppedVidur(scenario.vidur_flags(seed), flags, has_exact_credit=has_exact_credit)


def completions_of(done: Completions) -> list[Completion]:
    """What a twin tells of completed requests, one by one."""
    columns = (
        done.completed_at_s,
        done.index,
        done.replica,
        done.arrived_at_s,
        done.first_token_at_s,
        done.num_restarts,
    )
    return [Completion(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class SteppedTwin:
    """A run in the twin, with the same answers as `SteppedVidur`."""

    def __init__(self, config: TwinConfig, requests: Requests, flags: PPOModularFlags) -> None:
        self._twin = Twin(config)
        self._source = TwinReplicaSource(self._twin, num_waiting_slots=flags.max_queue_requests_per_replica)
        self._requests = requests
        self._weights = flags.credit_weights
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
        prompt_tokens, decode_tokens = self._lengths()
        return -self._twin.marginal_delay(self.now_s, prompt_tokens, decode_tokens, **self._weights)

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        self._twin.submit(replica, self.now_s, *self._lengths())

    def take_completions(self) -> list[Completion]:
        """What was completed since the last call, in the order of time."""
        done = self._twin.completions()
        if not len(done):
            return []
        completions = sorted(completions_of(done))
        if self._index == len(self._requests):
            self.now_s = completions[-1].completed_at_s
        return completions

    def _lengths(self) -> tuple[int, int]:
        requests, index = self._requests, self._index
        return int(requests.prompt_tokens[index]), int(requests.decode_tokens[index])
