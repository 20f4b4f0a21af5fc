"""The feature table: closed forms, a set of replicas, dimensions that follow from it, trends that carry over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable, Observation
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo

REQUEST = RequestInfo(prompt_tokens=2048, arrived_at_s=5.0, since_last_arrival_s=2.0, arrival_rate_per_s=4.0)


def snapshot(num_replicas: int, slots: int = 2, **rows: object) -> ClusterSnapshot:
    values = np.zeros((len(ROWS), num_replicas))
    values[ROW["kv_blocks_total"]] = 100
    values[ROW["speed_factor"]] = 1
    for name, row in rows.items():
        if name != "waiting":
            values[ROW[name]] = row
    waiting = np.array(rows.get("waiting", np.zeros((2 * slots, num_replicas))), dtype=float)
    return ClusterSnapshot(5.0, values, kv_block_size=16, expected_decode_tokens=256.0, waiting=waiting)


def table(**options: object) -> FeatureTable:
    return FeatureTable(**{"num_waiting_slots": 2, **options})  # type: ignore[arg-type]


def column(features: FeatureTable, observation: Observation, name: str) -> list[float]:
    index = [feature.name for feature in features.replica_features].index(name)
    return observation.replicas[:, index].tolist()


def test_levels_by_hand() -> None:
    features = table()
    seen = features.observe(
        snapshot(
            2,
            outstanding_requests=[11, 3],
            running_requests=[3, 3],
            prefill_tokens=[4096, 0],
            context_tokens=[0, 8192],
            kv_blocks_used=[50, 0],
            oldest_wait_s=[2, 0],
            completion_rate_per_s=[4, 0],
            recent_latency_s=[0, 2],
            token_time_s=[0.02, 0],
            typical_prompt_tokens=[0, 8192],
            speed_factor=[0.5, 1],
            cached_prompt_tokens=[0, 1024],
            waiting=[[4096, 0], [0, 0], [2, 0], [0, 0]],
        ),
        REQUEST,
    )
    ln = np.log1p
    expected = {
        "waiting": [ln(1), 0],
        "running": [ln(3 / 8), ln(3 / 8)],
        "prefill": [ln(1), 0],
        "context": [0, ln(2)],
        "kv_used": [ln(0.5), 0],
        "token_time": [ln(1), 0],
        "typical_prompt": [0, ln(2)],
        "oldest_wait": [ln(1), 0],
        "completions": [ln(1), 0],
        "latency": [0, ln(1)],
        "load": [ln((4096 + 220) / 4096), ln((0.05 * 8192 + 60) / 4096)],
        "prefill_relative": [ln(1) / 2, -ln(1) / 2],
        "queue_0_prompt": [ln(1), 0],
        "queue_0_age": [ln(1), 0],
        "queue_1_prompt": [0, 0],
        "cached": [0, 0.5],
        "prefill_trend": [0, 0],
        "prefill_change": [0, 0],
    }
    for name, values in expected.items():
        assert column(features, seen, name) == pytest.approx(values, abs=1e-6), name


def test_request_vector_by_hand() -> None:
    features = table()
    seen = features.observe(snapshot(4, prefill_tokens=[4096, 0, 0, 0]), REQUEST)
    values = dict(zip((feature.name for feature in features.request_features), seen.request.tolist(), strict=True))
    ln2 = np.log(2)
    assert values["prompt"] == pytest.approx(np.log1p(0.5))
    assert values["since_last_arrival"] == pytest.approx(ln2)
    assert values["arrival_rate"] == pytest.approx(ln2)
    assert values["expected_output"] == pytest.approx(np.log1p(256 / 4096))
    assert values["cluster_load"] == pytest.approx(ln2 / 4)
    assert values["imbalance"] == pytest.approx(ln2 * np.sqrt(3) / 4)
    assert values["load_range"] == pytest.approx(ln2)
    assert values["cluster_size"] == pytest.approx(0.2)
    assert values["tail_preference"] == pytest.approx(BALANCED)


def test_the_tail_preference_is_shown_and_changes_no_meaning() -> None:
    usual, tail = table(), table(tail_preference=0.9)
    seen = tail.observe(snapshot(4), REQUEST)
    assert seen.request[-1] == np.float32(0.9)
    assert np.array_equal(usual.observe(snapshot(4), REQUEST).request[:-1], seen.request[:-1])
    assert usual.hash == tail.hash  # one checkpoint serves every preference


def test_trends_follow_the_last_decision_and_the_moving_average() -> None:
    features = table(trend_window=3)  # weight of the newest: 1/2
    levels = [0.0, np.log(2), np.log(3)]
    tokens = [0, 4096, 8192]
    trends, changes = [], []
    for value in tokens:
        seen = features.observe(snapshot(1, prefill_tokens=[value]), REQUEST)
        trends.append(column(features, seen, "prefill_trend")[0])
        changes.append(column(features, seen, "prefill_change")[0])
    assert changes == pytest.approx([0, levels[1], levels[2] - levels[1]], abs=1e-6)
    assert trends == pytest.approx([0, levels[1], levels[2] - levels[1] / 2], abs=1e-6)
    features.reset()
    seen = features.observe(snapshot(1, prefill_tokens=[999]), REQUEST)
    assert column(features, seen, "prefill_trend") == [0]


@pytest.mark.parametrize("num_replicas", [1, 2, 64, 1024])
@pytest.mark.parametrize("slots", [0, 4])
def test_dimensions_follow_from_the_table(num_replicas: int, slots: int) -> None:
    features = table(num_waiting_slots=slots)
    seen = features.observe(snapshot(num_replicas, slots), REQUEST)
    assert seen.replicas.shape == (num_replicas, features.num_replica_features)
    assert seen.request.shape == (features.num_request_features,)
    assert seen.replicas.dtype == seen.request.dtype == np.float32
    assert np.isfinite(seen.replicas).all() and np.isfinite(seen.request).all()
    assert features.num_replica_features == table(num_waiting_slots=0).num_replica_features + 2 * slots
    names = [feature.name for feature in (*features.replica_features, *features.request_features)]
    assert len(set(names)) == len(names)


COUNTS = st.lists(st.integers(0, 10**5), min_size=4, max_size=4)


@settings(max_examples=40)
@given(COUNTS, COUNTS, COUNTS, st.permutations(range(4)))
def test_permuting_replicas_permutes_features(
    prefill: list[int], context: list[int], running: list[int], order: list[int]
) -> None:
    features = [table(), table()]
    for _ in range(2):  # the second time with trends
        plain, permuted = (
            item.observe(
                snapshot(
                    4,
                    prefill_tokens=np.array(prefill)[indices],
                    context_tokens=np.array(context)[indices],
                    outstanding_requests=np.array(running)[indices],
                    running_requests=np.array(running)[indices],
                ),
                REQUEST,
            )
            for item, indices in zip(features, ([0, 1, 2, 3], order), strict=True)
        )
        np.testing.assert_allclose(plain.replicas[order], permuted.replicas, atol=1e-6)
        np.testing.assert_allclose(plain.request, permuted.request, atol=1e-6)


def test_chosen_replicas_see_the_whole_cluster() -> None:
    seen = snapshot(6, prefill_tokens=[1, 2, 3, 4, 5, 6000])
    chosen = np.array([4, 1])
    full, part = table().observe(seen, REQUEST), table().observe(seen, REQUEST, chosen)
    assert np.array_equal(full.replicas[chosen], part.replicas)
    assert np.array_equal(full.request, part.request)


def test_the_hash_tells_tables_apart() -> None:
    tables = [table(), table(num_waiting_slots=3), table(trend_window=5), table(scales=FeatureScales(tokens=1.0))]
    assert len({item.hash for item in tables}) == 4
    assert table().hash == table().hash


def test_no_feature_reads_the_truth() -> None:
    """What would know a request's true output length has to say so in its name, and there is none."""
    features = table()
    assert not [f.name for f in (*features.replica_features, *features.request_features) if "oracle" in f.name]


@pytest.mark.parametrize(("name", "value"), [("num_waiting_slots", -1), ("trend_window", 0)])
def test_impossible_tables_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        FeatureTable(**{name: value})
