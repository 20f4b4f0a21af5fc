"""Plays a router in the twin: what `vidur.main` does with a global scheduler, without Vidur."""

from collections.abc import Callable

from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.workload.requests import Requests

from .config import TwinConfig
from .source import TwinReplicaSource
from .twin import Completions, Twin, in_order

#: A router: the replica for a request.
Decide = Callable[[ClusterSnapshot, RequestInfo], int]


def play(
    config: TwinConfig,
    requests: Requests,
    decide: Decide,
    *,
    initial_decode_tokens: float = 128.0,
    num_waiting_slots: int = 0,
) -> Completions:
    """Serve requests as a router places them; what happened to each, in their order."""
    twin = Twin(config)
    source = TwinReplicaSource(twin, initial_decode_tokens=initial_decode_tokens, num_waiting_slots=num_waiting_slots)
    columns = (requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
    for arrived_at_s, prompt_tokens, decode_tokens in zip(*(column.tolist() for column in columns), strict=True):
        info = source.request_info(prompt_tokens, arrived_at_s)
        replica = decide(source.snapshot(arrived_at_s), info)
        twin.submit(replica, arrived_at_s, prompt_tokens, decode_tokens)
    twin.drain()
    return in_order(twin.completions())
