"""The short way to what is left to do on a replica, against the event machine that goes through every iteration."""

import numpy as np
import pytest
from small_twins import config_of

from vidur_ppo_plugin.twin.drain import drained
from vidur_ppo_plugin.twin.twin import Twin

# Far beyond the last completion: the event machine rolls the replicas forward.
LATE_S = 1e7


def random_requests(seed: int, count: int) -> list[tuple[float, int, int]]:
    """Arrivals close together, prompts from one token to many chunks, outputs from a single token on."""
    rng = np.random.default_rng(seed)
    arrived_at_s = np.cumsum(rng.exponential(0.01, count))
    prompts = np.where(rng.random(count) < 0.2, rng.integers(1, 4, count), rng.integers(1, 2500, count))
    outputs = np.where(rng.random(count) < 0.2, 1, rng.integers(1, 120, count))
    return [(float(a), int(p), int(o)) for a, p, o in zip(arrived_at_s, prompts, outputs, strict=True)]


def short_way(twin: Twin, replica: int, arrived_at_s: float, prompt: int, output: int, power: float = 1.0) -> float:
    times = twin.config.times.arrays
    i, f = twin.state.cells[replica], twin.state.floats[replica]
    work = np.empty((2 * twin.rules.max_batch_size, 4))
    speed = int(times.speed_index[replica])
    return float(drained(twin.rules, times, speed, i, f, arrived_at_s, prompt, output, power, work))


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("scheduler", ["sarathi", "mnemosyne_fcfs_fixed_chunk"])
def test_it_is_what_the_event_machine_finds(scheduler: str, power: float) -> None:
    roomy = {"num_blocks": 40_000, "batch_size_cap": 250, "max_request_tokens": 4000}
    twin = Twin(config_of(replica_scheduler=scheduler, max_batch_tokens=256, **roomy))
    rng = np.random.default_rng(1)
    for index, request in enumerate(random_requests(0, 250)):
        if index % 3 == 0:
            rolled = twin.marginal_delay(*request, latency_power=power, horizon_s=LATE_S)
            np.testing.assert_allclose(twin.marginal_delay(*request, latency_power=power), rolled, rtol=1e-9)
            for replica in range(twin.num_replicas):
                increase = short_way(twin, replica, *request, power) - short_way(twin, replica, request[0], 0, 0, power)
                assert increase == pytest.approx(rolled[replica], rel=1e-9), index  # and not NaN: it is covered
        twin.submit(int(rng.integers(twin.num_replicas)), *request)


def test_it_says_where_it_cannot_tell() -> None:
    request = (0.0, 100, 10)
    assert short_way(Twin(config_of(num_blocks=20_000)), 0, *request) > 0.0
    for other in (
        {"replica_scheduler": "vllm"},
        {"replica_scheduler": "orca"},
        {"num_blocks": 5},
        {"batch_size_cap": 1},
    ):
        twin = Twin(config_of(**other))
        twin.submit(0, *request)
        assert np.isnan(short_way(twin, 0, *request)), other


def test_an_idle_replica_has_nothing_left() -> None:
    twin = Twin(config_of())
    assert short_way(twin, 0, 3.0, 0, 0) == 0.0
