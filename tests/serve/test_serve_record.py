"""Records: written by the router, read, evaluated with other policies, learned from, and replayed in simulation."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import recorded
import torch
from serving import Backend, answers, listening, routing, run
from simulation import simulate

from vidur_ppo_plugin.cli import main
from vidur_ppo_plugin.hardware.reference import CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.learn.finetune import FinetuneParameters, finetune
from vidur_ppo_plugin.learn.off_policy import (
    LEAST_EFFECTIVE_SIZE,
    block_interval,
    effective_size,
    estimate,
    probabilities_of,
    with_costs,
)
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.record.decision_log import LoggedDecision, LoggedOutcome, RecordError, read_record
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.routers import build_router
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS, ClusterSnapshot, RequestInfo

OK = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()
PREFIX = "p_p_o_global_scheduler_modular_config_"


# --- Written by the router ---


def test_the_router_writes_decisions_and_outcomes_and_no_content(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"

    async def serve() -> None:
        backends = [Backend(answers(200, OK)), Backend(answers(503, b""))]
        async with (
            listening(*backends),
            routing(*backends, record=str(path), explore=0.5) as (_, url),
            aiohttp.ClientSession() as session,
        ):
            for _ in range(20):
                async with session.post(f"{url}/v1/completions", json={"prompt": "secret words"}) as answer:
                    assert answer.status == 200
                await asyncio.sleep(0)

    run(serve())
    assert "secret" not in path.read_text()
    header, decisions = json.loads(path.read_text().partition("\n")[0]), read_record(path)
    assert header["policy"] == "least_tokens" and header["explore"] == 0.5
    assert [decision.number for decision in decisions] == list(range(1, len(decisions) + 1))
    statuses = {decision.outcome.status for decision in decisions}
    assert statuses == {"ok", "failed"}  # a try that failed is a decision of its own
    done = [decision for decision in decisions if decision.outcome.status == "ok"]
    assert len(done) == 20
    for decision in done:
        assert decision.outcome.latency_s is not None and decision.outcome.latency_s > 0
        assert (decision.outcome.prompt_tokens, decision.outcome.output_tokens) == (7, 3)
        assert 0 < decision.probability <= 1
        assert decision.snapshot.waiting.shape == (8, decision.snapshot.num_replicas)


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text("mine")
    assert main(["serve", "--backend", "http://127.0.0.1:1", "--port", "0", "--record", str(path)]) == 2
    assert path.read_text() == "mine"


# --- Read ---


@pytest.fixture(scope="module")
def decisions() -> list[LoggedDecision]:
    given = recorded.requests(1, 1200, 11.0)
    router = build_router("least_tokens", seed=1)
    return recorded.play(recorded.cluster((1.0, 1.0, 0.4)), given, router, explore=0.3, seed=2)


def test_what_was_written_is_read(decisions: list[LoggedDecision], tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl", list(reversed(decisions)))
    with path.open("a") as file:
        file.write('{"n":99999,"t":')  # the router was killed in the middle of a line
    for mine, theirs in zip(read_record(path), decisions, strict=True):
        np.testing.assert_array_equal(mine.snapshot.values, theirs.snapshot.values)
        np.testing.assert_array_equal(mine.snapshot.waiting, theirs.snapshot.waiting)
        assert dataclasses.replace(mine, snapshot=theirs.snapshot) == theirs


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"kind":"vidur-ppo record"', '"kind":"x"', ":1: is not a record"),
        ('"format":1', '"format":9', ":1: was written by another version"),
        ('"action":', '"action":77,"x":', ":2: is not a decision: .*action must be in"),
        ('"p":', '"p":0.0,"x":', "p must be > 0"),
        ('"values":', '"value":', ":2: is not a decision"),
    ],
)
def test_a_damaged_record_is_refused_by_line(
    old: str, new: str, expected: str, decisions: list[LoggedDecision], tmp_path: Path
) -> None:
    path = recorded.write(tmp_path / "r.jsonl", decisions[:3])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(RecordError, match=expected):
        read_record(path)


# --- Evaluated ---


def bandit(size: int, seed: int, noise: float = 0.3, explore: float = 0.3) -> tuple[list[LoggedDecision], float]:
    """Decisions of independent requests among three replicas whose true costs are known; and the best mean cost."""
    rng, router = np.random.default_rng(seed), random.Random(seed)
    result, best = [], []
    for number in range(size):
        loads = rng.uniform(0, 4000, 3)
        values = np.zeros((len(ROWS), 3))
        values[ROW["prefill_tokens"]] = loads
        values[ROW["kv_blocks_total"]] = 1000
        snapshot = ClusterSnapshot(
            float(number), values, kv_block_size=16, expected_decode_tokens=100, waiting=np.zeros((8, 3))
        )
        costs = 0.5 + np.sqrt(loads) / 40  # not linear: the model alone would be wrong
        usual = number % 3
        action = router.randrange(3) if router.random() < explore else usual
        probability = explore / 3 + (1 - explore) * (action == usual)
        outcome = LoggedOutcome("ok", float(costs[action] + noise * rng.exponential()), None, 100, 100)
        best.append(costs[loads.argmin()] + noise)
        result.append(
            LoggedDecision(
                number,
                snapshot,
                RequestInfo(100, float(number)),
                action,
                probability,
                False,
                False,
                ("a", "b", "c"),
                outcome,
            )
        )
    return result, float(np.mean(best))


def test_estimates_are_right_where_the_truth_is_known() -> None:
    inside, errors = 0, []
    for seed in range(20):
        logged_decisions, truth = bandit(1500, seed)
        logged = with_costs(logged_decisions)
        found = estimate(logged, probabilities_of(build_router("least_tokens", seed=1), logged))
        errors.append(found.doubly_robust - truth)
        inside += found.low <= truth - found.recorded <= found.high
        assert found.self_normalised == pytest.approx(truth, rel=0.1)
        assert found.high < 0  # better than taking turns
        assert 0.35 < found.agreement < 0.65 or found.agreement > 0
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(20) + 1e-3  # without bias
    assert inside >= 16  # 95 % nominal


def test_the_recorded_policy_itself_is_estimated_as_recorded(decisions: list[LoggedDecision]) -> None:
    logged = with_costs(decisions)
    found = estimate(logged, probabilities_of(build_router("least_tokens", seed=1), logged))
    # It would have explored less, so it is somewhat better than what was recorded, and by no more than that.
    assert found.recorded * 0.7 < found.doubly_robust < found.recorded * 1.05
    assert found.agreement > 0.7


def test_without_exploration_nothing_can_be_said(decisions: list[LoggedDecision], tmp_path: Path) -> None:
    certain = [dataclasses.replace(decision, probability=1.0) for decision in decisions]
    path = recorded.write(tmp_path / "r.jsonl", certain)
    with pytest.raises(ValueError, match="--explore"):
        with_costs(certain)
    assert main(["evaluate-log", str(path), "--policy", "least_tokens"]) == 2
    with pytest.raises(ValueError, match="at least 100 are needed"):
        with_costs(decisions[:50])


def test_the_command_prints_a_table_and_json(
    decisions: list[LoggedDecision], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(recorded.write(tmp_path / "r.jsonl", decisions))
    assert main(["evaluate-log", path, "--policy", "least_tokens", "--policy", "least_outstanding"]) == 0
    table = capsys.readouterr().out
    assert "1,200 recorded decisions" in table and "least_outstanding" in table
    assert main(["evaluate-log", path, "--policy", "round_robin", "--json", "--cost", "ttft_s"]) == 0
    assert json.loads(capsys.readouterr().out)["round_robin"]["num_decisions"] == 1200
    assert main(["evaluate-log", path, "--policy", "nobody"]) == 2
    assert main(["evaluate-log", str(tmp_path / "none"), "--policy", "lor"]) == 2


def test_intervals_cover_the_mean_of_dependent_figures() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(60):
        steps = rng.normal(size=2000)
        values = np.convolve(steps, np.ones(10) / 10, mode="same")
        low, high = block_interval(values)
        inside += low <= 0 <= high
    assert inside >= 50


def test_intervals_of_short_records_are_no_shorter_than_they_must_be() -> None:
    """Six blocks: Student's t with 5 degrees of freedom. Resampled blocks cover 84 % there."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = block_interval(rng.normal(size=300))
        covered += low <= 0 <= high
    assert 0.92 <= covered / 400 <= 0.98
    low, high = block_interval(np.repeat([1.0, 3.0], 50))
    assert (low, high) == pytest.approx((2.0 - 12.7062, 2.0 + 12.7062), abs=1e-3)  # of the textbook: t(1), 97.5 %


# --- Where a record cannot tell ---


def test_effective_size_counts_what_was_never_seen() -> None:
    assert effective_size(np.ones(40)) == 40.0
    assert effective_size(np.array([2.0, 0.0] * 20)) == 20.0
    assert effective_size(np.array([40.0] + [1.0] * 60 + [0.0] * 39)) == pytest.approx(100**2 / 1660)
    assert effective_size(np.array([1.0] * 50 + [0.0] * 50)) == 12.5  # half of the weight is missing: not 50
    assert effective_size(np.zeros(5)) == 0.0


def evaluated(path: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """What the command says of a policy: as JSON, and its table."""
    command = ["evaluate-log", str(path), "--policy", policy]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[policy]
    assert main(command) == 0
    return found, capsys.readouterr().out


def test_on_300_requests_the_command_says_that_it_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of such a record it said +67 % (28 to 106) where running the policy changes +10 %; the weights are worth 14."""
    world = recorded.World((1.0, 0.4), "pretrained", 0.05)
    path = recorded.write(tmp_path / "r.jsonl", world.record(1, 300))
    for policy in ("least_tokens", "least_outstanding", "round_robin"):
        found, table = evaluated(path, policy, capsys)
        assert found["effective_size"] < 25
        assert "are needed" in found["reason"] and "--explore" in found["reason"]
        figures = ("self_normalised", "doubly_robust", "difference", "low", "high")
        assert [found[name] for name in figures] == [None] * 5
        row = next(line for line in table.splitlines() if line.startswith(policy))
        assert "cannot tell" in row and " %" not in row and "[" not in row
    assert evaluated(path, "pretrained", capsys)[0]["reason"] is None  # of the recorded policy it can


def test_a_large_record_with_much_exploration_tells_and_covers_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = recorded.World((1.0, 0.4), "least_tokens", 0.3)
    path = recorded.write(tmp_path / "r.jsonl", world.record(1, 2400))
    truths = recorded.one_decision_truth(world, ["pretrained", "round_robin"], 240)
    for policy, (truth, error) in truths.items():
        found, table = evaluated(path, policy, capsys)
        assert found["reason"] is None and found["effective_size"] > 4 * LEAST_EFFECTIVE_SIZE
        low, high = found["low"] / found["recorded"], found["high"] / found["recorded"]
        assert low - 2 * error <= truth <= high + 2 * error
        assert high - low < 0.2 and not low <= 0 <= high  # and is short enough to say something
        assert "cannot tell" not in table
        assert "one decision at a time" in table and "compare --scenarios replay" in table


# --- Learned from ---

SMALL = {"feature_projection_dim": 32, "hidden_size": 32}


def untrained() -> tuple[ActorCritic, FeatureTable, Prior]:
    table = FeatureTable()
    shape = NetworkShape(
        num_replica_features=table.num_replica_features,
        num_request_features=table.num_request_features,
        critic_gru_layers=0,
        attention_heads=0,
        decoupled=True,
        flat_replicas=0,
        **SMALL,
    )
    delay_model = DelayModel.from_roofline(reference_roofline(), CHUNK_SIZE)
    return ActorCritic(shape, 1), table, Prior("least_tokens", weight=1.0, delay_model=delay_model)


PARAMETERS = FinetuneParameters(
    lr=3e-3, epochs=8, minibatch_size=256, kl_coef=0.1, most_kl=0.5, max_grad_norm=1.0, seed=1
)


def as_router(network: ActorCritic, table: FeatureTable) -> Policy:
    delay_model = DelayModel.from_roofline(reference_roofline(), CHUNK_SIZE)
    prior = Prior("least_tokens", weight=1.0, delay_model=delay_model)
    return Policy(Actor.from_network(network), FeatureTable.of(table.definition), prior, random.Random(0))


def test_fine_tuning_on_a_record_makes_the_policy_better_where_it_was_recorded() -> None:
    """Two replicas are slow and nobody says so: what was recorded shows it, and the policy learns it."""
    config = recorded.cluster((1.0, 1.0, 0.4, 0.4))
    network, table, prior = untrained()
    before = as_router(network, table)
    record = recorded.play(config, recorded.requests(5, 4000, 14.0), before, explore=0.3, seed=3)
    result = finetune(network, table, prior, with_costs(record), PARAMETERS)
    assert result.is_accepted, result
    assert result.high < 0 < result.kl <= 0.5
    after = as_router(network, table)
    gains = []
    for seed in (100, 101, 102):
        given = recorded.requests(seed, 1500, 14.0)
        old, new = (recorded.mean_latency(recorded.play(config, given, router)) for router in (before, after))
        gains.append(new / old - 1)
    assert max(gains) < 0, gains


def test_a_record_that_shows_nothing_rarely_changes_anything() -> None:
    """Costs that have nothing to do with decisions, in records that are worth enough to be judged by."""
    num_accepted = 0
    for seed in range(8):
        network, table, prior = untrained()
        rng = np.random.default_rng(seed)
        noise = [
            dataclasses.replace(one, outcome=dataclasses.replace(one.outcome, latency_s=float(rng.exponential())))
            for one in bandit(1500, seed + 1, explore=1.0)[0]  # so that the weights are worth enough
        ]
        weights = {name: value.clone() for name, value in network.state_dict().items()}
        result = finetune(network, table, prior, with_costs(noise), PARAMETERS)
        is_changed = not all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
        assert is_changed == result.is_accepted
        num_accepted += result.is_accepted
    assert num_accepted <= 2


def test_a_policy_is_not_accepted_on_decisions_that_are_worth_too_few() -> None:
    network, table, prior = untrained()
    result = finetune(network, table, prior, with_costs(bandit(600, 1, noise=0.01)[0]), PARAMETERS)
    assert not result.is_accepted and "are needed" in result.why, result


def test_learning_ends_at_the_limit_of_divergence() -> None:
    network, table, prior = untrained()
    record, _ = bandit(1500, 1, noise=0.01)
    tight = dataclasses.replace(PARAMETERS, most_kl=0.01, epochs=50)
    assert finetune(network, table, prior, with_costs(record), tight).kl <= 0.01


def test_the_command_finetunes_a_checkpoint_that_can_be_exported_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "save_checkpoint": str(tmp_path / "start"),
        "rollout_len": 20,
        "lr": 1e-5,
        "prior_weight": 1.0,
    }
    simulate(
        tmp_path / "sim",
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=60,
        **{f"{PREFIX}{name}": value for name, value in options.items()},
    )
    assert main(["export", str(tmp_path / "start"), str(tmp_path / "start.npz")]) == 0
    from vidur_ppo_plugin.serve.policies import build_policy

    router = build_policy(str(tmp_path / "start.npz"), seed=1)
    config = recorded.cluster((1.0, 1.0, 0.4, 0.4))
    record = recorded.play(config, recorded.requests(5, 3000, 14.0), router, explore=0.3)
    path = recorded.write(tmp_path / "record.jsonl", record)
    settings = f"""
mixture: [{{scenario: chat}}]
start_from: {tmp_path / "start"}
policy: {{lr: 0.003, epochs: 8, minibatch_size: 256, kl_coef: 0.1, target_kl: 0.05, prior_weight: 1.0}}
"""
    (tmp_path / "c.yaml").write_text(settings)
    command = ["train", str(tmp_path / "c.yaml"), "--finetune", str(path), "--out", str(tmp_path / "out")]
    status = main(command)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "accepted" in printed
    assert main(["export", str(tmp_path / "out" / "checkpoints"), str(tmp_path / "new.npz")]) == 0
    assert build_policy(str(tmp_path / "new.npz"), seed=1) is not None
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["is_accepted"]
    assert main(command) == 2  # not over another run
    (tmp_path / "d.yaml").write_text("mixture: [{scenario: chat}]\n")
    assert main(["train", str(tmp_path / "d.yaml"), "--finetune", str(path), "--out", str(tmp_path / "o2")]) == 2
    assert "start_from" in capsys.readouterr().err


def test_the_policy_of_the_package_can_be_fine_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vidur_ppo_plugin.serve.policies import build_policy

    config = recorded.cluster((1.0, 1.0, 0.4, 0.4))
    record = recorded.play(config, recorded.requests(5, 2000, 14.0), build_policy("pretrained", seed=1), explore=0.3)
    path = recorded.write(tmp_path / "record.jsonl", record)
    (tmp_path / "c.yaml").write_text(
        "mixture: [{scenario: chat}]\nstart_from: pretrained\n"
        "policy: {lr: 0.003, epochs: 8, minibatch_size: 256, kl_coef: 0.1, target_kl: 0.05}\n"
    )
    status = main(["train", str(tmp_path / "c.yaml"), "--finetune", str(path), "--out", str(tmp_path / "out")])
    assert status in (0, 1), capsys.readouterr().err
    assert (tmp_path / "out" / "finetune.json").is_file()
    assert (tmp_path / "out" / "checkpoints").is_dir() == (status == 0)
    if status == 0:
        assert main(["export", str(tmp_path / "out" / "checkpoints"), str(tmp_path / "new.npz")]) == 0


# --- Back in simulation ---


def test_the_environment_steps_through_a_record(decisions: list[LoggedDecision], tmp_path: Path) -> None:
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    import vidur_ppo_plugin.envs  # noqa: F401 (where no start-up file is read)

    path = recorded.write(tmp_path / "r.jsonl", decisions)
    env = gymnasium.make("vidur_ppo/Recorded-v0", record=str(path), disable_env_checker=True)
    check_env(env.unwrapped, skip_render_check=True)
    # The policy of the prior, in the environment and by the estimator that has no model: the same figure.
    observation, _ = env.reset()
    rewards, is_over = [], False
    while not is_over:
        observation, reward, is_over, _, info = env.step(int(observation["prior"].argmax()))
        rewards.append(reward)
        assert info["is_recorded_action"] == (reward != 0)
    logged = with_costs(decisions)
    shares = probabilities_of(build_router("least_tokens", seed=1), logged)
    unique = np.array([share.max() == 1.0 for share in shares])
    taken = np.array([share[one.action] / one.probability for share, one in zip(shares, decisions, strict=True)])
    assert -np.array(rewards)[unique] == pytest.approx((taken * logged.costs)[unique])
    with pytest.raises(RuntimeError):
        env.unwrapped.step(0)


def test_a_record_is_a_trace_that_simulations_replay(decisions: list[LoggedDecision], tmp_path: Path) -> None:
    from vidur_ppo_plugin.workload.trace import TraceError, read_trace

    path = recorded.write(tmp_path / "r.jsonl", decisions)
    trace = read_trace(path)
    given = recorded.requests(1, 1200, 11.0)
    np.testing.assert_allclose(trace.arrived_at_s, given.arrived_at_s)
    assert trace.prompt_tokens.tolist() == given.prompt_tokens.tolist()
    assert trace.decode_tokens.tolist() == given.decode_tokens.tolist()
    path.write_text(path.read_text().replace('"outcome"', '"x"', 1))
    with pytest.raises(TraceError, match=r"r\.jsonl:2"):
        read_trace(path)
