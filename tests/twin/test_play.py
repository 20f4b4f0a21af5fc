"""What a router sees in the twin, and what comes of its decisions, against a live Vidur run."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import KV_PRESSURE
from twin_runs import assert_equal, column, requests_of, simulate_with_config

from vidur_ppo_plugin.routing import heuristics
from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.sim import cluster
from vidur_ppo_plugin.sim.replica_source import VidurReplicaSource
from vidur_ppo_plugin.twin.cluster import play
from vidur_ppo_plugin.twin.layout import SCHEDULERS

NUM_WAITING_SLOTS = 3
SEED = 42  # the default of --…_seed


class RecordingSource(VidurReplicaSource):
    """Keeps every snapshot that a Vidur run was decided on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Compiled: numpy's exponential differs from C's in the last bit.
        super().__init__(*args, **{**kwargs, "num_waiting_slots": NUM_WAITING_SLOTS, "is_compiled": True})
        self.seen: list[tuple[ClusterSnapshot, RequestInfo]] = []
        self._info: RequestInfo | None = None

    def request_info(self, request: Any) -> RequestInfo:
        self._info = super().request_info(request)
        return self._info

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        snapshot = super().snapshot(now_s)
        assert self._info is not None
        self.seen.append((snapshot, self._info))
        return snapshot


SITUATIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "KV pressure, two stages": {**KV_PRESSURE, "replica_config_num_pipeline_stages": 2},
    "all at once": {"interval_generator_config_type": "static"},
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_snapshots_and_outcomes_are_those_of_vidur(
    scheduler: str, situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[RecordingSource] = []

    def recording_source(*args: Any, **kwargs: Any) -> RecordingSource:
        sources.append(RecordingSource(*args, **kwargs))
        return sources[-1]

    monkeypatch.setattr(cluster, "VidurReplicaSource", recording_source)
    config, outcome = simulate_with_config(
        tmp_path,
        replica_scheduler_config_type=scheduler,
        global_scheduler_config_type="least_tokens",
        synthetic_request_generator_config_num_requests=40,
        roofline_execution_time_predictor_config_replica_speed_factors=[1.0, 0.7],
        **SITUATIONS[situation],
    )
    seen = iter(sources[0].seen)
    rng = random.Random(SEED)

    def decide(snapshot: ClusterSnapshot, info: RequestInfo) -> int:
        expected, expected_info = next(seen)
        assert info == expected_info
        assert snapshot.now_s == expected.now_s
        assert snapshot.expected_decode_tokens == expected.expected_decode_tokens
        assert snapshot.kv_block_size == expected.kv_block_size
        for name in ROWS:
            np.testing.assert_array_equal(getattr(snapshot, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(snapshot.waiting, expected.waiting)
        return heuristics.choose(snapshot.token_load, rng)

    from vidur_ppo_plugin.sim.twin_config import twin_config

    result = play(twin_config(config), requests_of(outcome), decide, num_waiting_slots=NUM_WAITING_SLOTS)

    assert_equal(result, outcome)
    np.testing.assert_array_equal(result.replica, column(outcome, "replica"))
    assert next(seen, None) is None
