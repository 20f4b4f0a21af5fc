"""What the simulator needs to know of each scenario's replicas: found once, with Vidur, and sent to the workers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.envs.settings import changed
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.twin.config import TwinConfig

from .config import scenario_of
from .schema import ConfigError


@dataclass(frozen=True)
class Cluster:
    """The replicas of a scenario, without Vidur."""

    #: None where the twin does not cover them: such clusters are simulated by Vidur itself.
    twin: TwinConfig | None
    delay_model: DelayModel

    def with_speeds(self, speed_factors: Sequence[float]) -> "Cluster":
        """The cluster with as many replicas as there are speeds."""
        if self.twin is None:
            return self
        return dataclasses.replace(self, twin=dataclasses.replace(self.twin, speed_factors=list(speed_factors)))


def build_clusters(names: Sequence[str], *, backend: str = "twin") -> dict[str, Cluster]:
    """The cluster of each scenario; ConfigError if the twin is to be used and does not cover it."""
    # Vidur takes seconds to import: only who builds clusters pays for it.
    from vidur_ppo_plugin.sim.delay_model import build_delay_model
    from vidur_ppo_plugin.sim.stepping import simulation_config
    from vidur_ppo_plugin.sim.twin_config import twin_config

    _autoload.install()
    clusters = {}
    for name in dict.fromkeys(names):
        try:
            config = simulation_config(changed(scenario_of(name)).vidur_flags(0, num_requests=2))
        except ValueError as error:
            raise ConfigError(f"scenario {name!r}: {error}") from error
        try:
            twin = twin_config(config)
        except ValueError as error:
            if backend == "twin":
                raise ConfigError(f"scenario {name!r}: {error}; train with backend: vidur") from error
            twin = None
        clusters[name] = Cluster(twin, build_delay_model(config))
    return clusters
