"""Decisions: masks, the fallback that a learned policy has, exploration with true probabilities, and shadows."""

import logging
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from policies import save_policy

from vidur_ppo_plugin.routing.snapshot import RequestInfo
from vidur_ppo_plugin.serve.decider import Decider, NamedPolicy
from vidur_ppo_plugin.serve.fleet import Fleet, NoBackendError
from vidur_ppo_plugin.serve.instruments import Instruments
from vidur_ppo_plugin.serve.policies import build_policy
from vidur_ppo_plugin.serve.settings import SettingsError
from vidur_ppo_plugin.serve.source import VllmReplicaSource

INFO = RequestInfo(100, 0.0)


def fleet_of(count: int, slots: int = 4) -> Fleet:
    fleet = Fleet(VllmReplicaSource(num_waiting_slots=slots), max_in_flight=4, breaker_failures=3)
    for index in range(count):
        fleet.set_up(fleet.add(f"http://h{index}:1"))
    return fleet


def decider_of(fleet: Fleet, policy: str | Path = "least_tokens", explore: float = 0.0, shadow: str = "") -> Decider:
    return Decider(
        fleet,
        Instruments(),
        policy=NamedPolicy("policy", str(policy), seed=3),
        fallback=NamedPolicy("fallback", "least_tokens", seed=3),
        shadow=NamedPolicy("shadow", shadow, seed=3) if shadow else None,
        explore=explore,
        rng=random.Random(5),
    )


def test_it_avoids_who_is_down_drained_full_excluded_or_lacks_the_model() -> None:
    fleet = fleet_of(6)
    down, drained, full, tried, other, good = fleet.backends
    fleet.set_down(down, "test")
    drained.is_draining = True
    full.in_flight = 4
    for backend in (full, tried, good):
        backend.models = {"m": {}}
    other.models = {"another": {}}
    fleet.source.on_dispatch(good.replica, 10_000, 0.0, is_hidden=False)  # the busiest of all
    decision = decider_of(fleet).decide(INFO, 1.0, model="m", excluded=[tried])
    assert decision.backend is good
    assert down not in decision.members and decision.snapshot.num_replicas == 5
    assert decision.snapshot.available is not None and decision.snapshot.available.sum() == 1


@pytest.mark.parametrize(("is_full", "is_busy"), [(True, True), (False, False)])
def test_nowhere_to_go_says_why(is_full: bool, is_busy: bool) -> None:
    fleet = fleet_of(2)
    for backend in fleet.backends:
        backend.in_flight, backend.is_draining = 4 if is_full else 0, not is_full
    with pytest.raises(NoBackendError) as caught:
        decider_of(fleet).decide(INFO, 0.0)
    assert caught.value.is_busy is is_busy


class Broken:
    """A policy that fails in a way of its own."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    def __call__(self, *arguments: object) -> int:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]


@pytest.mark.parametrize("outcome", [RuntimeError("no"), FloatingPointError("nan"), MemoryError(), 7, -1])
def test_a_policy_that_cannot_decide_never_fails_a_request(outcome: object, caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(2)
    decider = decider_of(fleet)
    decider.policy.router = Broken(outcome)
    fleet.source.on_dispatch(fleet.backends[0].replica, 50, 0.0, is_hidden=False)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            decision = decider.decide(INFO, 0.0)
    assert decision.backend is fleet.backends[1] and decision.is_fallback
    assert decider.num_fallbacks == 3
    assert b"vidur_ppo_fallback_decisions_total 3.0" in decider._instruments.page()
    (said,) = (record for record in caplog.records if record.levelno == logging.ERROR)  # once, not for every request
    assert "least_tokens did" in said.getMessage()


def test_logits_that_are_not_finite_are_such_a_case(tmp_path: Path) -> None:
    decider = decider_of(fleet_of(2), save_policy(tmp_path / "p.npz"))
    actor = decider.policy.router.actor  # type: ignore[attr-defined]
    actor.logits = lambda *arguments: np.array([np.nan, 0.0], dtype=np.float32)
    assert decider.decide(INFO, 0.0).is_fallback


def test_a_learned_policy_decides_and_survives_backends_that_come_and_go(tmp_path: Path) -> None:
    fleet = fleet_of(3)
    decider = decider_of(fleet, save_policy(tmp_path / "p.npz"))
    for count in (3, 4, 2):
        while len(fleet.backends) < count:
            fleet.set_up(fleet.add(f"http://new{len(fleet.backends)}:1"))
        while len(fleet.backends) > count:
            fleet.remove(fleet.backends[0])
        decision = decider.decide(INFO, 0.0)
        assert not decision.is_fallback and decision.scores is not None and len(decision.scores) == count


@pytest.mark.parametrize(("policy", "explore"), [("least_tokens", 0.3), ("random", 0.0), ("round_robin", 0.5)])
def test_probabilities_are_those_with_which_actions_are_taken(policy: str, explore: float) -> None:
    """Importance weights have the mean 1 under the true probabilities, for every action."""
    fleet = fleet_of(4)
    fleet.backends[1].is_draining = True
    fleet.source.on_dispatch(fleet.backends[0].replica, 10, 0.0, is_hidden=False)  # two are tied, one is not best
    decider = decider_of(fleet, policy, explore)
    weights: Counter[int] = Counter()
    size = 6000
    for _ in range(size):
        decision = decider.decide(INFO, 0.0)
        weights[decision.action] += 1 / decision.probability  # type: ignore[assignment]
    assert weights[1] == 0
    for action, total in weights.items():
        assert total / size == pytest.approx(1.0, abs=0.12), action
    if explore:
        assert set(weights) == {0, 2, 3}


def test_a_shadow_is_asked_counted_and_logged_with_scores(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(2)
    decider = decider_of(fleet, "least_tokens", shadow="least_outstanding")
    for _ in range(2):
        fleet.source.on_dispatch(fleet.backends[1].replica, 10, 0.0, is_hidden=False)
    fleet.source.on_dispatch(fleet.backends[0].replica, 1000, 0.0, is_hidden=False)
    decision = decider.decide(INFO, 0.0)
    assert decision.backend is fleet.backends[1]
    with caplog.at_level(logging.INFO):
        decider.ask_shadow(decision, 0.0)
    assert decider.shadow_counts == {"same": 0, "other": 1, "failed": 0}
    assert "1 of 1 decisions differ, 100.0 %" in caplog.text
    assert "scores of least_outstanding: h0:1 -1, h1:1 -2; of least_tokens: h0:1 -1020, h1:1 -60" in caplog.text
    assert decider.shadow is not None
    # Replicas that are equal to the shadow are no disagreement, whichever of them it draws.
    tied = decider_of(fleet_of(4), "round_robin", shadow="least_tokens")
    for _ in range(20):
        tied.ask_shadow(tied.decide(INFO, 0.0), 0.0)
    assert tied.shadow_counts == {"same": 20, "other": 0, "failed": 0}
    decider.shadow.router = Broken(RuntimeError())
    decider.ask_shadow(decision, 100.0)
    assert decider.shadow_counts["failed"] == 1


def test_names_of_policies() -> None:
    build_policy("size_split:threshold_tokens=100,num_long_replicas=2", seed=1)
    for text, expected in {
        "least_tokn": "did you mean 'least_tokens'",
        "size_split:threshold=3": "threshold_tokens=VALUE",
        "size_split:threshold_tokens=x": "threshold_tokens must be a number",
        "random:a=1": "no options",
        "nowhere.npz": "nowhere.npz",
    }.items():
        with pytest.raises(SettingsError, match=expected) as caught:
            NamedPolicy("policy", text, seed=1)
        assert str(caught.value).startswith("--policy: ")


def test_a_policy_of_other_features_is_refused(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "p.npz", feature_hash="0123456789abcdef")
    with pytest.raises(ValueError, match="other features"):
        build_policy(str(path), seed=1)


def test_the_policy_that_comes_with_the_package_decides_and_takes_a_tail_preference() -> None:
    fleet = fleet_of(4)
    decision = decider_of(fleet, "pretrained").decide(INFO, 0.0)
    assert not decision.is_fallback and decision.scores is not None
    asked = build_policy("pretrained@0.9", seed=1)
    assert asked.features.tail_preference == 0.9  # type: ignore[attr-defined]
    for wrong in ("pretrained@1.5", "pretrained@x", "pretrained@"):
        with pytest.raises(ValueError, match="tail preference"):
            build_policy(wrong, seed=1)
