"""What `ppo_modular` holds does not grow with the number of requests; what Vidur itself keeps is not counted."""

import gc
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulation import arguments

PREFIX = "p_p_o_global_scheduler_modular_config_"
ROLLOUT_LEN = 1000
# One number kept for each request between the two measurements would be more (24 bytes, and 8 for its place).
MOST_GROWTH_BYTES_A_REQUEST = 8
# More than at the first decision: at most a rollout of observations and the optimiser.
MOST_BYTES = 2_000_000
# Tiny requests at light load: what is in flight does not grow, and a run takes seconds.
FLAGS: dict[str, Any] = {
    "global_scheduler_config_type": "ppo_modular",
    "length_generator_config_type": "fixed",
    "fixed_request_length_generator_config_prefill_tokens": 16,
    "fixed_request_length_generator_config_decode_tokens": 4,
    "poisson_request_interval_generator_config_qps": 100.0,
    "metrics_config_write_metrics": False,
    # Several updates, but the time goes into requests.
    f"{PREFIX}rollout_len": ROLLOUT_LEN,
    f"{PREFIX}minibatch_size": 500,
    f"{PREFIX}epochs": 1,
}


def reachable(roots: list[Any]) -> Iterator[Any]:
    """Every object that is held by the roots, but not what only Vidur's objects, classes and modules hold."""
    seen, waiting = set(), list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            waiting.append(item.__closure__)
            continue
        if isinstance(item, (type, types.ModuleType)) or type(item).__module__.startswith("vidur."):
            continue
        yield item
        if isinstance(item, torch.Tensor):
            waiting.append(item.grad)
        else:
            waiting += gc.get_referents(item)


def held_bytes(scheduler: Any) -> int:
    """What the scheduler's parts, and the package's modules, hold."""
    parts = [part for part in vars(scheduler).values() if type(part).__module__.startswith("vidur_ppo_plugin")]
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("vidur_ppo_plugin")]
    # Arrays that are views of others hold those; a tensor's numbers are not its own size.
    return sum(
        item.untyped_storage().nbytes() if isinstance(item, torch.Tensor) else sys.getsizeof(item)
        for item in reachable([*parts, *modules])
    )


@pytest.mark.parametrize(
    ("flags", "num_requests"),
    [
        ({}, 20_000),
        ({"inference_only": True}, 20_000),
        # The window of completions that count must be full when it is first measured.
        ({"reward_mode": "hybrid", "reward_window_s": 5.0, "latency_limit_s": 0.01}, 6_000),
        ({"reward_mode": "queue_delay"}, 6_000),
    ],
    ids=["marginal_delay", "inference", "hybrid", "queue_delay"],
)
def test_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], num_requests: int
) -> None:
    # In the middle of a rollout, both times; before the first, everything warms up.
    half = ROLLOUT_LEN // 2
    early, late = num_requests // 4 // ROLLOUT_LEN * ROLLOUT_LEN + half, num_requests - half
    held: dict[int, int] = {}
    own = {f"{PREFIX}{name}": value for name, value in flags.items()}
    command_line = arguments(tmp_path, **FLAGS, **own, synthetic_request_generator_config_num_requests=num_requests)
    run_and_measure(command_line, monkeypatch, held, (1, early, late))
    assert set(held) == {1, early, late}
    assert held[late] - held[1] < MOST_BYTES
    assert held[late] - held[early] < MOST_GROWTH_BYTES_A_REQUEST * (late - early)


def run_and_measure(
    command_line: list[str], monkeypatch: pytest.MonkeyPatch, held: dict[int, int], at_decisions: tuple[int, ...]
) -> None:
    """Run the simulation, and note after so many decisions what is held."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator

    from vidur_ppo_plugin.sim.ppo_scheduler import PPOModularScheduler

    schedule = PPOModularScheduler.schedule

    def measuring_schedule(self: PPOModularScheduler) -> Any:
        placements = schedule(self)
        decisions = self.agent.num_decisions
        if decisions in at_decisions:
            held[decisions] = held_bytes(self)
        return placements

    monkeypatch.setattr(PPOModularScheduler, "schedule", measuring_schedule)
    monkeypatch.setattr(sys, "argv", ["vidur.main", *command_line])
    logging.disable(logging.INFO)  # Vidur tells of every request
    try:
        Simulator(SimulationConfig.create_from_cli_args()).run()
    finally:
        logging.disable(logging.NOTSET)


def test_the_measurement_sees_a_list_that_grows() -> None:
    holder = types.SimpleNamespace(kept=[], array=np.zeros(0), weights=torch.zeros(1))
    before = sum(map(sys.getsizeof, reachable([holder])))
    holder.kept += [float(number) for number in range(1000)]
    holder.array = np.zeros(500)
    assert sum(map(sys.getsizeof, reachable([holder]))) - before > 1000 * 32 + 500 * 8 - 200
