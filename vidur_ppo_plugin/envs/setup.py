"""What single and vector environments have in common: the options, checked, and what follows from them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vidur_ppo_plugin.clusters.cluster import Cluster
from vidur_ppo_plugin.flags import RewardFlags
from vidur_ppo_plugin.scenario import Scenario, find_scenario
from vidur_ppo_plugin.sim.delay_model import build_delay_model
from vidur_ppo_plugin.sim.stepping import SteppedVidur, simulation_config
from vidur_ppo_plugin.sim.twin_config import twin_config
from vidur_ppo_plugin.twin.cluster import TwinCluster
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.workload.requests import Requests

from .observations import ObservationMaker
from .settings import BACKENDS, changed, check_at_least, check_choice, ppo_flags

#: Seeds drawn for episodes without one begin here: those below are for comparing, tuning and finding capacities.
FIRST_DRAWN_SEED = 10_000
#: Seeds are below this, as everywhere in the package; larger ones wrap around.
NUM_SEEDS = 1_000_000_000


class EnvSetup:
    """Options of `RoutingEnv`, which has their meanings."""

    def __init__(
        self,
        scenario: str | Path | Scenario,
        *,
        backend: str = "twin",
        reward_mode: str = RewardFlags.reward_mode,
        num_requests: int | None = None,
        load: float | None = None,
        num_replicas: int | None = None,
        replica_speeds: Sequence[float] | None = None,
        max_steps: int | None = None,
        flatten: bool = False,
        latency_limit_penalty: float = 100.0,
        render_mode: str | None = None,
        **flags: Any,
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        if render_mode is not None:
            raise ValueError(f"render_mode must be None, there is nothing to draw, got {render_mode!r}")
        if max_steps is not None:
            check_at_least("max_steps", max_steps, 1)
        check_at_least("latency_limit_penalty", latency_limit_penalty, 0)
        self.backend = backend
        self.max_steps = max_steps
        self.flatten = flatten
        self.latency_limit_penalty = latency_limit_penalty
        self.flags = ppo_flags({"reward_mode": reward_mode, **flags})
        self.scenario = changed(
            find_scenario(scenario),
            num_requests=num_requests,
            load=load,
            num_replicas=num_replicas,
            replica_speeds=replica_speeds,
        )
        config = simulation_config(self.scenario.vidur_flags(self.any_seed))
        self._delay_model = build_delay_model(config)
        #: None where no twin is needed.
        self.twin: TwinConfig | None = None
        if backend == "twin" or self.flags.pays_at_once:
            self.twin = _twin_of(config, self.scenario)

    @property
    def any_seed(self) -> int:
        """A seed that there are requests for."""
        return self._seeds()[0]

    def build_observer(self) -> ObservationMaker:
        """Sees one cluster."""
        return ObservationMaker(self.flags, self.scenario.num_replicas, self._delay_model, flatten=self.flatten)

    def start(self, seed: int, requests: Requests) -> Cluster:
        """A run of the requests of a seed. Vidur draws them itself, and a twin beside it gives the marginal delay."""
        slots = self.flags.max_queue_requests_per_replica
        if self.backend == "vidur":
            vidur_flags = self.scenario.vidur_flags(seed)
            return SteppedVidur(vidur_flags, num_waiting_slots=slots, has_exact_credit=self.flags.pays_at_once)
        assert self.twin is not None
        return TwinCluster(self.twin, requests, num_waiting_slots=slots)

    def pick_seed(self, seed: int | None, np_random: np.random.Generator) -> int:
        """The workload seed of an episode: the given one, or one drawn."""
        seeds = self._seeds()
        if seed is None:
            return seeds[int(np_random.integers(len(seeds)))]
        if self.scenario.trace is not None and seed not in seeds:
            raise ValueError(f"seed must be one of those that the trace has windows for, {list(seeds)}, got {seed}")
        return seed % NUM_SEEDS

    def _seeds(self) -> Sequence[int]:
        """What is drawn from: a trace has a window for each of a few seeds."""
        trace = self.scenario.trace
        return range(FIRST_DRAWN_SEED, NUM_SEEDS) if trace is None else sorted(trace.windows)


def _twin_of(config: Any, scenario: Scenario) -> TwinConfig:
    """The twin of a Vidur config; ValueError if there is none, with a way out."""
    try:
        return twin_config(config)
    except ValueError as error:
        way_out = "use backend='vidur' with reward_mode='queue_delay', or 'hybrid' and hybrid_credit='window'"
        raise ValueError(f"scenario {scenario.name!r}: {error}; {way_out}") from error
