"""Exact credit: a shadow that is told of every placement, and forgets those that are over."""

import numpy as np
import pytest
from small_twins import config_of, workload

from vidur_ppo_plugin.learn.credit.exact import ShadowTwin
from vidur_ppo_plugin.twin.twin import run
from vidur_ppo_plugin.workload.requests import Requests


def test_over_a_run_it_sums_to_all_latencies() -> None:
    replicas, *columns = workload(1500).values()  # more than a shadow remembers
    config = config_of()
    shadow, total_s = ShadowTwin(config), 0.0
    for replica, now_s, prompt_tokens, decode_tokens in zip(replicas, *columns, strict=True):
        total_s += shadow.marginal_delay(now_s, prompt_tokens, decode_tokens)[replica]
        shadow.place(replica, now_s, prompt_tokens, decode_tokens)
    served = run(config, Requests(*columns), replicas)
    assert total_s == pytest.approx(float(np.sum(served.completed_at_s - served.arrived_at_s)), rel=1e-9)
