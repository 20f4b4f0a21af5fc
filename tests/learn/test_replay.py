"""The latest requests, replayed to judge a policy: what happened in Vidur happens again, and other orders beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twin_runs import column, simulate_with_config

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.learn import replay
from vidur_ppo_plugin.learn.policy_checkpoint import network_weights
from vidur_ppo_plugin.learn.replay import RecentRequests
from vidur_ppo_plugin.sim.delay_model import build_delay_model
from vidur_ppo_plugin.sim.twin_config import twin_config

PREFIX = "p_p_o_global_scheduler_modular_config_"
BUSY: dict[str, Any] = {
    "global_scheduler_config_type": "ppo_modular",
    "poisson_request_interval_generator_config_qps": 12.0,
    "synthetic_request_generator_config_num_requests": 300,
    "uniform_request_length_generator_config_prefill_to_decode_ratio": 30.0,
    f"{PREFIX}load_checkpoint": "pretrained",
    f"{PREFIX}inference_only": True,
}


def recent_of(config: Any, outcome: Any, num_requests: int = 1000) -> RecentRequests:
    recent = RecentRequests(
        twin_config(config),
        config.cluster_config.global_scheduler_config,
        delay_model=build_delay_model(config),
        num_requests=num_requests,
    )
    for request in outcome.requests:
        recent.add(request.arrived_at_s, request.prompt_tokens, request.decode_tokens)
    return recent


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return network_weights(checkpoint.load("pretrained"))


@pytest.mark.parametrize(
    "flags", [{}, {"report_delay_s": 0.5}, {"drained": "1:0:1000"}], ids=["as usual", "old reports", "drained"]
)
def test_the_first_replay_is_what_happened(tmp_path: Path, weights: dict[str, Any], flags: dict[str, Any]) -> None:
    own = {f"{PREFIX}{name}": value for name, value in flags.items()}
    config, outcome = simulate_with_config(tmp_path, **BUSY, **own)
    replays = recent_of(config, outcome)(weights)
    assert replays is not None and len(replays) == 8
    arrived_at_s = column(outcome, "arrived_at_s")
    np.testing.assert_array_equal(replays[0].latency_s, column(outcome, "completed_at_s") - arrived_at_s)
    np.testing.assert_array_equal(replays[0].first_token_s, column(outcome, "first_token_at_s") - arrived_at_s)
    # The same requests in other orders: other latencies, of about the same mean.
    for other in replays[1:]:
        assert not np.array_equal(other.latency_s, replays[0].latency_s)
        assert other.latency_s.mean() == pytest.approx(replays[0].latency_s.mean(), rel=0.3)


def test_every_network_gets_the_same_orders(tmp_path: Path, weights: dict[str, Any]) -> None:
    config, outcome = simulate_with_config(tmp_path, **BUSY)
    recent = recent_of(config, outcome)
    first, second = recent(weights), recent(weights)
    assert first is not None and second is not None
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.latency_s, other.latency_s)


def test_decision_by_decision_it_is_the_same(
    tmp_path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, outcome = simulate_with_config(tmp_path, **BUSY)
    recent = recent_of(config, outcome)
    compiled = recent(weights)
    monkeypatch.setattr(replay, "Actor", type("NoActor", (), {}))  # as for networks that it does not cover
    one_by_one = recent(weights)
    assert compiled is not None and one_by_one is not None
    for ours, theirs in zip(one_by_one, compiled, strict=True):
        np.testing.assert_array_equal(ours.latency_s, theirs.latency_s)
        np.testing.assert_array_equal(ours.first_token_s, theirs.first_token_s)


def test_too_few_requests_say_nothing_and_only_the_latest_count(tmp_path: Path, weights: dict[str, Any]) -> None:
    config, outcome = simulate_with_config(tmp_path, **BUSY)
    assert recent_of(config, outcome, num_requests=63)(weights) is None
    latest = recent_of(config, outcome, num_requests=100)(weights)
    assert latest is not None and all(len(one.latency_s) == 100 for one in latest)
