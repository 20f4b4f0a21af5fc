"""The twin against real Vidur: every request, to the last bit."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from simulation import KV_PRESSURE
from twin_runs import assert_equal, column, replay, simulate_with_config

from vidur_ppo_plugin.twin.layout import SCHEDULERS

RANDOM = {"global_scheduler_config_type": "random", "synthetic_request_generator_config_num_requests": 50}
FLAG_PREFIX = {
    "sarathi": "sarathi",
    "vllm": "vllm",
    "orca": "orca",
    "mnemosyne_fcfs_fixed_chunk": "mnemosyne_f_c_f_s_fixed_chunk",
}
SITUATIONS: dict[str, dict[str, Any]] = {
    "light load": {"poisson_request_interval_generator_config_qps": 3.0},
    "KV pressure": KV_PRESSURE,
    "KV pressure, four stages": {
        **KV_PRESSURE,
        "replica_config_num_pipeline_stages": 4,
        "cluster_config_num_replicas": 2,
        "synthetic_request_generator_config_num_requests": 24,
    },
    "all at once": {"interval_generator_config_type": "static", "replica_config_num_pipeline_stages": 2},
    "two speeds, tensor parallel": {
        "roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 0.3],
        "replica_config_tensor_parallel_size": 2,
        "replica_config_num_pipeline_stages": 2,
    },
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_request_fares_as_in_vidur(scheduler: str, situation: str, tmp_path: Path) -> None:
    flags = {**RANDOM, "replica_scheduler_config_type": scheduler, **SITUATIONS[situation]}

    config, outcome = simulate_with_config(tmp_path, **flags)

    assert_equal(replay(config, outcome), outcome)
    if "KV pressure" in situation and scheduler != "orca":
        assert column(outcome, "num_restarts").sum() > 0


def test_the_default_cluster_of_vidur(tmp_path: Path) -> None:
    """Llama-3-8B over 16 H100s, fixed chunks, requests of equal length arriving together."""
    config, outcome = simulate_with_config(
        tmp_path,
        replica_config_device="h100",
        replica_config_network_device="h100_dgx",
        replica_config_tensor_parallel_size=8,
        replica_config_num_pipeline_stages=2,
        replica_scheduler_config_type="mnemosyne_fcfs_fixed_chunk",
        length_generator_config_type="fixed",
        fixed_request_length_generator_config_decode_tokens=40,
        fixed_request_length_generator_config_max_tokens=8192,
        interval_generator_config_type="static",
        global_scheduler_config_type="round_robin",
        synthetic_request_generator_config_num_requests=40,
    )

    assert_equal(replay(config, outcome), outcome)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Flags of a small simulation with any of the things that the twin has to get right."""
    scheduler = draw(st.sampled_from(SCHEDULERS))
    prefix = f"{FLAG_PREFIX[scheduler]}_scheduler_config"
    replicas = draw(st.sampled_from([1, 2, 3, 5]))
    max_tokens = draw(st.sampled_from([96, 700, 2500]))
    flags = {
        **RANDOM,
        "seed": draw(st.integers(0, 1000)),
        "synthetic_request_generator_config_seed": draw(st.integers(0, 1000)),
        "replica_scheduler_config_type": scheduler,
        "cluster_config_num_replicas": replicas,
        "replica_config_num_pipeline_stages": draw(st.sampled_from([1, 2, 4])),
        "poisson_request_interval_generator_config_qps": draw(st.sampled_from([2.0, 15.0, 60.0, 400.0])),
        "uniform_request_length_generator_config_min_tokens": 8,
        "uniform_request_length_generator_config_max_tokens": max_tokens,
        "uniform_request_length_generator_config_prefill_to_decode_ratio": draw(st.sampled_from([0.5, 3.0, 20.0])),
        "cache_config_block_size": draw(st.sampled_from([1, 16, 32])),
        f"{prefix}_batch_size_cap": draw(st.sampled_from([4, 9, 128])),
        "roofline_execution_time_predictor_config_replica_speed_factors": draw(
            st.lists(st.sampled_from([0.37, 1.0, 2.5]), min_size=replicas, max_size=replicas)
        ),
    }
    # From memory for one request, and the watermark, upwards.
    blocks = -(-max_tokens // flags["cache_config_block_size"])
    flags["cache_config_num_blocks"] = int(blocks * draw(st.sampled_from([1.1, 2.0, 5.0, 50.0]))) + 2
    if scheduler in ("sarathi", "mnemosyne_fcfs_fixed_chunk"):
        flags[f"{prefix}_chunk_size"] = draw(st.sampled_from([7, 64, 512]))
    return flags


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(flags=clusters())
def test_any_cluster_fares_as_in_vidur(flags: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config, outcome = simulate_with_config(Path(directory), **flags)

    assert_equal(replay(config, outcome), outcome)
    event(f"preemptions: {bool(np.any(column(outcome, 'num_restarts')))}")
