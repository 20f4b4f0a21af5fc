"""Whole comparisons: parallel, resumable, deterministic; and what is refused before anything is written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from vidur_ppo_plugin.cli import main
from vidur_ppo_plugin.compare import capacity, comparison, runner
from vidur_ppo_plugin.compare import command as compare_commands
from vidur_ppo_plugin.compare.comparison import Options, plan
from vidur_ppo_plugin.compare.results import Cell, Results
from vidur_ppo_plugin.scenario import load_scenario, scenario_directory


def options(out: Path, **changes: Any) -> Options:
    """A quick comparison of three schedulers in one scenario."""
    defaults: dict[str, Any] = {
        "schedulers": ["round_robin", "least_tokens", "mine=least_kv"],
        "scenarios": ["vllm"],
        "out": out,
        "reference": "round_robin",
        "num_seeds": 8,
        "jobs": 1,
        "engine": "twin",
        "is_quick": True,
    }
    return Options(**{**defaults, **changes})


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs tasks here, one after the other: new processes take seconds to start, and two tests below have them."""

    def one_by_one(function: Any, tasks: Any, *, jobs: int, title: str) -> Any:
        for task in tasks:
            yield task, function(task)

    monkeypatch.setattr(runner, "in_parallel", one_by_one)
    monkeypatch.setattr(comparison, "in_parallel", one_by_one)
    monkeypatch.setattr(compare_commands, "in_parallel", one_by_one)


@pytest.mark.usefixtures("in_process")
def test_a_comparison_is_complete_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = comparison.compare(options(tmp_path / "out"))
    assert len(results.cells) == 3 and results.failures == []
    metadata = results.metadata
    assert list(metadata["schedulers"]) == ["round_robin", "least_tokens", "mine"]
    assert metadata["seeds"] == [1000] and metadata["engine"] == "twin"
    facts = metadata["scenarios"]["vllm"]
    assert facts["num_requests"] == load_scenario("vllm").num_requests // 5
    assert facts["capacity_qps"] * facts["load"] == facts["qps"]
    assert {"vidur", "numpy", "python"} <= set(metadata["versions"]) and metadata["definitions"]

    # All schedulers had the same requests.
    tables = [results.requests("vllm", label, 1000) for label in metadata["schedulers"]]
    for table in tables[1:]:
        columns = ["arrived_at_s", "prompt_tokens", "decode_tokens", "is_warm_up"]
        pd.testing.assert_frame_equal(table[columns], tables[0][columns], check_exact=True)
    assert not tables[0]["replica"].equals(tables[1]["replica"])

    monkeypatch.setattr(runner, "run_cell", _must_not_run)
    again = comparison.compare(options(tmp_path / "out", reference="mine"))
    assert again.metadata["reference"] == "mine"
    assert again.metadata["created_at"] == metadata["created_at"]


def _must_not_run(*arguments: Any, **named: Any) -> None:
    raise AssertionError("a finished cell was run again")


@pytest.mark.usefixtures("in_process")
def test_a_failed_cell_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.run_cell

    def unlucky(scenario: Any, scheduler: Any, seed: int, *, engine: str) -> Any:
        if scheduler.label == "least_tokens":
            raise RuntimeError("out of luck")
        return real(scenario, scheduler, seed, engine=engine)

    monkeypatch.setattr(runner, "run_cell", unlucky)
    results = comparison.compare(options(tmp_path / "out"))
    assert sorted(results.cells["scheduler"]) == ["mine", "round_robin"]
    (failure,) = results.failures
    assert failure["scheduler"] == "least_tokens" and "RuntimeError: out of luck" in failure["error"]

    monkeypatch.setattr(runner, "run_cell", real)
    assert comparison.compare(options(tmp_path / "out")).failures == []


@pytest.mark.usefixtures("in_process")
def test_size_split_is_tuned_on_other_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = comparison.mean_latency_s

    def watched(trial: Any) -> float:
        seen.append(trial.seeds)
        return real(trial) if len(seen) < 3 else 1000.0 + len(seen)

    monkeypatch.setattr(comparison, "mean_latency_s", watched)
    results = comparison.compare(options(tmp_path / "out", schedulers=["round_robin", "size_split"]))
    assert len(seen) >= 10 and set(seen) == {(2000,)}
    assert set(results.metadata["tuned"]["vllm"]) == {"threshold_tokens", "num_long_replicas"}
    number = len(seen)
    comparison.compare(options(tmp_path / "out", schedulers=["round_robin", "size_split"]))
    assert len(seen) == number  # kept in the metadata


def command(out: Path, *more: str) -> list[str]:
    schedulers = "round_robin,random,least_tokens,power_of_two"
    return [
        *(sys.executable, "-m", "vidur_ppo_plugin.cli", "compare", "--out", str(out)),
        *("--schedulers", schedulers, "--scenarios", "vllm", "--quick", *more),
    ]


def wait_until_nobody_is_left(process_group: int) -> None:
    """Workers end with their parent, even if it could not tell them."""
    for _ in range(300):
        try:
            os.killpg(process_group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(process_group, signal.SIGKILL)
    pytest.fail("workers outlive their parent")


def test_a_killed_run_continues_and_gives_the_same_table(tmp_path: Path) -> None:
    """In processes of its own: killed after the first cell, continued with another number of workers."""
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(killed, "--jobs", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not list(killed.glob("cells/*/*/*.json")) and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    wait_until_nobody_is_left(process.pid)
    finished = {path: path.stat().st_mtime_ns for path in killed.glob("cells/*/*/*.json")}
    assert finished

    done = subprocess.run(command(killed, "--jobs", "1"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # not run again
    assert len(Results(killed).cells) == 4
    assert (killed / "report.html").is_file() and list((killed / "plots").glob("*.png"))
    assert "least_tokens" in done.stdout and "\x1b" not in done.stdout

    whole = tmp_path / "whole"
    subprocess.run(command(whole, "--jobs", "2"), capture_output=True, check=True)
    assert (whole / "cells.csv").read_bytes() == (killed / "cells.csv").read_bytes()


TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{index * 0.31},{200 + 37 * index % 900},{5 + index % 9}\n" for index in range(400)
)


@pytest.mark.usefixtures("in_process")
def test_each_seed_replays_another_window_of_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    setup = plan(options(tmp_path / "out", scenarios=["replay"], trace=trace, num_seeds=2, is_quick=False))
    (scenario,) = setup.scenarios
    assert scenario.num_requests == 100  # 400 requests: two seeds, and two windows for tuning
    windows = [scenario.requests(seed) for seed in setup.seeds]
    assert windows[0].prompt_tokens.tolist() != windows[1].prompt_tokens.tolist()
    assert windows[0].arrived_at_s[0] == windows[1].arrived_at_s[0] == 0.0
    assert windows[0].rate_qps == pytest.approx(scenario.qps, rel=0.01)

    results = comparison.compare(options(tmp_path / "out", scenarios=["replay"], trace=trace))
    assert len(results.cells) == 3 and results.failures == []


def own_scenario(path: Path, like: str = "vllm", **changes: Any) -> Path:
    """A scenario file of the user: a copy of a built-in one with other values; None leaves a key out."""
    values = yaml.safe_load((scenario_directory() / f"{like}.yaml").read_text(encoding="utf-8")) | changes
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.mark.usefixtures("in_process")
def test_a_scenario_of_the_user_is_compared_under_the_name_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = own_scenario(tmp_path / "mine.yaml", num_requests=600, load=0.8), tmp_path / "out"
    arguments = ["--schedulers", "least_tokens,random", "--scenarios", f"{path},vllm", "--quick"]
    assert main(["compare", "--out", str(out), *arguments]) == 0
    results = Results(out)
    assert list(results.metadata["scenarios"]) == ["mine", "vllm"] and len(results.cells) == 4
    assert results.metadata["scenarios"]["mine"]["load"] == 0.8
    assert len(results.requests("mine", "random", 1000)) == 120
    # Nobody said whom to compare with, and round_robin is not there.
    assert results.metadata["reference"] == "least_tokens"
    shown = capsys.readouterr().out
    assert shown.startswith("Reference: least_tokens, the first of --schedulers, for want of round_robin; see --ref")
    assert "changes against least_tokens" in shown

    own_scenario(path, num_requests=600, load=0.7)  # the file is another one now
    assert "different: scenarios mine" in refuse(capsys, out, *arguments)


def test_the_reference_is_round_robin_if_it_is_there(tmp_path: Path) -> None:
    for schedulers, reference in (
        (["lor", "round_robin"], "round_robin"),
        (["lor", "fair=round_robin"], "fair"),
        (["lor", "random"], "lor"),
    ):
        assert plan(options(tmp_path / "out", schedulers=schedulers, reference="")).reference == reference


def test_a_scenario_file_that_is_not_right_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, path = tmp_path / "out", tmp_path / "mine.yaml"

    def refused(**changes: Any) -> str:
        return refuse(capsys, out, "--scenarios", str(own_scenario(path, **changes)))

    assert f"{tmp_path}/none.yaml: cannot be read: " in refuse(capsys, out, "--scenarios", f"{tmp_path}/none.yaml")
    assert f"{path}: unknown key 'lod' (did you mean 'load'?)" in refused(lod=0.5)
    assert f"{path}: load must be a number, got 'high'" in refused(load="high")
    assert f"{path}: class_boundary_tokens must be given" in refused(class_boundary_tokens=None)
    assert f"{path}: capacity must be given" in refused(capacity=None)
    assert f"{path}: flags: unknown flag 'cluster_config_num_replica' (did you" in refused(
        flags={"cluster_config_num_replica": 3}
    )


def test_names_of_scenarios_must_differ_in_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for folder in "ab":
        (tmp_path / folder).mkdir()
    other = own_scenario(tmp_path / "a" / "mixed.yaml")
    message = refuse(capsys, out, "--scenarios", str(other))
    assert f"--scenarios {other}: has the name of the built-in scenario 'mixed', but other content" in message
    same = own_scenario(tmp_path / "b" / "mixed.yaml", like="mixed")
    assert [scenario.name for scenario in plan(options(out, scenarios=[str(same)])).scenarios] == ["mixed"]
    assert "names one twice: " in refuse(capsys, out, "--scenarios", f"mixed,{same}")
    twins = [own_scenario(tmp_path / folder / "mine.yaml") for folder in "ab"]
    message = refuse(capsys, out, "--scenarios", ",".join(map(str, twins)))
    assert f"names one twice: {twins[0]} and {twins[1]} are both 'mine' in results" in message


@pytest.mark.usefixtures("in_process")
def test_capacity_and_scenario_take_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new scenario has no capacity yet; finding it is what `capacity` is for."""
    path = own_scenario(tmp_path / "mine.yaml", capacity=None)
    assert main(["scenario", str(path)]) == 2
    assert f"{path}: capacity must be given" in capsys.readouterr().err
    monkeypatch.setattr(capacity, "REQUESTS_PER_REPLICA", 250)
    assert main(["capacity", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: {{capacity: ") and "num_requests: 1000" in line
    assert main(["scenario", str(own_scenario(path))]) == 0
    assert "--replica_scheduler_config_type vllm" in capsys.readouterr().out
    assert main(["scenario", "replay"]) == 2
    assert "'replay' replays a trace: only `vidur-ppo compare --trace FILE` can run it" in capsys.readouterr().err


def refuse(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> str:
    """The message of a command that is refused; nothing is written."""
    before = sorted(out.rglob("*")) if out.exists() else None
    assert main(["compare", "--out", str(out), *arguments]) == 2
    assert (sorted(out.rglob("*")) if out.exists() else None) == before
    return capsys.readouterr().err


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "unknown scenario 'chatt' (did you mean 'chat'?)" in refuse(capsys, out, "--scenarios", "chatt")
    assert "unknown scheduler 'least_tokes'" in refuse(capsys, out, "--schedulers", "round_robin,least_tokes")
    assert "--reference 'lor' must be one of" in refuse(capsys, out, "--schedulers", "random", "--reference", "lor")
    assert "--seeds must be >= 1, got 0" in refuse(capsys, out, "--seeds", "0")
    assert "needs --trace FILE" in refuse(capsys, out, "--scenarios", "replay")
    assert "names one twice" in refuse(capsys, out, "--scenarios", "chat,chat")
    bad = tmp_path / "bad.csv"
    bad.write_text(TRACE.replace("\n0.62,", "\nsoon,"))
    message = refuse(capsys, out, "--scenarios", "replay", "--trace", str(bad))
    assert f"{bad}:4: column 'arrived_at' must be seconds or a date with time, got 'soon'" in message
    good = tmp_path / "short.csv"
    good.write_text(TRACE)
    assert "too few for 10 windows" in refuse(capsys, out, "--scenarios", "replay", "--trace", str(good))


@pytest.mark.usefixtures("in_process")
def test_a_directory_of_another_setup_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    setup = plan(options(out))
    setup.open(out)
    message = refuse(capsys, out, "--scenarios", "vllm", "--schedulers", "round_robin,lor", "--quick")
    assert "holds the results of another set-up (different: schedulers +lor, -least_tokens, -mine)" in message
    message = refuse(capsys, out, "--scenarios", "vllm", "--schedulers", "round_robin,least_tokens,mine=least_kv")
    assert "scenarios vllm" in message and "seeds [1000], now [1000, 1001" in message

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    assert "has files, but no metadata.json" in refuse(capsys, tmp_path / "other", "--scenarios", "vllm")
    (out / "metadata.json").write_text("{")
    assert "not the metadata of a comparison" in refuse(capsys, out, "--scenarios", "vllm")


def test_a_dead_process_is_a_failed_cell(tmp_path: Path) -> None:
    """Killed from outside, for example for want of memory: the comparison says so and ends."""
    setup = plan(options(tmp_path / "out"))
    results = setup.open(tmp_path / "out")
    task = runner.Task(tmp_path / "out", Cell("vllm", "mine", 1000), setup.scenarios[0], setup.schedulers[2], "twin")
    ((_, outcome),) = runner.in_parallel(_die, [task], jobs=1, title="cells")
    assert "the process that ran this died" in str(outcome)
    assert results.cells.empty


def _die(task: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_metadata_is_plain_json(tmp_path: Path) -> None:
    results = plan(options(tmp_path / "out", scenarios=["drain", "stale", "hetero_mixed8"])).open(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metadata.json").read_text()) == results.metadata
    assert results.metadata["scenarios"]["drain"]["drained"][0]["replica"] == 1
