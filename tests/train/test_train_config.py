"""A configuration that is not right is refused before anything starts, with the key, the value and what is right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from training_runs import SMALL, small

from vidur_ppo_plugin.cli import main
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.train.config import load_config, parse_config, replica_counts
from vidur_ppo_plugin.train.episodes import FIRST_TRAINING_SEED, LAST_TRAINING_SEED, draw_episode
from vidur_ppo_plugin.train.schema import ConfigError
from vidur_ppo_plugin.train.sweep import combinations

ROOT = Path(__file__).resolve().parents[2]


def part(**changes: Any) -> list[dict[str, Any]]:
    return [{"scenario": "mixed_long", **changes}]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"decision": 5}, r"unknown key 'decision' \(did you mean 'decisions'\?\)"),
    "type": ({"environments": "many"}, "environments must be a whole number, got 'many'"),
    "true is no number": ({"decisions": True}, "decisions must be a whole number, got True"),
    "range": ({"environments": 0}, "environments must be >= 1 and <= 4096, got 0"),
    "choice": ({"backend": "guessed"}, "backend must be one of twin, vidur, got 'guessed'"),
    "no mixture": ({"mixture": []}, "mixture must be a list of at least one part"),
    "mixture is no list": ({"mixture": "chat"}, "mixture must be a list, got 'chat'"),
    "scenario": ({"mixture": part(scenario="mixed_lon")}, r"mixture\[0\].scenario: unknown scenario 'mixed_lon'"),
    "a trace": (
        {"mixture": part(scenario="replay")},
        r"mixture\[0\].scenario: 'replay' replays a trace, which training cannot do yet: .*lengths: trace\(FILE.csv\)",
    ),
    "a trace to evaluate on": (
        {"evaluation": {"scenarios": ["replay"]}},
        r"evaluation.scenarios: 'replay' replays a trace, .* `vidur-ppo compare --scenarios replay --trace FILE.csv`",
    ),
    "no scenario": ({"mixture": [{"weight": 1.0}]}, r"mixture\[0\].scenario must be given"),
    "weight": ({"mixture": part(weight=0)}, r"mixture\[0\].weight must be > 0, got 0"),
    "load": ({"mixture": part(load=[0.9, 0.5])}, r"mixture\[0\].load must be the lowest and the highest value"),
    "one load": ({"mixture": part(load=[0.9])}, r"mixture\[0\].load must be the lowest and the highest value"),
    "load item": ({"mixture": part(load=[0.5, "x"])}, r"mixture\[0\].load\[1\] must be a number, got 'x'"),
    "speeds": ({"mixture": part(num_replicas=[3], speeds=[[1, 0.5]])}, r"mixture\[0\]: replica_speeds must be > 0"),
    "flag": ({"policy": {"lrr": 1}}, r"unknown key 'policy.lrr'"),
    "flag of a run": ({"policy": {"save_checkpoint": "x"}}, "unknown key 'policy.save_checkpoint'"),
    "flag's range": ({"policy": {"lr": 0.0}}, "policy.lr must be > 0 and <= 1, got 0.0"),
    "flag's type": ({"policy": {"epochs": 1.5}}, "policy.epochs must be a whole number, got 1.5"),
    "flags together": ({"policy": {"entropy_min": 1.3}}, "policy.entropy_min must be at most log"),
    "flat": ({"policy": {"enable_flat_network": True}}, "policy.enable_flat_network must be false: workers decide by"),
    "attention": ({"policy": {"attention_heads": 2}}, "policy.attention_heads must be 0"),
    "no critic": ({"policy": {"gamma": 0.9}}, "enable_critic must be true unless policy.gamma is 0"),
    "hybrid of the window without a future": (
        {"policy": {"reward_mode": "hybrid", "hybrid_credit": "window"}, "enable_critic": True},
        "policy.gamma must be > 0 with a reward that is paid after the decision: .* got 0.0",
    ),
    "queue_delay without a future": (
        {"policy": {"reward_mode": "queue_delay"}, "enable_critic": True},
        "policy.gamma must be > 0 with a reward that is paid after the decision: .* got 0.0",
    ),
    "queue_delay without a critic": (
        {"policy": {"reward_mode": "queue_delay", "gamma": 0.9}},
        "enable_critic must be true unless .* rewards are known for every replica, got False",
    ),
    "weights": (
        {"look_ahead": {"latency": [1.0]}},
        "look_ahead.latency must be two values, at tail preference 0 and at 1, got .1.0.",
    ),
    "no weight": (
        {"look_ahead": {"latency": [0.0, 1.0], "first_token": [0.0, 1.0]}},
        "look_ahead must be weights of which at least one is above 0 at each end",
    ),
    "a part's look ahead": (
        {"look_ahead": {"requests_per_replica": 4}, "mixture": [{"scenario": "chat", "look_ahead": {"every": 4}}]},
        r"unknown key 'mixture\[0\].look_ahead.every'.*; there are latency, latency_squared, ",
    ),
    "a part's weights": (
        {"look_ahead": {"requests_per_replica": 4}, "mixture": [{"scenario": "chat", "look_ahead": {"latency": [1]}}]},
        r"mixture\[0\].look_ahead.latency must be two values, at tail preference 0 and at 1, got .1.0.",
    ),
    "a part's boldness": (
        {
            "look_ahead": {"requests_per_replica": 4},
            "mixture": [{"scenario": "chat", "look_ahead": {"boldness": [0, 1]}}],
        },
        r"mixture\[0\].look_ahead.boldness.* > 0",
    ),
    "a part that looks ahead alone": (
        {"mixture": [{"scenario": "chat", "look_ahead": {"boldness": [1, 1]}}]},
        r"mixture\[0\].look_ahead must be left out unless look_ahead.requests_per_replica is above 0",
    ),
    "look ahead in Vidur": (
        {"look_ahead": {"requests_per_replica": 4}, "backend": "vidur"},
        "backend must be twin with look_ahead: Vidur cannot be copied, got 'vidur'",
    ),
    "look ahead with a discount": (
        {"look_ahead": {"requests_per_replica": 4}, "policy": {"gamma": 0.9}, "enable_critic": True},
        "policy.gamma must be 0 with look_ahead",
    ),
    "look ahead every": (
        {"look_ahead": {"requests_per_replica": 4, "every": 5}},
        r"look_ahead.every must be a divisor of policy.rollout_len \(32\), got 5",
    ),
    "penalty": ({"limit_penalty": 1.0}, "limit_penalty must be 0 without latency_limit_s, got 1.0"),
    "curriculum": ({"curriculum": "load=0.5;load=1"}, "stage 1 .* never ends"),
    "curriculum load": ({"curriculum": "load=0.5,decisions=9;load=2.0"}, "curriculum must be of loads of at most 1"),
    "curriculum metric": (
        {"curriculum": "load=0.5,latency_meen_below=3;load=1.0"},
        r"curriculum must be about recorded metrics .* got \['latency_meen'\]",
    ),
    "baseline": ({"evaluation": {"baselines": ["least_token"]}}, r"evaluation.baselines\[0\] must be one of"),
    "tail": (
        {"mixture": part(tail_preference=[0, 2])},
        r"mixture\[0\].tail_preference\[1\] must be >= 0 and <= 1",
    ),
    "one tail": ({"mixture": part(tail_preference=[0.5])}, r"mixture\[0\].tail_preference must be the lowest and the"),
    "no tail": ({"evaluation": {"tail_preferences": []}}, "evaluation.tail_preferences must be at least one value"),
    "tails": ({"evaluation": {"tail_preferences": [0.5, 0.5]}}, "evaluation.tail_preferences must be .* each once"),
    "flag of a part": ({"policy": {"tail_preference": 0.2}}, "unknown key 'policy.tail_preference'"),
    "evaluated": ({"evaluation": {"scenarios": ["nowhere"]}}, "evaluation.scenarios: unknown scenario 'nowhere'"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_right(path: Path) -> None:
    assert load_config(path).decisions_per_update >= 1


def test_exponents_need_no_point(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL).replace("rollout_len: 32", "rollout_len: 32\n  lr: 1e-3"))
    assert load_config(path).flags.lr == 0.001


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml: is not YAML"):
        load_config(path)
    path.write_text("- 1")
    with pytest.raises(ConfigError, match=r"bad\.yaml: must be a mapping"):
        load_config(path)


OPTIONS = {
    "workers": (["--workers", "-1"], "--workers must be >= 1"),
    "address": (["--address", "auto"], "--address needs --engine ray"),
    "resume": (["--resume"], "--resume: there is no checkpoint"),
    "decisions": (["--decisions", "0"], "decisions must be >= 1, got 0"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_wrong_options_are_refused_by_name(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    assert main(["train", str(path), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_that_are_named_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    for changes, message in (
        ({"start_from": str(tmp_path / "none")}, "start_from: checkpoint"),
        ({"policy": {"warm_start_file": "none.npz"}}, "policy.warm_start_file must be a file, got 'none.npz'"),
        ({"sweep": {"seed": [1]}}, "sweep needs --engine ray"),
    ):
        path.write_text(yaml.safe_dump({**SMALL, **changes}))
        assert main(["train", str(path), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err


def test_episodes_are_drawn_by_seed_from_the_mixture() -> None:
    config = small(environments=40)
    episodes = [draw_episode(config, slot, 1) for slot in range(20)]
    assert episodes == [draw_episode(config, slot, 1) for slot in range(20)]
    assert {episode.scenario for episode in episodes} == {"mixed_long", "heterogeneous"}
    assert {len(episode.speed_factors) for episode in episodes} == {2, 4}
    assert replica_counts(config) == [2, 4]
    for episode in episodes:
        assert FIRST_TRAINING_SEED <= min(episode.seeds) <= max(episode.seeds) <= LAST_TRAINING_SEED
        assert len(set(episode.seeds)) == 2
        if episode.scenario == "mixed_long":
            assert all(0.6 <= load <= 1.0 for load in episode.loads) and episode.is_clear
    drained = [episode for episode in episodes if episode.drained]
    assert drained and all(0 <= low < high <= 1 for episode in drained for _, low, high in episode.drained)
    half = draw_episode(config, 0, 1, load_factor=0.5)  # as a curriculum wants it
    assert half.loads == tuple(0.5 * load for load in episodes[0].loads)


def test_tail_preferences_are_drawn_for_every_cluster() -> None:
    config = small(environments=40, mixture=part(tail_preference=[0.2, 0.8]))
    drawn = [value for slot in range(20) for value in draw_episode(config, slot, 1).tail_preferences]
    assert len(set(drawn)) == 40 and 0.2 <= min(drawn) < 0.3 and 0.7 < max(drawn) <= 0.8
    assert draw_episode(small(), 0, 0).tail_preferences == (BALANCED, BALANCED)
    for slot in range(20):  # the clusters of a slot are half of the range apart
        one, other = draw_episode(config, slot, 1).tail_preferences
        assert abs(one - other) == pytest.approx(0.3)


def test_every_part_has_its_share_of_every_round_and_a_rare_one_its_turn() -> None:
    weights = [3.0, 1.4, 0.5, 0.1]
    config = small(environments=40, mixture=[part(weight=weight)[0] for weight in weights])
    rounds = [[draw_episode(config, slot, number).part for slot in range(20)] for number in range(40)]
    for drawn in rounds:
        for index, weight in enumerate(weights):
            assert abs(drawn.count(index) - 4 * weight) < 1.0 + 1e-9
    # 0.4 slots of a round: absent for two rounds at most. Drawn one by one it would be for three, one time in three.
    turns = [number for number, drawn in enumerate(rounds) if 3 in drawn]
    assert 14 <= len(turns) <= 18 and max(np.diff(turns)) <= 3
    assert rounds[0] != rounds[1]


def test_load_keeps_its_meaning_when_replicas_change() -> None:
    config = small(mixture=part(num_replicas=[8], speeds=[[1.0, 0.5]]))
    episode = draw_episode(config, 0, 0)
    own = draw_episode(small(mixture=part()), 0, 0)
    assert episode.at_scale(0).qps == pytest.approx(own.at_scale(0).qps * 6 / 4)


def test_sweeps_are_all_combinations() -> None:
    config = small(sweep={"seed": [1, 2], "policy.lr": [0.001, 0.01]})
    trials = combinations(config)
    assert list(trials)[:2] == ["seed=1,policy.lr=0.001", "seed=1,policy.lr=0.01"]
    assert [(trial.seed, trial.flags.lr) for trial in trials.values()] == [(1, 1e-3), (1, 1e-2), (2, 1e-3), (2, 1e-2)]
    for sweep, message in (
        ({"seed": 1}, "sweep.seed must be a list of values, got 1"),
        ({"policy.lr": [0.0]}, r"sweep \(policy.lr=0.0\): policy.lr must be > 0"),
        ({"polcy.lr": [0.1]}, r"unknown key 'polcy.lr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            combinations(parse_config({**SMALL, "sweep": sweep}))
