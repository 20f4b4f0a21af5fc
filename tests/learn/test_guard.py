"""The guard of learning that began from a loaded policy: what it judges by, and what it does about it."""

from typing import Any

import numpy as np
import pytest
import torch
from test_warm_start import agent_of  # type: ignore[import-not-found]

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.learn.guard import PolicyGuard, Verdict, judge

RNG = np.random.default_rng(0)
LATENCIES = RNG.lognormal(size=1000)


def test_equal_policies_are_equal() -> None:
    same = judge(LATENCIES, LATENCIES, 0.3)
    assert same == Verdict(0.0, 0.0, 0.0)
    assert not same.is_worse(0.0) and not same.is_better(0.0)


@pytest.mark.parametrize("preference", [0.0, 0.5, 1.0])
def test_a_policy_that_is_slower_throughout_is_worse_by_that_much(preference: float) -> None:
    verdict = judge(1.1 * LATENCIES, LATENCIES, preference)
    assert verdict.change == pytest.approx(0.1) and verdict.error == pytest.approx(0.0, abs=1e-9)
    assert verdict.is_worse(1.0) and not verdict.is_better(1.0)
    assert judge(0.9 * LATENCIES, LATENCIES, preference).is_better(0.0)


def test_the_preference_weighs_the_slowest() -> None:
    changed = LATENCIES * np.where(np.quantile(LATENCIES, 0.95) < LATENCIES, 1.5, 0.8)
    assert judge(changed, LATENCIES, 0.0).is_better(1.0)
    assert judge(changed, LATENCIES, 1.0).is_worse(1.0)
    assert judge(changed, LATENCIES, 0.0).is_worse(0.01)  # the tail pays more than is borne


def test_what_may_be_noise_is_neither() -> None:
    noise = judge(LATENCIES * RNG.lognormal(sigma=0.3, size=1000), LATENCIES * np.exp(0.3**2 / 2), 0.0)
    assert abs(noise.change) < 2 * noise.error and noise.error > 0.005
    for change in (0.01, -0.01):
        verdict = Verdict(change, 0.02, change)
        assert not verdict.is_worse(0.05) and not verdict.is_better(0.05)


class Replay:
    """Latencies by the first weight of a network: as if that were all that counts."""

    def __init__(self) -> None:
        self.is_ready = True

    def __call__(self, network: dict[str, Any]) -> Any:
        return LATENCIES * (1.0 + float(network["actor_head.bias"][0])) if self.is_ready else None


def guard_with(replay: Any, **options: Any) -> PolicyGuard:
    agent = agent_of(PPOModularFlags(hidden_size=8, feature_projection_dim=8))
    agent.load_policy(agent.ppo.network.state_dict())
    values = {"interval": 1, "tolerance": 0.01, "tail_preference": 0.5, **options}
    return PolicyGuard(agent, replay, **values)


def move(guard: PolicyGuard, value: float) -> None:
    with torch.no_grad():
        guard.agent.ppo.network.actor_head.bias.fill_(value)


def now(guard: PolicyGuard) -> float:
    return float(guard.agent.ppo.network.actor_head.bias.detach()[0])


def test_a_worse_policy_gives_way_to_the_best_so_far() -> None:
    guard = guard_with(Replay())
    move(guard, -0.2)
    assert guard.after_update(None)["guard_change"] == pytest.approx(-0.2)
    move(guard, -0.1)  # better than what was loaded, worse than the best
    row = guard.after_update(None)
    assert row["guard_change"] == pytest.approx(0.9 / 0.8 - 1) and row["guard_reverts"] == 1
    assert now(guard) == pytest.approx(-0.2)
    actor = guard.agent._actor
    assert actor is not None and actor.weights["actor_head.bias"][0] == pytest.approx(-0.2)
    assert not guard.agent.ppo.optimizer.state


def test_at_the_end_only_what_proved_better_is_kept() -> None:
    guard = guard_with(Replay())
    guard.finish()
    assert now(guard) == 0.0
    move(guard, -0.3)
    guard.finish()
    assert now(guard) == pytest.approx(-0.3)
    move(guard, 0.1)
    guard.finish()
    assert now(guard) == pytest.approx(-0.3)


def test_without_requests_nothing_is_judged_and_at_the_end_nothing_is_kept() -> None:
    replay = Replay()
    replay.is_ready = False
    guard = guard_with(replay)
    move(guard, -0.5)
    assert guard.after_update(0.1) == {"guard_reverts": 0.0} and now(guard) == pytest.approx(-0.5)
    guard.finish()
    assert now(guard) == 0.0


def test_without_a_twin_credit_decides() -> None:
    guard = guard_with(None, interval=4)
    guard.agent.ppo.num_updates = 1
    move(guard, 0.4)
    for gain in (-0.03, -0.02, -0.025):
        assert "guard_change" not in guard.after_update(gain)
    guard.agent.ppo.num_updates = 4
    row = guard.after_update(-0.03)
    assert row["guard_change"] == pytest.approx(0.02625) and row["guard_reverts"] == 1 and now(guard) == 0.0
    for gain in (0.03, 0.02, -0.001):
        guard.after_update(gain)
    assert guard.num_reverts == 1


def test_it_goes_on_from_its_state() -> None:
    guard = guard_with(Replay())
    move(guard, -0.2)
    guard.after_update(None)
    again = guard_with(Replay())
    again.load_state_dict(guard.state_dict())
    move(again, -0.1)
    again.after_update(None)
    assert now(again) == pytest.approx(-0.2)
