"""The latest requests of a simulation, played again in a twin: what another policy would have made of them.

Once as they came, and in other orders at the same moments: one run of a busy cluster says little, since whoever happens
to come at a bad time weighs on everybody after it. It knows true output lengths, so it serves to judge policies, never
to decide.
"""

import dataclasses
from collections import deque
from typing import Any

import numpy as np

from vidur_ppo_plugin.flags import PPOModularFlags, drains_of
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.cluster import play
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin
from vidur_ppo_plugin.workload.requests import Requests

from .agent import Agent
from .build import build_agent
from .features import build_features, build_prior
from .guard import ReplayedLatencies

# A trial of fewer requests says nothing.
FEWEST_REQUESTS = 64
# As they came, and shuffled. More are surer and slower.
_NUM_ORDERS = 8
# Of the orders and of ties.
_SEED = 0
# Decisions that are made in one compiled call: what is noted of each takes memory.
_STEPS = 512


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

    def add(self, arrived_at_s: float, prompt_tokens: int, decode_tokens: int) -> None:
        """A request has arrived."""
        self._requests.append((arrived_at_s, prompt_tokens, decode_tokens))

    def __call__(self, network: dict[str, Any]) -> list[ReplayedLatencies] | None:
        """What happens to the requests, in each order, if a network routes them greedily; None if they are too few."""
        if len(self._requests) < FEWEST_REQUESTS:
            return None
        arrived_at_s, *lengths = (np.array(column) for column in zip(*self._requests, strict=True))
        rng = np.random.default_rng(_SEED)  # the same orders for every network
        orders = [np.arange(len(arrived_at_s)), *(rng.permutation(len(arrived_at_s)) for _ in range(_NUM_ORDERS - 1))]
        replays = [Requests(arrived_at_s, *(column[order] for column in lengths)) for order in orders]
        agent = build_agent(self._flags, num_replicas=self._config.num_replicas, delay_model=self._delay_model)
        agent.load_policy(network)
        actor, is_sampled = agent.policy.actor, 0 < self._flags.max_candidates < self._config.num_replicas
        if isinstance(actor, Actor) and not is_sampled:
            return self._play_compiled(actor, replays, rng)
        return [self._play(agent, requests) for requests in replays]

    def _play_compiled(
        self, actor: Actor, replays: list[Requests], rng: np.random.Generator
    ) -> list[ReplayedLatencies]:
        """All replays at once."""
        flags, size = self._flags, len(replays[0])
        twin = PolicyTwin(
            self._config,
            replays,
            prior=build_prior(flags, self._delay_model),
            features=build_features(flags),
            tail_preferences=[flags.tail_preference] * len(replays),
            report_delay_s=flags.report_delay_s,
            drains=[drains_of(flags, self._config.num_replicas)] * len(replays),
        )
        for first in range(0, size, _STEPS):
            steps = min(_STEPS, size - first)
            twin.play(actor, steps, uniforms=rng.random((len(replays), steps, 2)))
        twin.drain()
        clusters, done = twin.completions()
        outcomes = []
        for cluster in range(len(replays)):
            mine = np.flatnonzero(clusters == cluster)
            mine = mine[np.argsort(done.index[mine])]
            times = done.completed_at_s[mine], done.first_token_at_s[mine]
            outcomes.append(ReplayedLatencies(*(at_s - replays[cluster].arrived_at_s for at_s in times)))
        return outcomes

    def _play(self, agent: Agent, requests: Requests) -> ReplayedLatencies:
        """Decision by decision, for policies that the compiled pass does not cover."""
        agent.start_run()
        done = play(
            self._config,
            requests,
            agent.policy,
            visibility=Visibility.from_flags(self._flags, self._config.num_replicas),
            num_waiting_slots=self._flags.max_queue_requests_per_replica,
        )
        times = done.completed_at_s, done.first_token_at_s
        return ReplayedLatencies(*(at_s - requests.arrived_at_s for at_s in times))
