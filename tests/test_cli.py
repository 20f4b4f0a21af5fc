"""`vidur-ppo`: how YAML files and overrides become Vidur's command line, what is refused, and what the doctor says."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging_tools import ROOT, run_python
from vidur.config import SimulationConfig
from vidur.config.flat_dataclass import create_flat_dataclass

from vidur_ppo_plugin import __version__, _autoload, cli
from vidur_ppo_plugin.sim.flags import known_flags

SEED = "synthetic_request_generator_config_seed"
SPEEDS = "roofline_execution_time_predictor_config_replica_speed_factors"
NUM_REQUESTS = ("--synthetic_request_generator_config_num_requests", "20")


@pytest.fixture(scope="module", autouse=True)
def our_flags_are_known() -> None:
    _autoload.install()


def printed_command(*arguments: object) -> list[str]:
    """What `vidur-ppo run … --print` prints, taken apart as a shell would."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert cli.main(["run", *map(str, arguments), "--print"]) == 0
    return shlex.split(stdout.getvalue())


def vidur_parses(command: list[str]) -> Any:
    """The values that Vidur's own parser takes from `python -m vidur.main …`."""
    assert command[:3] == ["python", "-m", "vidur.main"]
    saved, sys.argv = sys.argv, command[2:]
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return create_flat_dataclass(SimulationConfig).create_from_cli_args()
    except SystemExit:
        raise AssertionError(f"Vidur refuses {command}: {stderr.getvalue().splitlines()[-1]}") from None
    finally:
        sys.argv = saved


def run_cli(cwd: Path, *arguments: object, **environ: object) -> subprocess.CompletedProcess[str]:
    return run_python(sys.executable, "-m", "vidur_ppo_plugin.cli", *arguments, cwd=cwd, **environ)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_text(text: str) -> Path:
        path = tmp_path / "flags.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


# --- From files and overrides to a command line ---


EMBEDDED = ROOT / "vidur_ppo_plugin" / cli.EMBEDDED_DEFAULT


def test_without_a_file_the_embedded_default_is_expanded() -> None:
    assert printed_command() == printed_command(EMBEDDED)


@pytest.mark.parametrize("path", [EMBEDDED, *sorted((ROOT / "configs").glob("*.y*ml"))], ids=lambda path: path.name)
def test_every_shipped_file_expands(path: Path) -> None:
    """Vidur reads every flag of the file back from the printed command, with the file's value."""
    flags = yaml.safe_load(path.read_text(encoding="utf-8"))
    parsed = vidur_parses(printed_command(path))
    for name, value in flags.items():
        read_back = getattr(parsed, name)
        assert read_back == value or str(read_back) == str(value), name  # dates and numbers may fill text flags


def test_overrides_win(write: Callable[[str], Path]) -> None:
    path = write(f"{SEED}: 1\ncluster_config_num_replicas: 4\nmetrics_config_store_plots: false\n{SPEEDS}: [0.5]\n")
    overrides = [f"--{SEED}", "2", "--cluster_config_num_replicas=3", f"--{SPEEDS}", "1", "2", "3"]
    parsed = vidur_parses(printed_command(path, *overrides, "--metrics_config_store_plots"))
    assert getattr(parsed, SEED) == 2
    assert parsed.cluster_config_num_replicas == 3
    assert parsed.metrics_config_store_plots is True
    assert getattr(parsed, SPEEDS) == [1.0, 2.0, 3.0]


def test_print_may_stand_anywhere(write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, override = str(write(f"{SEED}: 1")), [f"--{SEED}", "2"]
    outputs = []
    for arguments in (["--print", path, *override], [path, "--print", *override], [path, *override, "--print"]):
        assert cli.main(["run", *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs == [f"python -m vidur.main --{SEED} 1 --{SEED} 2\n"] * 3


def test_values_of_every_kind(write: Callable[[str], Path]) -> None:
    path = write(
        f"""
        metrics_config_store_plots: false
        metrics_config_write_metrics: true
        {SPEEDS}: [1, 0.5]
        seed: 7
        poisson_request_interval_generator_config_qps: 1.5e-3
        least_tokens_global_scheduler_config_context_weight: 1e-4
        trace_request_generator_config_date: 2023-11-16
        replica_config_model_name: "a name with 'quotes' and $blanks"
        """
    )
    command = printed_command(path)
    assert command[3:] == [
        "--no-metrics_config_store_plots",
        "--metrics_config_write_metrics",
        *(f"--{SPEEDS}", "1", "0.5"),
        *("--seed", "7"),
        *("--poisson_request_interval_generator_config_qps", "0.0015"),
        *("--least_tokens_global_scheduler_config_context_weight", "0.0001"),
        *("--trace_request_generator_config_date", "2023-11-16"),
        *("--replica_config_model_name", "a name with 'quotes' and $blanks"),
    ]
    assert vidur_parses(command).trace_request_generator_config_date == "2023-11-16"


# --- The round trip, for any flags and values ---

FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.one_of(FINITE, st.sampled_from([float("inf"), float("-inf"), -1e-5, 3])),
    str: st.one_of(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.from_regex(r"\A-{1,2}\w+=?\Z")),
}
ITEMS = {**VALUES, float: FINITE}


def value_of(flag_type: Any) -> st.SearchStrategy[Any]:
    if getattr(flag_type, "__origin__", None) is list:
        return st.lists(ITEMS[flag_type.__args__[0]], min_size=1, max_size=4)
    return VALUES[flag_type]


@st.composite
def some_flags(draw: st.DrawFn) -> dict[str, Any]:
    # Not the types (few values are valid), nor the number of replicas (checked): both have tests of their own.
    known = {n: t for n, t in known_flags().items() if not n.endswith(("_config_type", "num_replicas"))}
    names = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=8))
    lists = [name for name in known if name not in names and getattr(known[name], "__origin__", None) is list]
    names.append(draw(st.sampled_from(sorted(lists))))
    return {name: draw(value_of(known[name])) for name in names}


@settings(max_examples=40, deadline=None)
@given(flags=some_flags())
def test_vidur_reads_back_what_the_file_says(flags: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "flags.yaml")
        path.write_text(yaml.safe_dump(flags, allow_unicode=True), encoding="utf-8")
        parsed = vidur_parses(printed_command(path))
    for name, value in flags.items():
        assert getattr(parsed, name) == value, name


# --- What is refused: exit status 2, one sentence that names the file and the key ---

REFUSED = {
    "an unknown key": (f"{SEED}: 1\ncluster_config_num_replica: 4", "'cluster_config_num_replicas'"),
    "a key that is no text": ("1: 2", "unknown flag 1"),
    "text for an int": (f"{SEED}: many", f"flag '{SEED}' must be of type int, got 'many'"),
    "a fraction for an int": (f"{SEED}: 1.5", f"flag '{SEED}' must be of type int, got 1.5"),
    "infinity for an int": (f"{SEED}: .inf", f"flag '{SEED}' must be of type int, got inf"),
    "true for an int": (f"{SEED}: true", f"flag '{SEED}' must be of type int, got True"),
    "a list for an int": (f"{SEED}: [1]", f"flag '{SEED}' must be of type int, got [1]"),
    "text for a float": (
        "poisson_request_interval_generator_config_qps: fast",
        "flag 'poisson_request_interval_generator_config_qps' must be of type float, got 'fast'",
    ),
    "a number for a bool": (
        "metrics_config_store_plots: 1",
        "flag 'metrics_config_store_plots' must be true or false, got 1",
    ),
    "text for a bool": (
        "metrics_config_store_plots: 'false'",
        "flag 'metrics_config_store_plots' must be true or false, got 'false'",
    ),
    "true for text": ("replica_config_device: yes", "flag 'replica_config_device' must be of type str, got True"),
    "a single value for a list": (f"{SPEEDS}: 1.0", f"flag '{SPEEDS}' must be a list"),
    "an empty list": (f"{SPEEDS}: []", f"flag '{SPEEDS}' must be a list with at least one value, got []"),
    "text in a list of numbers": (f"{SPEEDS}: [1, fast]", f"flag '{SPEEDS}' must be of type float, got 'fast'"),
    "no value": (f"{SEED}:", f"flag '{SEED}' has no value"),
    "broken YAML": (f"{SEED}: [1", "is not YAML"),
    "an empty file": ("", "must be a mapping of flags to values, got NoneType"),
    "a list of flags": (f"- {SEED}", "must be a mapping of flags to values, got list"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_files(
    text: str, reason: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    assert cli.main(["run", str(path), "--print"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}: ")
    assert reason in captured.err


def test_an_unknown_key_is_named_with_the_nearest(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("cluster_config_num_replica: 4")
    assert cli.main(["run", str(path)]) == 2
    expected = "unknown flag 'cluster_config_num_replica' (did you mean 'cluster_config_num_replicas'?)"
    assert capsys.readouterr().err == f"error: {path}: {expected}\n"


@pytest.mark.parametrize("name", ["missing.yaml", ".", "latin1.yaml"])
def test_unreadable_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin1.yaml").write_bytes("replica_config_device: é".encode("latin-1"))
    path = f"{tmp_path}/{name}"
    assert cli.main(["run", path]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: cannot be read: ")


OVERRIDES = {
    "--sed": "unknown flag '--sed' (did you mean '--seed'?)",
    "--sed=1": "unknown flag '--sed' (did you mean '--seed'?)",
    "--no-seed": "unknown flag '--no-seed'",
    "--metrics_config_store_plot": "(did you mean '--metrics_config_store_plots'?)",
    "--no-metrics_config_store_plot": "unknown flag '--no-metrics_config_store_plot' (did you mean",
}


@pytest.mark.parametrize(("override", "reason"), OVERRIDES.items())
def test_unknown_overrides(override: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", override, "--print"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err


def test_a_second_file_is_refused(write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(write(f"{SEED}: 1")), "another.yaml", "--print"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'another.yaml'" in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"vidur-ppo-plugin {__version__}\n"


# --- The real command ---


def test_the_printed_command_and_run_simulate_the_same(tmp_path: Path) -> None:
    printed, ran = tmp_path / "printed", tmp_path / "ran"
    printed.mkdir()
    ran.mkdir()
    arguments = [*NUM_REQUESTS, "--global_scheduler_config_type", "power_of_two"]
    shown = run_cli(tmp_path, "run", *arguments, "--print")
    python, *command = shlex.split(shown.stdout)
    assert (shown.returncode, shown.stderr, python) == (0, "", "python")

    by_hand = run_python(sys.executable, *command, cwd=printed)
    by_us = run_cli(ran, "run", *arguments)

    assert by_hand.returncode == 0, by_hand.stderr
    assert by_us.returncode == 0, by_us.stderr
    assert "scheduler power_of_two, 20 of 20 requests completed on 4 replicas" in by_us.stdout
    (table_by_hand,) = printed.glob("simulator_output/*/request_metrics.csv")
    (table_by_us,) = ran.glob("simulator_output/*/request_metrics.csv")
    assert len(table_by_us.read_text().splitlines()) == 1 + 20
    assert table_by_us.read_text() == table_by_hand.read_text()


def test_a_refused_value_leaves_no_output(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "run", "--p_p_o_global_scheduler_modular_config_prior_weight", "-1")
    assert done.returncode == 2
    assert "--p_p_o_global_scheduler_modular_config_prior_weight must be >= 0, got -1.0" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_the_main_job_healthy(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vidur-ppo-plugin {__version__}, Python {sys.version.split()[0]}" in done.stdout
    for package in ("vidur", "torch", "numpy", "PyYAML"):
        assert re.search(rf"ok +{package} +\d+\.\d", done.stdout), package
    assert "loaded at start-up, `python -m vidur.main` knows our types" in done.stdout
    assert done.stdout.endswith("The main job can run: vidur-ppo run\n")
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_the_switch_that_turns_us_off(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "doctor", VIDUR_PLUGINS="")
    assert done.returncode == 1
    assert "VIDUR_PLUGINS='' keeps the plugin 'vidur_ppo' from loading" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_tells_another_vidur_from_a_missing_one(tmp_path: Path) -> None:
    """As cloned from GitHub: pip knows nothing of it, and it lacks what we build on."""
    other = tmp_path / "clone" / "vidur" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("")
    path = os.pathsep.join((str(tmp_path / "clone"), str(ROOT)))
    done = run_cli(tmp_path, "doctor", PYTHONPATH=path)
    assert done.returncode == 1
    assert f"WRONG vidur is imported from {other.parent}\n" in done.stdout
    assert f"the Vidur in {other.parent} is not PyPI's" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
