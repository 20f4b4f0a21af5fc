"""What the simulator needs to know of each scenario's replicas: found once, with Vidur, and sent to the workers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.envs.settings import changed, find_scenario
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.marginal_delay import DrainCost
from vidur_ppo_plugin.twin.config import TwinConfig

from .schema import ConfigError


@dataclass(frozen=True)
class Cluster:
    """The replicas of a scenario, without Vidur."""

    twin: TwinConfig
    delay_model: DelayModel
    drain_cost: DrainCost

    def with_speeds(self, speed_factors: Sequence[float]) -> "Cluster":
        """As many replicas as there are speeds."""
        return dataclasses.replace(self, twin=dataclasses.replace(self.twin, speed_factors=list(speed_factors)))


def build_clusters(names: Sequence[str]) -> dict[str, Cluster]:
    """The cluster of each scenario; ConfigError if the twin does not cover it."""
    # Vidur takes seconds to import: only who builds clusters pays for it.
    from vidur_ppo_plugin.sim.credit import drain_cost
    from vidur_ppo_plugin.sim.roofline_predictor import build_roofline
    from vidur_ppo_plugin.sim.schedulers import build_delay_model, prefill_chunk_size
    from vidur_ppo_plugin.sim.stepping import simulation_config
    from vidur_ppo_plugin.sim.twin_filler import twin_config

    _autoload.install()
    clusters = {}
    for name in dict.fromkeys(names):
        scenario = changed(find_scenario(name))
        try:
            config = simulation_config(scenario.vidur_flags(0, num_requests=2))
            twin = twin_config(config)
        except ValueError as error:
            raise ConfigError(f"scenario {name!r}: {error}; train with backend: vidur") from error
        roofline = build_roofline(config.cluster_config.replica_config, config.execution_time_predictor_config)
        cost = drain_cost(roofline, prefill_chunk_size(config))
        clusters[name] = Cluster(twin, build_delay_model(config), cost)
    return clusters
