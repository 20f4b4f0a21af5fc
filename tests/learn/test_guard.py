"""The guard of learning that began from a loaded policy: what it judges by, and what it does about it."""

from typing import Any

import numpy as np
import pytest
import torch
from test_warm_start import agent_of  # type: ignore[import-not-found]

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.guard import PolicyGuard, ReplayedLatencies, Verdict, judge
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.routing.features import Observation

RNG = np.random.default_rng(0)
#: Of eight replays: latencies and times to first token.
REPLAYS = [ReplayedLatencies(*RNG.lognormal(size=(2, 500))) for _ in range(8)]


def times(latency: Any, first_token: Any = 1.0) -> list[ReplayedLatencies]:
    return [ReplayedLatencies(latency * replay.latency_s, first_token * replay.first_token_s) for replay in REPLAYS]


def test_equal_policies_are_equal() -> None:
    same = judge(REPLAYS, REPLAYS, 0.3)
    assert same == Verdict(0.0, 0.0, 0.0, 0.0)
    assert not same.is_worse(0.0) and not same.is_better(0.0)


@pytest.mark.parametrize("preference", [0.0, 0.5, 1.0])
def test_a_policy_that_is_slower_throughout_is_worse_by_that_much(preference: float) -> None:
    verdict = judge(times(1.1, 1.1), REPLAYS, preference)
    assert verdict.change == pytest.approx(0.1) and verdict.error == pytest.approx(0.0, abs=1e-9)
    assert verdict.is_worse(1.0) and not verdict.is_better(1.0)
    assert judge(times(0.9, 0.9), REPLAYS, preference).is_better(0.0)


def test_the_preference_weighs_the_slowest() -> None:
    changed = [
        ReplayedLatencies(
            replay.latency_s * np.where(np.quantile(replay.latency_s, 0.9) < replay.latency_s, 1.5, 0.5), token
        )
        for replay in REPLAYS
        for token in [replay.first_token_s]
    ]
    assert judge(changed, REPLAYS, 0.0).is_better(1.0)
    assert judge(changed, REPLAYS, 1.0).is_worse(1.0)
    assert judge(changed, REPLAYS, 0.0).is_worse(0.01)  # the tail pays more than is borne


def test_first_tokens_must_not_be_lost_whatever_is_won() -> None:
    for preference in (0.0, 0.5):
        verdict = judge(times(0.5, 1.1), REPLAYS, preference)
        assert verdict.change < -0.15 and verdict.worst == pytest.approx(0.1)
        assert verdict.is_worse(0.05) and not verdict.is_better(0.05)
        assert verdict.is_better(0.11)


def test_what_may_be_noise_is_neither() -> None:
    noisy = [ReplayedLatencies(factor * replay.latency_s, replay.first_token_s)
             for factor, replay in zip(1 + 0.1 * RNG.standard_normal(8), REPLAYS, strict=True)]  # fmt: skip
    noise = judge(noisy, REPLAYS, 0.0)
    assert abs(noise.change) < 2 * noise.error and noise.error > 0.005
    for change in (0.01, -0.01):
        verdict = Verdict(change, 0.02, change, change - 0.02)
        assert not verdict.is_worse(0.05) and not verdict.is_better(0.05)


class Replay:
    """Outcomes by the first weight of a network, as if that were all; beyond `limit` first tokens suffer."""

    def __init__(self, limit: float = 1.0) -> None:
        self.is_ready = True
        self.limit = limit

    def __call__(self, network: dict[str, Any]) -> Any:
        bias = float(network["actor_head.bias"][0])
        return times(1.0 + bias, 1.0 + max(0.0, -bias - self.limit)) if self.is_ready else None


def guard_with(replay: Any, *, serves_best: bool = False, **flags: Any) -> PolicyGuard:
    values = {"guard_interval": 1, "guard_tolerance": 0.01, "tail_preference": 0.5, **flags}
    agent = agent_of(PPOModularFlags(hidden_size=8, feature_projection_dim=8, **values))
    agent.load_policy(agent.ppo.network.state_dict())
    return PolicyGuard(agent, replay, serves_best=serves_best)


def move(guard: PolicyGuard, value: float) -> None:
    with torch.no_grad():
        guard.agent.ppo.network.actor_head.bias.fill_(value)


def now(guard: PolicyGuard) -> float:
    return float(guard.agent.ppo.network.actor_head.bias.detach()[0])


def test_a_worse_policy_gives_way_to_the_best_so_far() -> None:
    guard = guard_with(Replay())
    move(guard, -0.2)
    assert guard.after_update(None)["guard_change"] == pytest.approx(-0.15)  # first tokens are as before
    move(guard, -0.1)  # better than what was loaded, worse than the best
    row = guard.after_update(None)
    assert row["guard_change"] == pytest.approx(0.75 * (0.9 / 0.8 - 1)) and row["guard_reverts"] == 1
    assert now(guard) == pytest.approx(-0.2)
    actor = guard.agent.policy.actor
    assert isinstance(actor, Actor) and actor.weights["actor_head.bias"][0] == pytest.approx(-0.2)
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
    guard = guard_with(None, guard_interval=4)
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


def test_without_a_twin_credit_has_the_last_word() -> None:
    for gains, kept in (((0.03, 0.02, 0.025), 0.4), ((0.03, -0.02, 0.0), 0.0)):
        guard = guard_with(None, guard_interval=100)
        guard.agent.ppo.num_updates = 1
        move(guard, 0.4)
        for gain in gains:
            guard.after_update(gain)
        guard.finish()
        assert now(guard) == pytest.approx(kept)


def served(guard: PolicyGuard) -> float:
    """The weight of the policy that decides."""
    actor = guard.agent.policy.actor
    assert (
        isinstance(actor, Actor) and float(guard.serving["actor_head.bias"][0]) == actor.weights["actor_head.bias"][0]
    )
    return float(actor.weights["actor_head.bias"][0])


def test_what_is_learned_serves_once_it_is_proved() -> None:
    guard = guard_with(Replay(), guard_interval=2, serves_best=True)
    guard.agent.ppo.num_updates = 1
    move(guard, -0.2)
    guard.after_update(None)
    assert served(guard) == 0.0 and now(guard) == pytest.approx(-0.2)
    guard.agent.ppo.num_updates = 2
    assert guard.after_update(None)["guard_change"] == pytest.approx(-0.15)  # first tokens are as they were
    assert served(guard) == pytest.approx(-0.2)
    move(guard, 0.1)
    guard.after_update(None)
    assert served(guard) == now(guard) == pytest.approx(-0.2) and guard.num_reverts == 1


def test_a_part_of_what_was_learned_will_do() -> None:
    guard = guard_with(Replay(limit=0.1), serves_best=True)
    move(guard, -0.32)
    guard.after_update(None)
    assert served(guard) == now(guard) == pytest.approx(-0.08)  # a quarter; half of it would cost first tokens
    sampled = guard_with(Replay(limit=0.1))
    move(sampled, -0.32)
    assert sampled.after_update(None)["guard_reverts"] == 1 and now(sampled) == 0.0


def test_small_losses_do_not_add_up() -> None:
    guard = guard_with(Replay(limit=0.0), guard_tolerance=0.015, serves_best=True)
    move(guard, -0.01)
    guard.after_update(None)
    assert served(guard) == pytest.approx(-0.01)  # at the price of 1 % in first tokens
    move(guard, -0.02)
    guard.after_update(None)
    assert served(guard) == pytest.approx(-0.015, abs=1e-6)  # half of the step: no more than 1.5 % since it was loaded


def test_who_serves_decides_greedily_and_what_learns_does_not() -> None:
    guard = guard_with(Replay(), serves_best=True)
    agent = guard.agent
    table = agent.features
    rng = np.random.default_rng(3)
    replicas = rng.random((4, table.num_replica_features), dtype=np.float32)
    seen = Observation(replicas, rng.random(table.num_request_features, dtype=np.float32))
    prior = np.array([-1.0, -0.5, -0.1, -0.2], np.float32)
    before = agent.decide(seen, prior)
    agent.settle(0.0, np.zeros(4))
    with torch.no_grad():
        for weights in agent.ppo.network.parameters():
            weights.add_(torch.randn_like(weights))
    for _ in range(20):  # sampled, another replica would come up
        assert agent.decide(seen, prior) == before
        agent.settle(0.0, np.zeros(4))
    agent.serve(agent.ppo.network.state_dict())
    logits = agent.ppo.network.logits(
        agent.ppo.network.encode(torch.from_numpy(seen.replicas)[None], torch.from_numpy(seen.request)[None]),
        torch.from_numpy(prior)[None],
    )
    assert agent.decide(seen, prior) == int(logits.argmax())


def test_who_serves_is_part_of_the_state() -> None:
    guard = guard_with(Replay(), serves_best=True)
    move(guard, -0.2)
    guard.after_update(None)
    again = guard_with(Replay(), serves_best=True)
    move(again, -0.05)  # where learning had got to
    again.load_state_dict(guard.state_dict())
    assert served(again) == pytest.approx(-0.2) and now(again) == pytest.approx(-0.05)
    assert float(again.loaded["actor_head.bias"][0]) == 0.0
