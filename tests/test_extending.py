"""docs/extending.md: each of its diffs applies to a copy of the tree, touches few files, and adds what it promises."""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import PACKAGE, ROOT, run_python

PAGE = ROOT / "docs" / "extending.md"

# The files that each kind of addition touches, its test and generated documentation aside.
FILES = {
    "A heuristic": {"vidur_ppo_plugin/routing/heuristics.py"},
    "A feature": {"vidur_ppo_plugin/routing/features.py"},
    "A reward component": {"vidur_ppo_plugin/learn/credit/hybrid.py", "vidur_ppo_plugin/flags/reward.py"},
    "A scenario": {"configs/scenarios/pair.yaml"},
    "A loss term": {"vidur_ppo_plugin/learn/ppo.py", "vidur_ppo_plugin/flags/learning.py"},
    "A replica scheduler of the twin": {"vidur_ppo_plugin/twin/layout.py", "vidur_ppo_plugin/twin/batching.py"},
    "A flag": {"vidur_ppo_plugin/flags/running.py", "vidur_ppo_plugin/learn/online.py"},
}

# --- Reading the page ---


def sections() -> dict[str, str]:
    """The text below each heading that has a diff."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {heading: text for heading, text in texts.items() if "```diff" in text}


def fence(heading: str, language: str) -> str:
    """The only block of that language in a section."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", sections()[heading], flags=re.MULTILINE | re.DOTALL)
    return str(block)


def files_of(diff: str) -> set[str]:
    """The files that a diff changes, makes or deletes."""
    names = re.findall(r"^(?:---|\+\+\+) (\S+)$", diff, flags=re.MULTILINE)
    return {name.partition("/")[2] for name in names} - {"dev/null"}


def assert_few_files(heading: str, diff: str) -> None:
    assert files_of(diff) == FILES[heading]


def patched_tree(directory: Path, diff: str) -> Path:
    """A copy of package and scenarios with a diff applied."""
    shutil.copytree(ROOT / PACKAGE, directory / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", directory / "configs")
    # `git apply` skips in silence what lies outside the part of a repository that it is called in.
    variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    command = ["git", "apply", "--whitespace=error-all", "-"]
    done = subprocess.run(
        command, cwd=directory, env=variables, input=diff, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return directory


# --- What each addition is good for; called in a process whose package is the patched copy ---

PREFIX = "p_p_o_global_scheduler_modular_config_"
# Two updates in thirty requests with short outputs.
SHORT: dict[str, Any] = {
    "synthetic_request_generator_config_num_requests": 30,
    "uniform_request_length_generator_config_prefill_to_decode_ratio": 60.0,
    "metrics_config_write_metrics": False,
}


def learning_run(name: str, **flags: Any) -> list[dict[str, str]]:
    """The rows of ppo_metrics.csv of a run that learns."""
    from simulation import simulate

    ours = {f"{PREFIX}{flag}": value for flag, value in {"rollout_len": 14, "metrics_dir": name, **flags}.items()}
    simulate(Path(name), global_scheduler_config_type="ppo_modular", **SHORT, **ours)
    with (Path(name) / "ppo_metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    return rows


def flag_is_documented(name: str) -> bool:
    from vidur_ppo_plugin.sim import flag_docs

    return f"\n| `--{PREFIX}{name}` |" in flag_docs.docs()


def check_heuristic() -> None:
    from simulation import simulate

    from vidur_ppo_plugin import _autoload
    from vidur_ppo_plugin.compare.schedulers import parse_schedulers
    from vidur_ppo_plugin.routing import heuristics, mixture
    from vidur_ppo_plugin.serve.policies import build_policy
    from vidur_ppo_plugin.sim import flag_docs
    from vidur_ppo_plugin.train.config import BASELINES

    outcome = simulate(Path("run"), global_scheduler_config_type="least_waiting", **SHORT)
    assert len(outcome.requests) == 30 and {request.replica for request in outcome.requests} == {0, 1, 2, 3}
    build_policy("least_waiting", seed=0)
    (spec,) = parse_schedulers(["least_waiting"])
    assert spec.kind == "least_waiting" and "least_waiting" in BASELINES
    assert "least_waiting" in mixture.TEACHERS and "least_waiting" in _autoload.own_types()
    assert "| `least_waiting` | waiting requests |" in heuristics.docs()
    assert "\n## least_waiting\n" in flag_docs.docs()


def check_feature() -> None:
    from vidur_ppo_plugin.routing import features
    from vidur_ppo_plugin.serve.policies import build_policy

    names = [feature.name for feature in features.FeatureTable().replica_features]
    assert "speed" in names and "speed_relative" in names
    assert "\n| `speed` | factor | log1p(speed relative to the nominal one) |\n" in features.docs()
    learning_run("run")
    with pytest.raises(ValueError, match="learned with other features"):
        build_policy("pretrained", seed=0)


def check_reward_component() -> None:
    from vidur_ppo_plugin.record import metrics

    rows = learning_run("run", reward_mode="hybrid", gamma=0.9, idle_penalty_weight=1.0)
    assert all(0.0 < float(row["idle_penalty"]) < 1.0 for row in rows)
    without = learning_run("without", reward_mode="hybrid", gamma=0.9)
    assert float(without[0]["idle_penalty"]) == 0.0
    assert float(without[0]["reward_mean"]) > float(rows[0]["reward_mean"])
    assert "| `idle_penalty` | reward |" in metrics.docs() and "Subtracted. (hybrid)" in metrics.docs()
    assert metrics.wandb_name("idle_penalty") == "ppo_reward/idle_penalty"
    assert flag_is_documented("idle_penalty_weight")


def check_scenario() -> None:
    from vidur_ppo_plugin import cli
    from vidur_ppo_plugin.scenario import load_scenario, scenario_names

    assert "pair" in scenario_names()
    scenario = load_scenario("pair")
    assert scenario.num_replicas == 2 and len(scenario.requests(0)) == scenario.num_requests
    assert cli.main(["scenario", "pair"]) == 0


def check_loss_term() -> None:
    from vidur_ppo_plugin.train.config import POLICY_FLAGS

    without, heavy = learning_run("without"), learning_run("heavy", residual_coef=1e6)
    # The first step is the same: the residual starts at zero. From then on it is held back.
    assert float(heavy[0]["entropy"]) != float(without[0]["entropy"])
    assert float(heavy[1]["approx_kl"]) != float(without[1]["approx_kl"])
    assert "residual_coef" in POLICY_FLAGS and flag_is_documented("residual_coef")


def check_replica_scheduler() -> None:
    """Beside Vidur's side of it, in memory that is plentiful and in memory that is short."""
    from simulation import KV_PRESSURE
    from twin_runs import assert_equal, replay, simulate_with_config

    from vidur_ppo_plugin import _autoload

    _autoload.install()
    # `dataclass` looks up the module in which a class is defined.
    exec(fence("A replica scheduler of the twin", "python"), globals())
    flags = {"global_scheduler_config_type": "random", "synthetic_request_generator_config_num_requests": 40}
    two_stages = {**KV_PRESSURE, "replica_config_num_pipeline_stages": 2}
    latencies_s = []
    for name, more in (("vllm", {}), ("static", {}), ("static", KV_PRESSURE), ("static", two_stages)):
        config, outcome = simulate_with_config(Path(name), **{**more, **flags, "replica_scheduler_config_type": name})
        completions = replay(config, outcome)
        assert_equal(completions, outcome)
        latencies_s.append((completions.completed_at_s - completions.arrived_at_s).mean())
    assert latencies_s[1] > latencies_s[0]  # requests wait for the batch before


def check_flag() -> None:
    done = run_python(sys.executable, "-m", "vidur.main", "--help", cwd=Path.cwd(), PYTHONPATH=Path.cwd())
    assert f"--{PREFIX}collapse_window " in done.stdout
    assert flag_is_documented("collapse_window")
    # Of the last 200 decisions, 30 cannot be more than half.
    assert {float(row["collapse_alarm"]) for row in learning_run("usual", collapse_share=0.5)} == {0.0}
    rows = learning_run("shorter", collapse_share=0.26, collapse_window=1)
    assert {float(row["collapse_alarm"]) for row in rows} == {1.0}


CHECKS: dict[str, Callable[[], None]] = {
    "A heuristic": check_heuristic,
    "A feature": check_feature,
    "A reward component": check_reward_component,
    "A scenario": check_scenario,
    "A loss term": check_loss_term,
    "A replica scheduler of the twin": check_replica_scheduler,
    "A flag": check_flag,
}
# Where the addition is to compiled code, it is compiled; elsewhere that would take most of the time.
COMPILED = {"A replica scheduler of the twin"}


def run_check(heading: str, tree: Path) -> None:
    """Run a check in the tree, with its package."""
    import vidur_ppo_plugin

    assert Path(vidur_ppo_plugin.__file__).resolve().is_relative_to(tree.resolve())
    CHECKS[heading]()


# --- The tests ---


def test_every_kind_is_on_the_page_and_checked() -> None:
    assert set(sections()) == set(FILES) == set(CHECKS)


@pytest.mark.parametrize("heading", FILES)
def test_an_addition_touches_few_files(heading: str) -> None:
    assert_few_files(heading, fence(heading, "diff"))


def test_one_file_more_is_too_many() -> None:
    more = fence("A heuristic", "diff") + fence("A scenario", "diff")
    assert files_of(more) == FILES["A heuristic"] | FILES["A scenario"]
    with pytest.raises(AssertionError):
        assert_few_files("A heuristic", more)


@pytest.mark.parametrize("heading", FILES)
def test_an_addition_works(heading: str, tmp_path: Path) -> None:
    tree = patched_tree(tmp_path / "tree", fence(heading, "diff"))
    done = run_python(
        sys.executable,
        *("-c", "import sys, test_extending; test_extending.run_check(sys.argv[1], test_extending.Path(sys.argv[2]))"),
        *(heading, tree),
        cwd=tree,
        PYTHONPATH=os.pathsep.join((str(tree), str(ROOT / "tests"))),
        OMP_NUM_THREADS=1,
        NUMBA_DISABLE_JIT=int(heading not in COMPILED),
        NUMBA_CACHE_DIR=tmp_path / "cache",
    )
    assert done.returncode == 0, done.stderr


def test_a_check_fails_without_its_diff() -> None:
    with pytest.raises(AssertionError):
        check_scenario()
