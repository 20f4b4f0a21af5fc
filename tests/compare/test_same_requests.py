"""Other schedulers on the requests of a run: in the twin or in Vidur the same as a run of their own."""

from pathlib import Path
from typing import Any

import pytest
from simulation import arguments

from vidur_ppo_plugin import _autoload, cli
from vidur_ppo_plugin.compare import same_requests
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.sim.launch import run

PPO = "p_p_o_global_scheduler_modular_config_"
PRETRAINED = {
    "global_scheduler_config_type": "ppo_modular",
    f"{PPO}load_checkpoint": "pretrained",
    f"{PPO}inference_only": True,
}


@pytest.fixture(autouse=True)
def our_flags_are_known() -> None:
    _autoload.install()


def run_with(tmp_path: Path, **flags: Any) -> tuple[list[str], RunOutcome]:
    command = arguments(tmp_path, **{"poisson_request_interval_generator_config_qps": 8.0, **flags})
    return command, run(command)


def moments(outcome: RunOutcome) -> list[Any]:
    return [(r.replica, r.first_token_at_s, r.completed_at_s, r.num_restarts) for r in outcome.requests]


@pytest.mark.parametrize("cluster", [{}, {"replica_scheduler_config_type": "mnemosyne_edf"}], ids=["twin", "Vidur"])
def test_it_is_as_a_run_of_their_own(tmp_path: Path, cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    in_twin = []
    play = same_requests.play_in_twin
    monkeypatch.setattr(same_requests, "play_in_twin", lambda *rest: (in_twin.append(1), play(*rest))[1])
    command, outcome = run_with(tmp_path, **{"global_scheduler_config_type": "random"}, **cluster)
    others = same_requests.run_on_same_requests(
        outcome, command, parse_schedulers(["round_robin", "least=least_tokens"])
    )
    assert [other.scheduler for other in others] == ["round_robin", "least"]
    for other, kind in zip(others, ("round_robin", "least_tokens"), strict=True):
        _, own = run_with(tmp_path, **{"global_scheduler_config_type": kind}, **cluster)
        assert moments(other) == moments(own)
    assert len(in_twin) == (0 if cluster else 2)


def test_a_policy_is_not_told_what_the_run_was_told(tmp_path: Path) -> None:
    tail = {f"{PPO}tail_preference": 1.0}
    command, outcome = run_with(tmp_path, **PRETRAINED, **tail)
    names = ["ppo_modular:pretrained", "ppo_modular:pretrained@1", "oracle"]
    usual, asked, oracle = same_requests.run_on_same_requests(outcome, command, parse_schedulers(names))
    _, own = run_with(tmp_path, **PRETRAINED)
    assert moments(usual) == moments(own)
    assert moments(asked) == moments(outcome)
    assert oracle.e2e_s.mean < 1.05 * outcome.e2e_s.mean


def test_what_the_run_does_not_see_is_hidden_from_others(tmp_path: Path) -> None:
    hidden = {"report_delay_s": 2.0, "drained": "1:0:5"}
    flags = {f"least_tokens_global_scheduler_config_{name}": value for name, value in hidden.items()}
    command, outcome = run_with(tmp_path, global_scheduler_config_type="least_tokens", **flags)
    same, stock = same_requests.run_on_same_requests(
        outcome, command, parse_schedulers(["least_tokens", "round_robin"])
    )
    assert moments(same) == moments(outcome)
    early = [r.replica for r in stock.requests if r.arrived_at_s < 5]
    assert early and 1 not in early


def test_a_run_that_was_cut_short_is_compared_as_short(tmp_path: Path) -> None:
    command, outcome = run_with(tmp_path, global_scheduler_config_type="least_tokens", time_limit=5)
    assert len(outcome.completed) < len(outcome.requests)
    (other,) = same_requests.run_on_same_requests(outcome, command, parse_schedulers(["least_tokens"]))
    assert moments(other) == moments(outcome)


def test_flags_of_schedulers_are_left_out() -> None:
    command = ["--seed", "1", "--global_scheduler_config_type", "lor", f"--{PPO}hidden_size", "32", f"--{PPO}lr=0.1"]
    command += [f"--no-{PPO}inference_only", "--cluster_config_num_replicas", "3"]
    assert same_requests.without_scheduler_flags(command) == ["--seed", "1", "--cluster_config_num_replicas", "3"]


def test_the_command_prints_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--synthetic_request_generator_config_num_requests", "60", "--no-metrics_config_write_metrics"]
    assert cli.main(["run", *few]) == 0  # the embedded default compares without being asked
    text = capsys.readouterr().out
    assert "On the same 60 requests" in text
    rows = {line.split()[0]: line for line in text[text.index("On the same") :].splitlines()[4:]}
    assert list(rows) == ["ppo_modular", "round_robin", "least_tokens"]
    assert rows["round_robin"].count("%)") == 4 and "%" not in rows["ppo_modular"]
    assert cli.main(["run", "--compare", "lor", *few, "--global_scheduler_config_type", "round_robin"]) == 0
    text = capsys.readouterr().out
    assert "\nlor " in text and "\nleast_tokens " not in text
    assert cli.main(["run", "--compare=", *few]) == 0
    assert "On the same" not in capsys.readouterr().out


def test_an_unknown_name_ends_the_command_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--compare", "round_robbin"]) == 2
    assert "error: --compare: unknown scheduler 'round_robbin' (did you mean 'round_robin'?)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
