"""The warm start on closed-form cases: the file, what is refused, cloning, and how the teacher's influence fades."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.learn.agent import Agent
from vidur_ppo_plugin.learn.build import build_agent, check_resumed
from vidur_ppo_plugin.learn.demonstrations import PRIORS, DemonstrationBuffer, Demonstrations, load, save
from vidur_ppo_plugin.learn.warm_start import DemonstrationSet, clone, split
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable, Observation
from vidur_ppo_plugin.routing.prior import Prior

FLAG = "--the_flag"
TABLE = FeatureTable()
DELAY_MODEL = DelayModel(1e-4, 1e-5, 1e-8)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As `build_agent` has it: for networks this small a second one only costs time."""
    torch.set_num_threads(1)


def observation(rng: np.random.Generator, size: int) -> Observation:
    """Random; the first and the last feature stand out."""
    replicas = 0.3 * rng.random((size, TABLE.num_replica_features), dtype=np.float32)
    replicas[:, [0, -1]] /= 0.3
    return Observation(replicas, rng.random(TABLE.num_request_features, dtype=np.float32))


def demonstrations(num_decisions: int = 60, sizes: tuple[int, ...] = (2, 3, 5), seed: int = 0) -> Demonstrations:
    """The teacher takes the replica with the largest first feature; the number of replicas varies."""
    rng = np.random.default_rng(seed)
    buffer = DemonstrationBuffer(feature_hash=TABLE.hash, teachers={"least_tokens": 0.75, "lor": 0.25})
    for index in range(num_decisions):
        seen = observation(rng, sizes[index % len(sizes)])
        costs = rng.random((len(seen.replicas), len(PRIORS))) * 1000
        buffer.add(seen, costs, int(np.argmax(seen.replicas[:, 0])))
    return buffer.collect()


def prior(name: str = "none", weight: float = 3.0) -> Prior:
    return Prior(name, weight=weight, delay_model=DELAY_MODEL)


def network(seed: int = 0, **shape: Any) -> ActorCritic:
    sizes = {"num_replica_features": TABLE.num_replica_features, "num_request_features": TABLE.num_request_features}
    return ActorCritic(NetworkShape(**{"hidden_size": 32, **sizes, **shape}), seed)


# --- the file ---


def test_round_trip_with_ragged_replicas(tmp_path: Path) -> None:
    original, path = demonstrations(), tmp_path / "new" / "demonstrations.npz"
    save(original, path)
    loaded = load(path, feature_hash=TABLE.hash, flag=FLAG)
    for field in dataclasses.fields(Demonstrations):
        mine, theirs = getattr(original, field.name), getattr(loaded, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, field.name
    assert loaded.digest == original.digest != demonstrations(seed=1).digest
    assert loaded.num_replicas.tolist() == [2, 3, 5] * 20
    assert [entry.name for entry in path.parent.iterdir()] == ["demonstrations.npz"]


def test_prior_logits_are_those_of_any_prior_and_weight() -> None:
    rng = np.random.default_rng(0)
    buffer, seen, costs = (
        DemonstrationBuffer(feature_hash="", teachers={}),
        observation(rng, 3),
        rng.random((3, len(PRIORS))),
    )
    buffer.add(seen, costs, 0)
    recorded = buffer.collect()
    for column, name in enumerate(PRIORS):
        for weight in (0.5, 3.0):
            expected = prior(name, weight).logits(costs[:, column])
            assert np.array_equal(recorded.prior_logits(0, prior(name, weight)), expected)
    assert recorded.prior_logits(0, prior("none")).tolist() == [0.0, 0.0, 0.0]


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demonstrations.npz"
    save(demonstrations(), path)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save(demonstrations(seed=1), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match=r"not written to .*: it has no decisions"):
        save(dataclasses.replace(demonstrations(), actions=np.zeros(0, dtype=np.int64)), path)


def write(path: Path, header: Any = None, **arrays: Any) -> None:
    """A file of demonstrations with anything in it replaced: fields of the header, arrays; None leaves one out."""
    good = demonstrations()
    names = ("replicas", "request", "prior_costs", "offsets", "actions")
    content = {name: getattr(good, name).copy() for name in names}
    fields = {"format": 1, "feature_hash": TABLE.hash, "teachers": {"lor": 1.0}, "num_decisions": 60}
    text = json.dumps(header if isinstance(header, list) else {**fields, "priors": list(PRIORS), **(header or {})})
    content["header"] = np.frombuffer(text.encode(), dtype=np.uint8)
    for name, value in arrays.items():
        content[name] = value(content[name]) if callable(value) else value
    np.savez(path, **{name: value for name, value in content.items() if value is not None})


def put(index: Any, value: float) -> Any:
    def change(array: Any) -> Any:
        array[index] = value
        return array

    return change


NONE = np.zeros(0, dtype=np.int64)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"header": {"format": 2}}, "it has format 2, this version reads 1"),
    "features": ({"header": {"feature_hash": "abc"}}, f"with the features abc, this run has {TABLE.hash}"),
    "teachers": ({"header": {"teachers": 5}}, "its header is damaged"),
    "count": ({"header": {"num_decisions": 61}}, "its header counts 61 decisions, it has 60"),
    "no decisions": ({"actions": NONE}, "it has no decisions"),
    "too large": ({"actions": put(1, 3)}, "the action of decision 1 is 3, out of range for 3 replicas"),
    "negative": ({"actions": put(7, -1)}, "the action of decision 7 is -1, out of range for 3 replicas"),
    "nan": ({"replicas": put((4, 2), np.nan)}, r"replicas\[4, 2\] is not finite: nan"),
    "inf": ({"request": put((5, 1), np.inf)}, r"request\[5, 1\] is not finite: inf"),
    "cost": ({"prior_costs": put((0, 3), -np.inf)}, r"prior_costs\[0, 3\] is not finite: -inf"),
    "offsets": ({"offsets": put(-1, 7)}, "its offsets do not divide its 200 rows"),
    "empty set": ({"offsets": put(1, 0)}, "its offsets do not divide its 200 rows"),
    "lengths": ({"request": lambda array: array[1:]}, "it has 60 actions, 59 requests and 61 offsets"),
    "priors": (
        {"header": {"priors": ["least_tokens"]}},
        rf"prior_costs have shape \(200, {len(PRIORS)}\), not \(200, 1\)",
    ),
    "kind": ({"actions": lambda array: array.astype(float)}, "actions is float64 with 1 axes, not int64"),
    "left out": ({"request": None}, r"not a file of demonstrations .*request"),
    "pickle": ({"request": np.array([{}], dtype=object)}, "not a file of demonstrations"),
    "header": ({"header": ["no"]}, "not a file of demonstrations"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    changes, reason = BAD[kind]
    path = tmp_path / "bad.npz"
    write(path, **changes)
    with pytest.raises(ValueError, match=reason) as raised:
        load(path, feature_hash=TABLE.hash, flag=FLAG)
    assert str(raised.value).startswith(f"{FLAG}={path}: ")


def test_what_is_no_such_file_at_all_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "good.npz")
    load(tmp_path / "good.npz", feature_hash=TABLE.hash, flag=FLAG)
    whole = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "text").write_text("not at all")
    (tmp_path / "empty").touch()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "array.npy", np.zeros(3))
    cases = {"missing": "there is no such file", ".": "there is no such file"}
    cases |= dict.fromkeys(("text", "empty", "half", "array.npy"), "it is not a file of demonstrations")
    for name, reason in cases.items():
        with pytest.raises(ValueError, match=reason) as raised:
            load(tmp_path / name, feature_hash=TABLE.hash, flag=FLAG)
        assert FLAG in str(raised.value) and str(tmp_path) in str(raised.value)


@given(st.data())
def test_a_damaged_file_is_refused_or_unharmed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Never another kind of error than ValueError, wherever a byte is wrong."""
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    save(demonstrations(6), path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        load(path, feature_hash=TABLE.hash, flag=FLAG)
    except ValueError as error:
        assert FLAG in str(error)


# --- cloning ---


def test_cloning_learns_a_simple_teacher(caplog: pytest.LogCaptureFixture) -> None:
    shown, actor = demonstrations(2000), network()
    with caplog.at_level(logging.INFO):
        report = clone(actor, shown, prior(), PPOModularFlags(bc_epochs=8, bc_lr=3e-3, seed=0))
    assert report.accuracy > 0.9
    assert report.prior_accuracy == pytest.approx((1 / 2 + 1 / 3 + 1 / 5) / 3, abs=0.03)
    assert report.train_loss < 0.3
    assert DemonstrationSet(demonstrations(500, sizes=(4,), seed=9), prior()).accuracy(actor) > 0.9
    first, last = (record.getMessage() for record in caplog.records)
    assert "epoch 1 of 8, train loss" in first and "2000 decisions, 200 of them for validation" in first
    assert f"validation accuracy {100 * report.accuracy:.1f}% (the prior's best: " in last


def test_same_seed_same_bits() -> None:
    def cloned(seed: int) -> list[torch.Tensor]:
        actor = network()
        clone(actor, demonstrations(), prior(), PPOModularFlags(bc_epochs=3, bc_lr=3e-3, seed=seed))
        return [parameter.detach() for parameter in actor.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(cloned(0), cloned(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(cloned(0), cloned(1), strict=True))


def test_cloning_leaves_the_critic_alone() -> None:
    actor, untouched = network(), network()
    clone(actor, demonstrations(), prior(), PPOModularFlags(bc_epochs=1, bc_lr=1e-3, seed=0))
    changed = {
        name.split(".")[0]
        for (name, mine), theirs in zip(actor.named_parameters(), untouched.parameters(), strict=True)
        if not torch.equal(mine, theirs)
    }
    assert changed == {"projection", "actor_branch", "actor_head"}


def test_a_policy_that_ends_below_its_prior_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The prior is the teacher of the decisions for validation; the others show the opposite."""
    shown = demonstrations(200, sizes=(2,))
    costs = np.repeat(1000 * (1 - shown.replicas[:, :1].astype(float)), len(PRIORS), axis=1)
    actions = shown.actions.copy()
    training, _ = split(200, seed=0)
    actions[training] = 1 - actions[training]
    misled = dataclasses.replace(shown, prior_costs=costs, actions=actions)
    report = clone(network(), misled, prior("least_tokens"), PPOModularFlags(bc_epochs=10, bc_lr=3e-3, seed=0))
    assert report.prior_accuracy == 1.0 > report.accuracy
    assert "the prior alone agrees more often" in caplog.text


def test_split_is_seeded_and_disjoint() -> None:
    training, validation = split(200, seed=3)
    assert len(validation) == 20
    assert sorted([*training, *validation]) == list(range(200))
    assert split(200, seed=3)[1].tolist() == validation.tolist() != split(200, seed=4)[1].tolist()
    assert [part.tolist() for part in split(1, seed=0)] == [[0], [0]]
    assert [len(part) for part in split(2, seed=0)] == [1, 1]


def test_minibatches_hold_every_decision_once_and_one_number_of_replicas() -> None:
    shown, generator = DemonstrationSet(demonstrations(60), prior()), torch.Generator().manual_seed(0)
    batches = list(shown.minibatches(8, generator))
    assert sum(len(chosen) for _, chosen in batches) == len(shown) == 60
    assert all(len(chosen) >= 6 for _, chosen in batches)
    seen = torch.cat([group.replicas[chosen][:, 0, 0] for group, chosen in batches])
    assert len(set(seen.tolist())) == 60


def test_untrained_loss_is_that_of_a_uniform_choice() -> None:
    """Prior none and a residual of zero: log of the number of replicas."""
    generator = torch.Generator().manual_seed(0)
    for size in (2, 7):
        shown = DemonstrationSet(demonstrations(20, sizes=(size,)), prior())
        assert shown.loss(network(), size=16, generator=generator).item() == pytest.approx(np.log(size), rel=1e-6)


# --- learning after a warm start ---


def flags(tmp_path: Path, **changes: Any) -> PPOModularFlags:
    path = tmp_path / "demonstrations.npz"
    if not path.exists():
        save(demonstrations(300, sizes=(3, 4)), path)
    values: dict[str, Any] = {
        "warm_start_file": str(path),
        "bc_epochs": 5,
        "prior": "none",
        "rollout_len": 32,
        "minibatch_size": 16,
        "hidden_size": 32,
        "kl_ref_coef": 0.5,
        "epochs": 2,
    }
    return PPOModularFlags(**{**values, **changes})


def agent_of(settings: PPOModularFlags) -> Agent:
    return build_agent(settings, num_replicas=4, delay_model=DELAY_MODEL)


def practise(agent: Agent, updates: int, seed: int) -> list[dict[str, float]]:
    """Rollouts in which the LAST feature pays, not the teacher's first."""
    rng, metrics = np.random.default_rng(seed), []
    for _ in range(updates):
        while not agent.is_ready_to_learn:
            seen = observation(rng, 4)
            action = agent.decide(seen, np.zeros(4, dtype=np.float32))
            values = seen.replicas[:, -1].astype(float)
            agent.settle(float(values[action]), values)
        metrics.append(agent.learn(None, metric=None, pressure=(0.0, 0.0)))
    return metrics


def test_both_pulls_fade_to_nothing(tmp_path: Path) -> None:
    agent = agent_of(flags(tmp_path, bc_coef=0.4, bc_fade_steps=100, kl_ref_coef=0.2, kl_ref_steps=200))
    expected = {0: (0.4, 0.2), 50: (0.2, 0.15), 100: (0.0, 0.1), 200: (0.0, 0.0), 10**6: (0.0, 0.0)}
    for decisions, weights in expected.items():
        agent.num_decisions = decisions
        coefficients = agent._coefficients()
        assert (coefficients.bc_coef, coefficients.kl_ref_coef) == pytest.approx(weights)
    agent.num_decisions = 0
    metrics = practise(agent, 8, seed=0)
    # Updates after 32, 64, 96 decisions still see the demonstrations; the fourth does not.
    assert ["bc_loss" in row for row in metrics] == [True] * 3 + [False] * 5
    assert [row["kl_reference"] > 0 for row in metrics] == [True] * 6 + [False] * 2


def test_a_pull_without_steps_stays(tmp_path: Path) -> None:
    agent = agent_of(flags(tmp_path, kl_ref_coef=0.2, kl_ref_steps=0))
    for decisions in (0, 5000, 10**9):
        agent.num_decisions = decisions
        assert agent._coefficients().kl_ref_coef == 0.2


def test_the_reference_is_the_cloned_policy_and_not_the_prior(tmp_path: Path) -> None:
    def pull(kl_ref_coef: float) -> float:
        agent = agent_of(flags(tmp_path, bc_coef=0.0, kl_ref_coef=kl_ref_coef, kl_coef=0.0, lr=3e-3))
        assert agent.ppo.reference is not None
        return practise(agent, 6, seed=1)[-1]["kl_reference"]

    # With no learning to speak of the policy stays the reference; the prior, uniform, is far from it.
    agent = agent_of(flags(tmp_path, lr=1e-9, bc_coef=0.0))
    assert practise(agent, 1, seed=1)[0]["kl_reference"] < 1e-6
    agent.ppo.reference = None
    assert practise(agent, 1, seed=1)[0]["kl_reference"] > 0.1
    assert pull(5.0) < 0.5 * pull(1e-3)


def test_the_demonstrations_hold_the_policy_back(tmp_path: Path) -> None:
    def remembered(bc_coef: float) -> float:
        agent = agent_of(flags(tmp_path, bc_coef=bc_coef, kl_ref_coef=0.0, lr=3e-3))
        practise(agent, 10, seed=2)
        assert agent.ppo.demonstrations is not None
        return agent.ppo.demonstrations.accuracy(agent.ppo.network)

    assert remembered(3.0) > remembered(0.0) + 0.1


def test_resuming_after_a_warm_start_is_exact(tmp_path: Path) -> None:
    """Through a real checkpoint: weights of the reference, fades and draws of demonstrations all carry over."""
    settings = flags(tmp_path, bc_coef=0.3, bc_fade_steps=200, kl_ref_steps=300)
    agent = agent_of(settings)
    practise(agent, 3, seed=3)
    saved = checkpoint.save(tmp_path / "saved", "last", {"agent": agent.state_dict()}, metadata={})
    resumed = agent_of(dataclasses.replace(settings, load_checkpoint=str(saved)))
    assert resumed.ppo.reference is None  # nothing is cloned twice
    resumed.load_state_dict(checkpoint.load(saved).state["agent"])
    check_resumed(resumed, settings)
    agent.start_run()
    assert practise(agent, 5, seed=4) == practise(resumed, 5, seed=4)
    for mine, theirs in zip(agent.ppo.network.parameters(), resumed.ppo.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_resuming_without_the_demonstrations_is_refused_while_they_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = flags(tmp_path, bc_coef=0.3, bc_fade_steps=64)
    agent = agent_of(settings)
    practise(agent, 1, seed=5)

    def resume(**changes: Any) -> None:
        changed = dataclasses.replace(settings, load_checkpoint="any", **changes)
        fresh = agent_of(changed)
        fresh.load_state_dict(agent.state_dict())
        check_resumed(fresh, changed)

    reason = r"warm_start_file must be given: .* after 32 decisions demonstrations still count with weight 0\.15"
    with pytest.raises(ValueError, match=reason):
        resume(warm_start_file="")
    resume(warm_start_file="", bc_coef=0.0)
    resume(warm_start_file="", inference_only=True)
    resume()
    assert "not those of the checkpoint" not in caplog.text
    save(demonstrations(300, sizes=(3, 4), seed=8), tmp_path / "other.npz")
    resume(warm_start_file=str(tmp_path / "other.npz"))
    assert "not those of the checkpoint" in caplog.text
    practise(agent, 1, seed=6)
    resume(warm_start_file="")  # faded out


def test_what_does_not_fit_the_network_or_the_prior_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decisions among \[3, 4\] replicas; the flat network is for 4 only"):
        agent_of(flags(tmp_path, enable_flat_network=True))
    with pytest.raises(ValueError, match="with the features"):
        agent_of(flags(tmp_path, trend_window=7))
    path = tmp_path / "few.npz"
    write(path, {"priors": ["least_tokens"]}, prior_costs=lambda array: array[:, :1])
    agent_of(flags(tmp_path, warm_start_file=str(path), prior="least_tokens", bc_epochs=1))
    with pytest.raises(ValueError, match="not of least_kv"):
        agent_of(flags(tmp_path, warm_start_file=str(path), prior="least_kv"))
