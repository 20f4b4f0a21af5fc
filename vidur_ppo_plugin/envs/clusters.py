"""What an episode runs on: the requests of a seed in the compiled twin, or in Vidur itself."""

from typing import Any

from vidur_ppo_plugin.clusters.cluster import Cluster
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.sim.stepping import SteppedVidur
from vidur_ppo_plugin.sim.twin_config import twin_config
from vidur_ppo_plugin.twin.cluster import TwinCluster
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.workload.requests import Requests


def twin_of(config: Any, scenario: Scenario) -> TwinConfig:
    """The twin of a Vidur config; ValueError if there is none, with a way out."""
    try:
        return twin_config(config)
    except ValueError as error:
        way_out = "use backend='vidur' with reward_mode='queue_delay' or 'hybrid'"
        raise ValueError(f"scenario {scenario.name!r}: {error}; {way_out}") from error


def start_cluster(
    scenario: Scenario, seed: int, requests: Requests, flags: PPOModularFlags, twin: TwinConfig | None, *, backend: str
) -> Cluster:
    """A run of the requests of a seed; Vidur draws them itself, and its marginal delay is that of a twin beside it."""
    slots = flags.max_queue_requests_per_replica
    if backend == "vidur":
        has_exact_credit = flags.reward_mode == "marginal_delay"
        return SteppedVidur(scenario.vidur_flags(seed), num_waiting_slots=slots, has_exact_credit=has_exact_credit)
    assert twin is not None
    return TwinCluster(twin, requests, num_waiting_slots=slots)
