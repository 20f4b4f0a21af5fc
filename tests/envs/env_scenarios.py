"""Small scenarios for the tests of the environment, and a strict comparison of what it gives."""

from typing import Any

import numpy as np

from vidur_ppo_plugin.scenario import Capacity, Drained, Scenario

#: Short and long prompts, busy enough for queues on four replicas.
SMALL = Scenario(
    name="small",
    why="Queues form within seconds.",
    lengths="0.9: lognormal(400, 1.0, 10, 2000) / uniform(2, 40); 0.1: uniform(2000, 6000) / uniform(2, 40)",
    load=0.9,
    num_requests=60,
    class_boundary_tokens=2000,
    max_tokens=8192,
    capacity=Capacity(qps=60.0, scheduler="least_tokens", num_requests=1000, num_seeds=1),
)

#: What makes backends differ if they do: batches of another kind, memory, speeds, old reports, drained replicas.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vllm": {
        "flags": {"replica_scheduler_config_type": "vllm", "vllm_scheduler_config_max_tokens_in_batch": 8192},
    },
    "memory": {"flags": {"cache_config_num_blocks": 300}, "lengths": "lognormal(400, 1.0, 10, 2000) / fixed(150)"},
    "speeds": {"flags": {"roofline_execution_time_predictor_config_replica_speed_factors": [1.0, 0.5]}},
    "stale": {"report_delay_s": 0.3},
    "drained": {"drained": (Drained(1, 0.2, 0.7),)},
    "bursts": {"cv": 4.0},
}

#: `reward_mode`, and `hybrid_credit` where it matters.
REWARDS = (("marginal_delay",), ("queue_delay",), ("hybrid", "placement"), ("hybrid", "window"))


def scenario(variant: str = "plain", **changes: Any) -> Scenario:
    """SMALL with a variant's values and others."""
    return SMALL.at(**{**VARIANTS[variant], **changes})


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, NaN included."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and left.dtype == object:
        return same(left.tolist(), right.tolist())
    return np.asarray(left).dtype == np.asarray(right).dtype and np.array_equal(
        left, right, equal_nan=isinstance(left, float | np.ndarray)
    )
