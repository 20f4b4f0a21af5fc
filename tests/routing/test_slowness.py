"""How slow replicas are, by the time between their tokens: worked out by hand, and what must hold for any times."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.routing.compiled import compiled
from vidur_ppo_plugin.routing.heuristics import HEURISTICS
from vidur_ppo_plugin.routing.slowness import weigh_by_slowness
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo

TIMES = st.lists(st.one_of(st.just(0.0), st.floats(1e-4, 10.0)), min_size=1, max_size=12)


def factors(*token_times_s: float, rates_per_s: list[float] | None = None) -> list[float]:
    costs = np.ones(len(token_times_s))
    weigh_by_slowness(np.array(token_times_s), rates_per_s or [1.0] * len(costs), costs)
    return costs.tolist()


def test_half_the_speed_counts_as_half_as_much_more_work() -> None:
    # Log ratios to the median: -0.347 and +0.347, beyond 0.3 and so trusted; 0.6 of them is made up for.
    slow = math.exp(0.6 * math.log(2) / 2)
    assert factors(0.02, 0.02, 0.04, 0.04) == pytest.approx([1 / slow, 1 / slow, slow, slow])


def test_small_differences_count_for_nothing() -> None:
    assert factors(0.020, 0.021, 0.019, 0.0225) == [1, 1, 1, 1]


def test_between_chance_and_certainty_a_difference_counts_in_part() -> None:
    # Half-way from 0.15 to 0.3.
    assert factors(1.0, 1.0, math.exp(0.225)) == pytest.approx([1, 1, math.exp(0.6 * 0.5 * 0.225)])


def test_no_replica_counts_as_more_than_so_slow() -> None:
    most = math.exp(0.6 * 0.5)
    assert factors(1.0, 1.0, 1000.0) == pytest.approx([1, 1, most])
    assert factors(1.0, 1.0, 0.001) == pytest.approx([1, 1, 1 / most])


def test_who_has_completed_nothing_is_as_usual() -> None:
    assert factors(0.0, 0.0, 0.0) == [1, 1, 1]
    assert factors(0.0, 0.02, 0.0) == [1, 1, 1]
    assert factors(0.0, 0.02, 0.04)[0] == 1
    assert factors(0.0, 0.02, 0.04)[1:] == factors(0.02, 0.04)


def test_who_has_completed_little_lately_is_not_judged_by_how_fast_it_was() -> None:
    # The mean is 1.5 completions a second, a third of it enough.
    times_s, fast = (0.02, 0.04, 0.04, 0.04), math.exp(-0.6 * 0.5)
    assert factors(*times_s, rates_per_s=[0.5, 2.5, 1.5, 1.5])[0] == pytest.approx(fast)
    assert factors(*times_s, rates_per_s=[0.25, 2.75, 1.5, 1.5])[0] == pytest.approx(math.sqrt(fast))
    assert factors(*times_s, rates_per_s=[0.0, 2.0, 2.0, 2.0]) == [1, 1, 1, 1]
    assert factors(*times_s, rates_per_s=[0.0, 0.0, 0.0, 0.0]) == [1, 1, 1, 1]


@given(TIMES)
def test_slower_is_never_cheaper(token_times_s: list[float]) -> None:
    weighed = factors(*token_times_s)
    known = sorted((time_s, factor) for time_s, factor in zip(token_times_s, weighed, strict=True) if time_s > 0)
    found = [factor for _, factor in known]
    assert found == sorted(found)
    assert all(math.exp(-0.3) - 1e-12 <= factor <= math.exp(0.3) + 1e-12 for factor in weighed)


def test_least_work_prefers_the_faster_of_two_alike() -> None:
    values = np.zeros((len(ROWS), 3))
    values[ROW["prefill_tokens"]] = [1000, 1000, 900]
    values[ROW["token_time_s"]] = [0.02, 0.04, 0.04]
    values[ROW["completion_rate_per_s"]] = [2.0, 1.0, 1.0]
    seen = ClusterSnapshot(1.0, values, kv_block_size=16, expected_decode_tokens=100.0)
    # The median is slow: only the fast one differs from it, by more than is made up for.
    fast = math.exp(-0.6 * 0.5)
    assert HEURISTICS["least_work"].bind()(seen, RequestInfo(10, 1.0)).tolist() == pytest.approx(
        [1000 * fast, 1000, 900]
    )
    assert seen.token_load.tolist() == [1000, 1000, 900]  # others use it too


_weigh_compiled = compiled(weigh_by_slowness)


@given(TIMES, st.integers(0, 2**32 - 1))
def test_compiled_it_is_the_same_to_the_last_bit(token_times_s: list[float], seed: int) -> None:
    rng, times_s = np.random.default_rng(seed), np.array(token_times_s)
    rates_per_s = rng.exponential(size=len(times_s))
    with_numba = rng.integers(0, 30_000, len(times_s)).astype(float)
    without = with_numba.copy()
    _weigh_compiled(times_s, rates_per_s, with_numba)
    weigh_by_slowness(times_s, rates_per_s, without)
    np.testing.assert_array_equal(with_numba, without)
