"""Each heuristic against figures worked out by hand, and what must hold for any cluster."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, ModelShape, Roofline
from vidur_ppo_plugin.routing import heuristics
from vidur_ppo_plugin.routing.compiled import compiled
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.prior import NAMES, Prior, prior_logits
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, FloatArray, RequestInfo

DELAY_MODEL = DelayModel(
    prefill_s_per_token=1e-4,
    iteration_s_per_request=1e-4,
    iteration_s_per_context_token=1e-7,
)


def snapshot(num_replicas: int, **rows: object) -> ClusterSnapshot:
    """A snapshot with the given rows; the others are 0, but for 100 KV blocks and nominal speed."""
    values = np.zeros((len(ROWS), num_replicas))
    values[ROW["kv_blocks_total"]] = 100
    values[ROW["speed_factor"]] = 1
    for name, row in rows.items():
        values[ROW[name]] = row
    return ClusterSnapshot(10.0, values, kv_block_size=16, expected_decode_tokens=100.0)


def request(prompt_tokens: int = 1000) -> RequestInfo:
    return RequestInfo(prompt_tokens=prompt_tokens, arrived_at_s=10.0)


def cost(name: str, seen: ClusterSnapshot, prompt_tokens: int = 1000, **options: float) -> FloatArray:
    return heuristics.HEURISTICS[name].bind(DELAY_MODEL, options)(seen, request(prompt_tokens))


def test_rows_are_the_attributes_of_a_snapshot() -> None:
    values = np.arange(len(ROWS) * 2.0).reshape(len(ROWS), 2)
    seen = ClusterSnapshot(0.0, values, kv_block_size=16, expected_decode_tokens=1.0)
    for name, index in ROW.items():
        assert getattr(seen, name).tolist() == values[index].tolist()
    assert seen.num_replicas == 2
    assert seen.waiting_requests.tolist() == (values[0] - values[1]).tolist()


def test_least_outstanding_counts_waiting_and_running() -> None:
    seen = snapshot(3, outstanding_requests=[5, 3, 4], running_requests=[5, 0, 4])
    assert cost("least_outstanding", seen).tolist() == [5, 3, 4]


def test_least_kv_counts_blocks_in_use_and_prompts_to_come() -> None:
    seen = snapshot(3, kv_blocks_used=[50, 40, 40], prefill_tokens=[0, 160, 320])
    assert cost("least_kv", seen).tolist() == pytest.approx([0.5, 0.5, 0.6])


def test_least_tokens_is_the_documented_sum() -> None:
    seen = snapshot(2, prefill_tokens=[100, 0], context_tokens=[1000, 4000], outstanding_requests=[2, 1])
    assert cost("least_tokens", seen).tolist() == pytest.approx([100 + 50 + 40, 200 + 20])
    assert cost("least_tokens", seen, context_weight=1, request_weight=0).tolist() == [1100, 4000]


def test_shortest_delay_is_prefill_plus_output_over_speed() -> None:
    seen = snapshot(
        2, prefill_tokens=[0, 2000], context_tokens=[5000, 0], outstanding_requests=[3, 1], speed_factor=[0.5, 1]
    )
    delay = cost("shortest_delay", seen)
    first = (1000 * 1e-4 + 100 * (4 * 1e-4 + 6000 * 1e-7)) / 0.5
    second = 3000 * 1e-4 + 100 * (2 * 1e-4 + 3000 * 1e-7)
    assert delay.tolist() == pytest.approx([first, second])


def test_shortest_delay_subtracts_what_is_cached() -> None:
    seen = snapshot(2, cached_prompt_tokens=[0, 900])
    cold, warm = cost("shortest_delay", seen)
    assert cold - warm == pytest.approx(900 * (1e-4 + 100 * 1e-7))


def test_delay_model_follows_the_roofline() -> None:
    """Linearised at one point, it must stay close to the roofline around it."""
    model = ModelShape("llama-3-8b", 32, 32, 8, 4096, 14336)
    for tensor_parallel_size, stages in ((1, 1), (2, 2)):
        roofline = Roofline(
            model,
            DEVICES["a100"],
            NETWORKS["a100_dgx"],
            tensor_parallel_size=tensor_parallel_size,
            num_pipeline_stages=stages,
        )
        fitted = DelayModel.from_roofline(roofline, 512)
        for num_requests, context_tokens in ((16, 500), (32, 2000), (48, 1000)):
            stage_ms = roofline.stage_time_ms([1] * num_requests, [context_tokens] * num_requests, is_last_stage=True)
            alone_ms = roofline.stage_time_ms([1], [0], is_last_stage=True)
            added_s = (
                num_requests * fitted.iteration_s_per_request
                + num_requests * context_tokens * fitted.iteration_s_per_context_token
            )
            assert alone_ms * stages * 1e-3 + added_s == pytest.approx(stage_ms * stages * 1e-3, rel=0.15)
        assert fitted.prefill_s_per_token * 512 == pytest.approx(roofline.prefill_time_s(512, 512) / stages)


@pytest.mark.parametrize(("prompt_tokens", "allowed"), [(4096, [0, 1]), (4097, [2])])
def test_size_split_divides_by_prompt_length(prompt_tokens: int, allowed: list[int]) -> None:
    seen = snapshot(3, prefill_tokens=[9e6, 9e6, 9e6])
    costs = cost("size_split", seen, prompt_tokens, threshold_tokens=4096, num_long_replicas=1)
    assert np.flatnonzero(np.isfinite(costs)).tolist() == allowed
    assert seen.prefill_tokens.tolist() == [9e6, 9e6, 9e6]


def test_power_of_two_takes_the_emptier_of_two() -> None:
    seen = snapshot(5, outstanding_requests=[4, 3, 2, 1, 0])
    router = build_router("power_of_two", seed=0)
    choices = [router(seen, request()) for _ in range(4000)]
    # Replica i wins against every replica before it: i of the 10 pairs.
    shares = [choices.count(index) / 4000 for index in range(5)]
    assert shares == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_power_of_two_with_two_replicas_or_one_looks_at_all() -> None:
    for counts in ([2.0, 1.0], [7.0]):
        seen = snapshot(len(counts), outstanding_requests=counts)
        drawn = heuristics.drawn_cost(cost("power_of_two", seen), seen, 2, random.Random(0))
        assert drawn.tolist() == counts


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50), st.integers(0, 2**32))
def test_choose_takes_one_of_the_lowest(costs: list[int], seed: int) -> None:
    chosen = heuristics.choose(np.array(costs, dtype=float), random.Random(seed))
    assert costs[chosen] == min(costs)
    assert chosen == heuristics.choose(np.array(costs, dtype=float), random.Random(seed))


def test_choose_is_fair_among_equals() -> None:
    rng = random.Random(1)
    cost = np.array([1.0, 0.0, 0.0, 2.0, 0.0])
    choices = [heuristics.choose(cost, rng) for _ in range(3000)]
    assert [choices.count(index) / 3000 for index in (1, 2, 4)] == pytest.approx([1 / 3] * 3, abs=0.04)
    assert set(choices) == {1, 2, 4}


COUNTS = st.lists(st.integers(0, 10**6), min_size=3, max_size=3)


@given(COUNTS, COUNTS, COUNTS, st.permutations(range(3)))
def test_permuting_replicas_permutes_costs(
    outstanding: list[int], prefill: list[int], context: list[int], order: list[int]
) -> None:
    def costs(indices: list[int]) -> list[FloatArray]:
        seen = snapshot(
            3,
            outstanding_requests=np.array(outstanding)[indices],
            prefill_tokens=np.array(prefill)[indices],
            context_tokens=np.array(context)[indices],
            token_time_s=np.array([0.02, 0.03, 0.0])[indices],
            completion_rate_per_s=np.array([2.0, 1.0, 0.0])[indices],
        )
        return [
            cost("least_outstanding", seen),
            cost("least_kv", seen),
            cost("least_tokens", seen),
            cost("least_work", seen),
            cost("shortest_delay", seen),
        ]

    for plain, permuted in zip(costs([0, 1, 2]), costs(order), strict=True):
        assert plain[order].tolist() == permuted.tolist()


@given(COUNTS, COUNTS, COUNTS, st.integers(0, 2))
def test_more_work_never_looks_cheaper(
    outstanding: list[int], prefill: list[int], context: list[int], index: int
) -> None:
    rows = {"outstanding_requests": outstanding, "prefill_tokens": prefill, "context_tokens": context}
    before = snapshot(3, **rows)
    for name in rows:
        more = {key: list(values) for key, values in rows.items()}
        more[name][index] += 500
        after = snapshot(3, **more)
        for heuristic in ("least_tokens", "least_work", "least_kv", "shortest_delay"):
            assert cost(heuristic, after)[index] >= cost(heuristic, before)[index]


_prior_logits_compiled = compiled(prior_logits)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_finds_what_routers_and_priors_find_to_the_last_bit(name: str) -> None:
    """`costs_of` knows every heuristic that can be a prior."""
    rng, prior = np.random.default_rng(0), Prior(name, weight=1.7, delay_model=DELAY_MODEL)
    for num_replicas in (1, 4, 50):
        values = rng.uniform(1, 5000, (len(ROWS), num_replicas))
        seen = ClusterSnapshot(10.0, values, kv_block_size=16, expected_decode_tokens=100.0)
        facts = request().prompt_tokens, seen.expected_decode_tokens, seen.kv_block_size
        in_python = prior.logits(prior.cost(seen, request()))
        assert in_python.dtype == np.float32 and in_python.max() == 0
        assert name == "none" or num_replicas == 1 or in_python.min() < 0
        np.testing.assert_array_equal(_prior_logits_compiled(values, facts, prior.rules), in_python)


@pytest.mark.parametrize("name", heuristics.HEURISTICS)
def test_the_table_fits_together(name: str) -> None:
    heuristic = heuristics.HEURISTICS[name]
    assert (heuristic.prior_unit is not None) == (name in NAMES)
    assert (heuristic.log_prior_unit is not None) == (f"log_{name}" in NAMES)
    assert heuristic.is_teacher == (name in heuristics.TEACHERS)
    with pytest.raises(ValueError, match=r"no option nonsense|delay model"):
        heuristic.bind(options={"nonsense": 1.0})


def test_types_in_vidur_keep_their_numbers() -> None:
    """Configurations that were saved name them."""
    numbers = {name: heuristic.type_id for name, heuristic in heuristics.HEURISTICS.items()}
    assert (
        numbers.items()
        >= {
            "least_outstanding": 1002,
            "power_of_two": 1003,
            "least_kv": 1004,
            "least_tokens": 1005,
            "shortest_delay": 1006,
            "size_split": 1007,
            "least_work": 1008,
        }.items()
    )
    assert len(set(numbers.values()) | {1001}) == len(numbers) + 1
