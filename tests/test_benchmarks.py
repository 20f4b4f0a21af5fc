"""Every benchmark in its smallest size, as people run it: it measures what it claims to, and prints one JSON object.

A benchmark is a file in `benchmarks/` whose name does not begin with an underscore. Each one is here, or has a reason
in NOT_HERE; what it takes in a whole size, and whether limits are kept, is not a matter of these tests.
"""

import ast
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import ROOT

import vidur_ppo_plugin

BENCHMARKS = ROOT / "benchmarks"
POLICY, PRIOR = "ppo_modular:pretrained", "least_tokens"
Result = dict[str, Any]


def run_json(command: list[str], *, statuses: tuple[int, ...] = (0,)) -> Result:
    """The JSON object that a program prints on standard output, where there must be nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode in statuses, f"status {done.returncode}\n{done.stderr[-3000:]}"
    result = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert isinstance(result, dict)
    return result


def benchmark(name: str, *arguments: str, statuses: tuple[int, ...] = (0,)) -> Result:
    """The result of a benchmark."""
    return run_json([str(BENCHMARKS / name), *arguments, "--json"], statuses=statuses)


def assert_positive(result: Result, *names: str) -> None:
    """Figures are numbers above zero."""
    for name in names:
        assert isinstance(result[name], (int, float)) and math.isfinite(result[name]) and result[name] > 0, name


def entries_of(value: Any) -> Iterator[Result]:
    """Every change, with its interval, that is somewhere in a result."""
    if isinstance(value, dict) and "change" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from entries_of(item)


def assert_changes(result: Any, *, seeds: int, at_least: int) -> None:
    """So many changes are in a result, and each is a number and rests on so many seeds."""
    entries = list(entries_of(result))
    assert len(entries) >= at_least
    for entry in entries:
        assert math.isfinite(entry["change"]) and entry["seeds"] == seeds, entry


# --- Benchmarks that stand alone ---


def check_simulation_overhead(result: Result) -> None:
    assert result["updates"] > 0
    assert result["completed"] == result["requests"] > 0
    assert_positive(result, "inference_ratio", "training_ratio")


def check_decision_latency(result: Result) -> None:
    learning, inference = result["cases"]["4"], result["cases"]["4 inference"]
    assert learning["updates"] > 0 and inference["updates"] == 0
    for case in (learning, inference):
        assert case["decisions"] >= 100
        assert_positive(case, "median_us", "in_run_median_us", "outstanding_per_replica")
        assert_positive(case["parts_us"], *case["parts_us"])


def check_predictor_cost(result: Result) -> None:
    assert len(result["call_us"]) == 5
    assert_positive(result["call_us"], *result["call_us"])


def check_startup_cost(result: Result) -> None:
    # That the hook is active in one environment and absent from the other is checked by the benchmark itself.
    assert_positive(result, "median_without_ms", "median_with_ms", "find_spec_us", "repeats")


def check_twin_vs_vidur(result: Result) -> None:
    assert result["max_abs_diff_s"] == 0 and result["different_preemptions"] == 0
    assert set(result["schedulers"]) == {"sarathi", "vllm", "orca", "mnemosyne_fcfs_fixed_chunk"}
    for figures in result["schedulers"].values():
        assert_positive(figures, "vidur_requests_per_s", "twin_requests_per_s", "first_call_s")
    rates = [name for name in result if name.endswith("_per_s")]
    assert len(rates) == 5
    assert_positive(result, "speedup", "marginal_delay_us", "marginal_delay_rolled_us", *rates)
    assert result["marginal_delay_relative_error"] < 1e-9


def check_router_latency(result: Result) -> None:
    assert_positive(result, "requests_per_s", "decision_us")
    assert math.isfinite(result["added_p50_ms"])
    assert_positive(result["median_ms"], "direct", "vidur-ppo")
    assert_positive(result["decisions_us"], "least_tokens", "learned")
    assert result["over_vllm_router"] is result["over_sglang_router"] is None  # they are not there


def check_compare_scaling(result: Result) -> None:
    assert result["cells"] == 6  # six schedulers, a scenario, a seed
    assert_positive(result, "one_s", "two_s", "ratio")


def check_training_throughput(result: Result) -> None:
    assert result["updates"] == result["one_worker_updates"] == 2
    assert result["sb3_decisions"] > 0
    ratios = ("machine_two_workers_ratio", "two_workers_ratio", "twin_over_vidur", "rollout_over_sb3")
    assert_positive(result, "decisions_per_s", "vidur_decisions_per_s", "sb3_rollout_decisions_per_s", *ratios)


def check_online_learning(result: Result) -> None:
    (study,) = result["workloads"]
    assert study["updates"] > 0 and study["completed"] == 300
    assert list(study["points"]) == ["150", "300"]
    assert math.isfinite(study["cost_of_learning"])
    assert_changes(study, seeds=1, at_least=8)


def check_learning_from_nothing(result: Result) -> None:
    check_online_learning(result)
    (study,) = result["workloads"]
    assert study["against"] == PRIOR and list(study["beside"]) == ["round_robin", "size_split"]
    assert study["beside"]["round_robin"]["e2e_mean"]["change"] != 0


def check_clairvoyant(result: Result) -> None:
    routers = result["scenarios"]["mixed_long"]
    assert list(routers) == ["policy", "clairvoyant"]
    assert_changes(routers, seeds=1, at_least=8)
    assert routers["policy"] != routers["clairvoyant"]


def check_why_it_works(result: Result) -> None:
    assert set(result["routers"]) == {PRIOR, "policy, tail 0"}
    for router in result["routers"].values():
        assert router["requests"] == 360  # 400 without the warm-up
        assert_positive(router["mean_latency_s"], "short", "long")
    assert result["routers"][PRIOR]["prior_choice_by_size"] == [1.0] * 8
    assert len(result["pictures"]) == 4 and all(Path(path).stat().st_size > 0 for path in result["pictures"])


def check_hybrid(result: Result) -> None:
    plan, scratch = result["results"]
    assert len(plan["checks"]) == 7 and plan["checks"]["delta_score not constant"][0]
    assert scratch["wall_s"] > 0
    for part in (plan, scratch):
        assert list(part["changes"]) == ["random", "round_robin", "lor", "least_tokens"]
        for changes in part["changes"].values():
            assert set(changes) == {"e2e_mean", "ttft_mean", "ttft_p99"}
            assert all(change != 0 for change, _, _ in changes.values())


def check_log_evaluation(result: Result) -> None:
    assert result["least_effective_size"] > 0
    assert sum(line["num_cases"] for line in result["by_worth"]) == 1
    (truth,) = result["truths"]
    assert truth["target"] == "round_robin" and truth["running"] != 0


def check_same_results(result: Result) -> None:
    assert len(result["digests"]) == 3 and result["different"] == []
    assert len(set(result["digests"].values())) == 3


def check_same_speed(result: Result) -> None:
    figure = result["figures"]["start of Python"]
    assert figure["pairs"] == 2
    assert_positive(figure, "ratio", "low", "high", "base_s", "this_s")
    assert figure["low"] <= figure["ratio"] <= figure["high"]


@dataclass(frozen=True)
class Case:
    """How a benchmark is run beside `--json --quick`, and what must be true of its result."""

    file: str
    check: Callable[[Result], None]
    arguments: tuple[str, ...] = ()
    #: Whether it takes `--out`, a directory for what it writes.
    writes: bool = False


CASES = {
    "simulation overhead": Case("simulation_overhead.py", check_simulation_overhead),
    "decision latency": Case("decision_latency.py", check_decision_latency),
    "predictor cost": Case("predictor_cost.py", check_predictor_cost),
    "start-up cost": Case("startup_cost.py", check_startup_cost),
    "twin": Case("twin_vs_vidur.py", check_twin_vs_vidur),
    "router latency": Case("router_latency.py", check_router_latency),
    "compare scaling": Case("compare_scaling.py", check_compare_scaling),
    "training throughput": Case("training_throughput.py", check_training_throughput),
    "learning on": Case("online_learning.py", check_online_learning),
    "learning from nothing": Case(
        "online_learning.py",
        check_learning_from_nothing,
        ("--checkpoint", "nothing", "--beside", "round_robin,size_split"),
    ),
    "hybrid": Case("hybrid.py", check_hybrid),
    "clairvoyant": Case("clairvoyant.py", check_clairvoyant),
    "evaluation of logs": Case("log_evaluation.py", check_log_evaluation),
    "same results": Case("same_results.py", check_same_results),
    "same speed": Case("same_speed.py", check_same_speed, ("--base", str(ROOT))),
    "why it works": Case("why_it_works.py", check_why_it_works, writes=True),
}
#: Run by tests of their own, below or elsewhere, or nowhere, and why.
NOT_HERE = {
    "tables.py": "test_tables_of_a_comparison and test_results_beyond_compare",
    "make_results.py": "test_results_beyond_compare",
    "roofline_accuracy.py": "measured profiles are not in the repository; tests/hardware/test_roofline_accuracy.py",
    "real_vllm.py": "needs vLLM, which .ci/run does not install",
}


@pytest.mark.parametrize("name", CASES)
def test_it_measures_what_it_claims_to(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    out = ("--out", str(tmp_path)) if case.writes else ()
    case.check(benchmark(case.file, *case.arguments, *out, "--quick"))


def test_every_benchmark_is_run_or_has_a_reason_not_to_be() -> None:
    files = {path.name for path in BENCHMARKS.glob("*.py") if not path.name.startswith("_")}
    assert files == {case.file for case in CASES.values()} | set(NOT_HERE)


def test_same_speed_judges_by_students_t(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ratio_of = importlib.import_module("same_speed").ratio_of
    found = ratio_of([1.0, 1.0, 1.0, 1.0], [1.1, 1.2, 1.1, 1.2])
    middle, half = math.sqrt(1.1 * 1.2), math.log(1.2 / 1.1) / 2
    assert found["ratio"] == pytest.approx(middle)
    # t(3) is 3.1824 at 97.5 %; the deviation is half * sqrt(4 / 3), over the root of 4.
    assert found["low"] == pytest.approx(middle * math.exp(-3.18245 * half / math.sqrt(3)), rel=1e-5)
    assert found["high"] == pytest.approx(middle * math.exp(3.18245 * half / math.sqrt(3)), rel=1e-5)
    assert ratio_of([2.0], [1.0]) == {"ratio": 0.5, "low": None, "high": None, "pairs": 1}


def test_same_speed_finds_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks classes and functions up by name; whoever renames one adds the new name there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    find = importlib.import_module("_speed").find
    calls = [
        node
        for node in ast.walk(ast.parse((BENCHMARKS / "_speed.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "find"
    ]
    assert len(calls) >= 9
    for call in calls:
        names = [ast.literal_eval(argument) for argument in call.args]
        assert callable(find(*names, **{item.arg: ast.literal_eval(item.value) for item in call.keywords}))


def test_start_up_cost_installs_beside_a_checkout_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install leaves metadata in the checkout, by which pip takes the package for installed."""
    metadata = tmp_path / "checkout" / "vidur_ppo_plugin.egg-info" / "PKG-INFO"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vidur-ppo-plugin\nVersion: {vidur_ppo_plugin.__version__}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(metadata.parents[1]), str(ROOT))))
    program = "import pathlib, startup_cost as s; d = pathlib.Path({!r}); p = s.make_environment(d / 'e')\n"
    program += "s.install(p, d); print(s.output_of(p, 'import vidur_ppo_plugin'))"
    command = [sys.executable, "-c", program.format(str(tmp_path))]
    subprocess.run(command, check=True, cwd=BENCHMARKS, capture_output=True, timeout=600)


def test_it_prints_a_table_for_people(tmp_path: Path) -> None:
    """The smallest one; what is printed on the way goes elsewhere in this form too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(BENCHMARKS / "predictor_cost.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and all(line.endswith(" us") for line in lines)


# --- Tables and pictures ---


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results directory of a small `vidur-ppo compare`."""
    out = tmp_path_factory.mktemp("comparison") / "results"
    schedulers = f"random,round_robin,lor,{PRIOR},{POLICY}"
    command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "compare", "--quick", "--jobs", "1", "--out", str(out)]
    command += ["--scenarios", "arxiv", "--schedulers", schedulers, "--reference", PRIOR]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600)
    return out


def test_tables_of_a_comparison(comparison: Path, tmp_path: Path) -> None:
    table = benchmark("tables.py", "table", str(comparison))
    assert list(table) == ["random", "lor", PRIOR, POLICY]
    assert_changes(table, seeds=1, at_least=12)
    path = tmp_path / "gains.png"
    against = f"random,{PRIOR}"
    picture = benchmark("tables.py", "picture", str(comparison), "--against", against, "--out", str(path))
    assert path.stat().st_size > 0 and picture["policy"] == POLICY and list(picture["gains"]) == ["random", PRIOR]
    assert_changes(picture, seeds=1, at_least=6)
    # With one seed there is no interval, so nothing is shown.
    requirements = benchmark("tables.py", "requirements", str(comparison), statuses=(1,))
    assert len(requirements["beats_vidur_not"]) == requirements["beats_vidur_of"] == 9
    assert len(requirements["never_worse_not"]) == requirements["never_worse_of"] == 4
    assert_changes(requirements["changes"], seeds=1, at_least=16)


def test_tables_name_what_is_not_there(comparison: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), "table", str(comparison), "--reference", "oracle"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "--reference" in done.stderr and "has no 'oracle'; it has random, round_robin" in done.stderr


@pytest.mark.parametrize("kind", ["preferences", "clusters", "trade-off"])
def test_results_beyond_compare(kind: str, tmp_path: Path) -> None:
    """They are made, continued, and read."""
    out, pictures = tmp_path / "results", tmp_path / "pictures"
    made = benchmark("make_results.py", kind, "--out", str(out), "--quick")
    if kind == "preferences":
        assert made["cells"] == 6  # two preferences and the prior, two seeds
        choice = benchmark("tables.py", "choose", str(out))
        assert list(choice["verdicts"]) == ["0", "0.8"]
        assert_changes(choice["changes"], seeds=2, at_least=8)
    elif kind == "clusters":
        assert 20 >= made["cells"] >= 10  # five schedulers; two seeds, and two more where it is open
        found = benchmark("tables.py", "requirements", str(out), statuses=(0, 1))
        assert (found["beats_vidur_of"], found["never_worse_of"]) == (9, 4)
        seeds = {entry["seeds"] for entry in entries_of(found["changes"])}
        assert seeds <= {2, 4}
    else:
        assert made["cells"] == 26  # two policies, nine heuristics, two settings of size_split; two seeds
        found = benchmark("tables.py", "trade-off", str(out), "--out", str(pictures))["mixed_long"]
        assert Path(found["picture"]).stat().st_size > 0
        assert [len(found[part]) for part in ("policies", "heuristics", "size_split")] == [2, 9, 2]
        assert_changes(found, seeds=2, at_least=26)


# --- What README and docs quote ---


def quoted_commands() -> list[tuple[str, str]]:
    """(file, its arguments) of each command with a benchmark in README and docs."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    joined = "\n".join(texts).replace("\\\n", " ")
    return re.findall(r"python benchmarks/(\w+\.py)([^\n`#]*)", joined)


def test_quoted_commands_exist() -> None:
    """The benchmark is there and has the options; that they run is tested above."""
    commands = quoted_commands()
    assert len(commands) > 20
    for file, arguments in commands:
        assert (BENCHMARKS / file).is_file(), file
        source = (BENCHMARKS / file).read_text() + (BENCHMARKS / "_reporting.py").read_text()
        for option in re.findall(r"--[a-z0-9][a-z0-9-]*", arguments):
            assert f'"{option}"' in source, f"{file}{arguments}"
