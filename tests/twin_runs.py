"""Real Vidur runs beside which the twin is put: the same requests, on the same replicas."""

from pathlib import Path
from typing import Any

import numpy as np
from simulation import arguments

from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.sim import launch
from vidur_ppo_plugin.twin.twin import Completions, run
from vidur_ppo_plugin.workload.requests import Requests


def simulator_of(output_dir: Path, **flags: Any) -> tuple[Any, Any]:
    """A Vidur simulator that has not started, and its config."""
    command_line = arguments(output_dir, **flags)
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    with launch._argv(["vidur.main", *command_line]):
        config = SimulationConfig.create_from_cli_args()
    set_seeds(config.seed)
    return Simulator(config), config


def simulate_with_config(output_dir: Path, **flags: Any) -> tuple[Any, RunOutcome]:
    """Run Vidur; its config and what happened."""
    simulator, config = simulator_of(output_dir, **flags)
    return config, launch.run_simulator(simulator, config)


def column(outcome: RunOutcome, name: str) -> Any:
    """One figure of all requests of a run."""
    return np.array([getattr(request, name) for request in outcome.requests])


def requests_of(outcome: RunOutcome) -> Requests:
    """The requests that a run was given."""
    return Requests(*(column(outcome, name) for name in ("arrived_at_s", "prompt_tokens", "decode_tokens")))


def replay(config: Any, outcome: RunOutcome) -> Completions:
    """The requests of a Vidur run, placed as there, in the twin."""
    from vidur_ppo_plugin.sim.twin_config import twin_config

    return run(twin_config(config), requests_of(outcome), column(outcome, "replica"))


def assert_equal(completions: Completions, outcome: RunOutcome) -> None:
    """Every request has the same first token, completion and preemptions, to the last bit."""
    assert len(completions) == len(outcome.requests)
    for name in ("completed_at_s", "first_token_at_s", "num_restarts"):
        np.testing.assert_array_equal(getattr(completions, name), column(outcome, name), err_msg=name)
