"""The latest requests of a simulation, played again in a twin: what another policy would have made of them.

It knows true output lengths, so it serves to judge policies, never to decide.
"""

import dataclasses
from collections import deque
from typing import Any

import numpy as np

from vidur_ppo_plugin.config import PPOModularFlags, visibility
from vidur_ppo_plugin.learn.build import build_agent
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.play import play
from vidur_ppo_plugin.workload.requests import Requests

# A trial of fewer requests says nothing.
FEWEST_REQUESTS = 64


class RecentRequests:
    """Remembers the latest requests, and replays them."""

    def __init__(
        self, config: TwinConfig, flags: PPOModularFlags, *, delay_model: DelayModel, num_requests: int
    ) -> None:
        self._config = config
        # As in inference, whatever is being learned; demonstrations are of no use for that.
        self._flags = dataclasses.replace(flags, inference_only=True, warm_start_file="")
        self._delay_model = delay_model
        self._requests: deque[tuple[float, int, int]] = deque(maxlen=num_requests)

    def add(self, request: Any) -> None:
        """A request has arrived."""
        self._requests.append((request.arrived_at, request.num_prefill_tokens, request.num_decode_tokens))

    def __call__(self, network: dict[str, Any]) -> FloatArray | None:
        """Latencies of the requests, in order of arrival, routed greedily by a network; None if they are too few."""
        if len(self._requests) < FEWEST_REQUESTS:
            return None
        arrived_at_s, prompt_tokens, decode_tokens = (np.array(column) for column in zip(*self._requests, strict=True))
        size = self._config.num_replicas
        agent = build_agent(self._flags, num_replicas=size, delay_model=self._delay_model)
        agent.load_policy(network)
        seen = visibility(self._flags, size)

        def decide(snapshot: ClusterSnapshot, request: RequestInfo) -> int:
            replica = agent.decide(*agent.observe(seen.view(snapshot), request))
            seen.on_dispatch(replica, request.prompt_tokens)
            return replica

        requests = Requests(arrived_at_s, prompt_tokens, decode_tokens)
        slots = self._flags.max_queue_requests_per_replica
        done = play(self._config, requests, decide, num_waiting_slots=slots)
        latencies: FloatArray = done.completed_at_s - arrived_at_s
        return latencies
