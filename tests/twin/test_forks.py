"""What a placement adds to everybody's latency, by rolling copies of the replicas forward."""

import numpy as np
import pytest
from small_twins import config_of, submit, workload

from vidur_ppo_plugin.twin.layout import PREFILL_TOKENS, SCHEDULERS
from vidur_ppo_plugin.twin.twin import Twin, in_order


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_over_a_drained_run_it_sums_to_all_latencies(scheduler: str, power: float) -> None:
    """Telescoping: each placement changes the sum by its increase, and nothing else does."""
    requests = workload(300)
    requests["arrived_at_s"][100:103] = requests["arrived_at_s"][102]  # three at one moment
    twin = Twin(config_of(replica_scheduler=scheduler, max_batch_tokens=600))
    total = 0.0
    for index in range(300):
        replica, *request = (requests[name][index] for name in requests)
        total += twin.marginal_delay(*request, latency_power=power)[replica]
        twin.submit(replica, *request)
    twin.drain()

    result = twin.completions()
    latencies_s = result.completed_at_s - result.arrived_at_s
    assert total == pytest.approx((latencies_s**power).sum(), rel=1e-8)
    assert result.num_restarts.sum() > 0 or scheduler == "orca"


def test_it_is_what_a_copy_with_the_request_shows() -> None:
    requests = workload(80)
    twin = Twin(config_of())
    submit(twin, requests, 0, 80)
    now_s = twin.now_s + 0.01

    increase = twin.marginal_delay(now_s, 120, 30)

    for replica in range(2):
        totals_s = []
        for is_placed in (False, True):
            copy = twin.copy()
            if is_placed:
                copy.submit(replica, now_s, 120, 30)
            copy.drain()
            result = copy.completions()
            totals_s.append((result.completed_at_s - result.arrived_at_s).sum())
        assert increase[replica] == pytest.approx(totals_s[1] - totals_s[0], rel=1e-9)


def test_asking_changes_nothing() -> None:
    requests = workload(200)
    requests["arrived_at_s"] /= 20.0  # more in flight than the twin begins with room for
    plain, asked = Twin(config_of()), Twin(config_of())
    for index in range(200):
        asked.marginal_delay(*(requests[name][index] for name in ("arrived_at_s", "prompt_tokens", "decode_tokens")))
        for twin in (plain, asked):
            submit(twin, requests, index, index + 1)
    for twin in (plain, asked):
        twin.drain()

    one, other = in_order(plain.completions()), in_order(asked.completions())
    np.testing.assert_array_equal(one.completed_at_s, other.completed_at_s)


def test_a_horizon_cuts_off_what_comes_later() -> None:
    twin = Twin(config_of())
    submit(twin, workload(60), 0, 60)
    now_s = twin.now_s
    exact = twin.marginal_delay(now_s, 200, 50)

    by_horizon = [twin.marginal_delay(now_s, 200, 50, horizon_s=horizon_s) for horizon_s in (0.0, 0.005, 0.05, 100.0)]

    np.testing.assert_array_equal(by_horizon[0], 0.0)
    assert np.all(np.diff(by_horizon, axis=0) >= -1e-12)
    np.testing.assert_allclose(by_horizon[-1], exact, rtol=1e-12)


def test_the_backlog_term() -> None:
    twin = Twin(config_of())
    submit(twin, workload(40), 0, 40)
    now_s, token_s = twin.now_s, twin.config.prefill_s_per_token / np.array([1.0, 0.5])
    plain = twin.marginal_delay(now_s, 200, 50)  # brings both replicas to now
    backlog_s = twin.state.cells[:, PREFILL_TOKENS] * token_s

    weighted = twin.marginal_delay(now_s, 200, 50, backlog_weight=3.0)

    grown_s2 = (backlog_s + 200 * token_s) ** 2 - backlog_s**2
    np.testing.assert_allclose(weighted - plain, 3.0 * grown_s2, rtol=1e-6)
