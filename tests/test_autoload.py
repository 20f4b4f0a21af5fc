"""The start-up hook in real processes: it loads plugins into Vidur, refuses what Vidur would silently replace,
and stays out of the way of everything else.

All processes run in a throw-away environment with our wheel, so the hook comes from the installed .pth file.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging_tools import (
    OUR_FLAGS,
    PACKAGE,
    PARSE_PROGRAM,
    ROOT,
    SMALL_RUN,
    Environment,
    installed_environment,
    make_environment,
)

from vidur_ppo_plugin import _autoload

TYPE_FLAGS = {  # each type flag of Vidur, and a misspelt value with what was meant
    "--global_scheduler_config_type": ("ppo_modularr", "ppo_modular"),
    "--execution_time_predictor_config_type": ("rooflin", "roofline"),
    "--replica_scheduler_config_type": ("saratti", "sarathi"),
    "--request_generator_config_type": ("sinthetic", "synthetic"),
    "--length_generator_config_type": ("zipff", "zipf"),
    "--interval_generator_config_type": ("poison", "poisson"),
}

Done = subprocess.CompletedProcess


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with our wheel."""
    return installed_environment(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The same environment without our package."""
    return make_environment(tmp_path_factory.mktemp("stock") / "environment")


@pytest.fixture(scope="module")
def vidur_help(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """`python -m vidur.main --help` with every import listed on standard error."""
    cwd = tmp_path_factory.mktemp("help")
    return environment.run("-X", "importtime", "-m", "vidur.main", "--help", cwd=cwd)


def parse(environment: Environment, cwd: Path, *flags: object, **environ: object) -> Done:
    """Only the command line of `vidur.main`: creates the output directory if nothing is refused."""
    return environment.run("-c", PARSE_PROGRAM, *flags, cwd=cwd, **environ)


def assert_refused(done: Done, cwd: Path, *parts: str) -> None:
    """Exit status 2, a message without a traceback, and nothing written."""
    assert done.returncode == 2, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert list(cwd.iterdir()) == []


# --- What gets imported ---


def imported_modules(done: Done) -> set[str]:
    """The modules that `-X importtime` lists."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_help_offers_our_flags_without_torch(vidur_help: Done) -> None:
    assert vidur_help.returncode == 0, vidur_help.stderr
    for flag in OUR_FLAGS:
        assert f"{flag} " in vidur_help.stdout
    modules = imported_modules(vidur_help)
    assert {"vidur.simulator", "vidur_ppo_plugin.sim.config_types"} <= modules
    assert "torch" not in modules


@pytest.mark.parametrize("scheduler", ["round_robin", "least_tokens"])
def test_simulations_that_learn_nothing_import_no_torch(
    environment: Environment, scheduler: str, tmp_path: Path
) -> None:
    arguments = ["-m", "vidur.main", "--global_scheduler_config_type", scheduler, *SMALL_RUN]
    done = environment.run("-X", "importtime", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("simulator_output/*/request_metrics.csv")
    assert len(table.read_text().splitlines()) == 1 + 10
    modules = imported_modules(done)
    assert "vidur.simulator" in modules
    assert "torch" not in modules
    is_announced = f"global scheduler {scheduler} is active on 2 replicas" in done.stdout + done.stderr
    assert is_announced == (scheduler == "least_tokens")


def test_an_unrelated_process_gets_two_small_modules(
    environment: Environment, stock: Environment, tmp_path: Path
) -> None:
    program = "import sys; print(*sorted(sys.modules))"
    with_us, without_us = (env.run("-c", program, cwd=tmp_path) for env in (environment, stock))
    assert (with_us.returncode, with_us.stderr) == (0, "")
    added = set(with_us.stdout.split()) - set(without_us.stdout.split())
    assert added - {"__future__"} == {PACKAGE, f"{PACKAGE}._autoload"}


# --- Ways to start Python ---

SAYS_IF_LOADED = """
import vidur.config
names = [config.__name__ for config in vidur.config.BaseGlobalSchedulerConfig.__subclasses__()]
print("PPOGlobalSchedulerModularConfig" in names)
"""


@pytest.mark.parametrize("option", ["-I", "-E", "-s", "-O"])
def test_options_of_the_interpreter(environment: Environment, option: str, tmp_path: Path) -> None:
    done = environment.run(option, "-c", SAYS_IF_LOADED, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


CHILDREN = """
import multiprocessing
import sys

def knows_our_config():
    import vidur.config
    names = [config.__name__ for config in vidur.config.BaseGlobalSchedulerConfig.__subclasses__()]
    return "PPOGlobalSchedulerModularConfig" in names

if __name__ == "__main__":
    assert "vidur" not in sys.modules  # the children must import it themselves
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.apply(knows_our_config), flush=True)
"""


def test_children_of_multiprocessing(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    done = environment.run("children.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["spawn True", "forkserver True", "fork True"], done.stderr


# --- The import hook ---

# Prints, after `import FIRST`, which of our types each registry that was imported does not know; then the same
# after importing all of Vidur.
REGISTRIES = """
import importlib, json, sys

def unknown_types():
    from vidur_ppo_plugin.sim import config_types
    unknown = {}
    for module, registry, types in (
        ("vidur.scheduler.global_scheduler.global_scheduler_registry", "GlobalSchedulerRegistry",
         config_types.PluginGlobalSchedulerType),
        ("vidur.execution_time_predictor.execution_time_predictor_registry", "ExecutionTimePredictorRegistry",
         config_types.PluginExecutionTimePredictorType),
        ("vidur.request_generator.request_length_generator_registry", "RequestLengthGeneratorRegistry",
         config_types.PluginRequestLengthGeneratorType),
        ("vidur.request_generator.request_interval_generator_registry", "RequestIntervalGeneratorRegistry",
         config_types.PluginRequestIntervalGeneratorType),
        ("vidur.request_generator.request_generator_registry", "RequestGeneratorRegistry",
         config_types.PluginRequestGeneratorType),
    ):
        if module in sys.modules:
            known = getattr(sys.modules[module], registry)._registry
            unknown[registry] = [str(member) for member in types if member not in known]
    return unknown

importlib.import_module(sys.argv[1])
if len(sys.argv) > 2:
    from vidur_ppo_plugin import _autoload
    _autoload.install()
first = unknown_types()
import vidur.simulator
print(json.dumps([first, unknown_types()]))
"""

FIRST_IMPORTS = {  # the registries that are there after each
    "vidur.scheduler": {"GlobalSchedulerRegistry"},
    "vidur.entities": set(),
    "vidur.execution_time_predictor": {"ExecutionTimePredictorRegistry"},
    "vidur_ppo_plugin.sim.config_types": set(),
    "vidur_ppo_plugin.sim.schedulers": {"GlobalSchedulerRegistry", "ExecutionTimePredictorRegistry"},
    "vidur.request_generator": {"RequestLengthGeneratorRegistry", "RequestIntervalGeneratorRegistry"},
    "vidur.simulator": {"GlobalSchedulerRegistry", "ExecutionTimePredictorRegistry"},
}
COMPLETE: dict[str, list[str]] = {
    "GlobalSchedulerRegistry": [],
    "ExecutionTimePredictorRegistry": [],
    "RequestLengthGeneratorRegistry": [],
    "RequestIntervalGeneratorRegistry": [],
    "RequestGeneratorRegistry": [],
}


@pytest.mark.parametrize(("first", "expected"), FIRST_IMPORTS.items())
def test_any_order_of_imports(environment: Environment, first: str, expected: set[str], tmp_path: Path) -> None:
    done = environment.run("-c", REGISTRIES, first, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    after_first, after_all = json.loads(done.stdout)
    assert expected <= set(after_first)
    assert not any(after_first.values()), after_first
    assert after_all == COMPLETE


def test_installing_the_hook_after_vidur_was_imported(stock: Environment, tmp_path: Path) -> None:
    """From a checkout on PYTHONPATH nothing is loaded at start-up."""
    done = stock.run("-c", REGISTRIES, "vidur.simulator", "install", cwd=tmp_path, PYTHONPATH=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [COMPLETE, COMPLETE]


HOOK = """
import inspect, json, sys
from vidur_ppo_plugin import _autoload

_autoload.install()
_autoload.install()
import vidur.simulator

modules = [sys.modules[name] for name in sorted(_autoload._WATCHED)]
print(json.dumps({
    "finders": sum(type(finder).__module__ == _autoload.__name__ for finder in sys.meta_path),
    "loaders": [type(module.__loader__).__name__ for module in modules],
    "same": [module.__loader__ is module.__spec__.loader for module in modules],
    "sources": [len(inspect.getsource(module)) > 0 for module in modules],
    "checks": len(_autoload.command_line_checks),
}))
"""


def test_the_hook_is_there_once_and_leaves_modules_as_they_were(environment: Environment, tmp_path: Path) -> None:
    done = environment.run("-c", HOOK, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "finders": 1,
        "loaders": ["SourceFileLoader"] * 6,
        "same": [True] * 6,
        "sources": [True] * 6,
        "checks": 1,
    }


def test_own_types_are_those_that_we_register() -> None:
    _autoload.install()
    from vidur_ppo_plugin.sim import config_types

    enums = [value for name, value in vars(config_types).items() if name.startswith("Plugin")]
    assert sorted(_autoload.OWN_TYPES) == sorted(str(member) for enum in enums for member in enum)


# --- The switch VIDUR_PLUGINS ---


@pytest.mark.parametrize("switch", ["", "none", " none ", ","])
def test_the_switch_turns_loading_off(environment: Environment, switch: str, tmp_path: Path) -> None:
    done = parse(environment, tmp_path, "--help", VIDUR_PLUGINS=switch)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--global_scheduler_config_type " in done.stdout
    for flag in OUR_FLAGS:
        assert flag not in done.stdout


def test_stock_runs_are_untouched_when_off(environment: Environment, tmp_path: Path) -> None:
    done = parse(environment, tmp_path, "--global_scheduler_config_type", "round_robin", VIDUR_PLUGINS="")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "simulator_output").is_dir()  # so its absence elsewhere means something


@pytest.mark.parametrize(
    "arguments",
    [
        ["--global_scheduler_config_type", "ppo_modular"],
        ["--global_scheduler_config_type=ppo_modular"],
        ["--global_scheduler_config_type", "PPO_Modular"],
        ["--global_scheduler_config_ty", "ppo_modular"],  # argparse accepts abbreviations
        ["--p_p_o_global_scheduler_modular_config_seed", "1", "--global_scheduler_config_type", "ppo_modular"],
        ["--execution_time_predictor_config_type", "roofline"],
    ],
    ids=" ".join,
)
def test_our_types_are_refused_when_off(environment: Environment, arguments: list[str], tmp_path: Path) -> None:
    done = parse(environment, tmp_path, *arguments, VIDUR_PLUGINS="")
    flag = "--execution_time_predictor_config_type" if "roofline" in arguments else "--global_scheduler_config_type"
    value = arguments[-1].rpartition("=")[2]
    assert_refused(done, tmp_path, f"error: {flag} {value} needs the plugin 'vidur_ppo'", "VIDUR_PLUGINS=''")


def test_vidur_main_refuses_our_types_when_off(environment: Environment, tmp_path: Path) -> None:
    arguments = ["-m", "vidur.main", "--global_scheduler_config_type", "ppo_modular"]
    done = environment.run(*arguments, cwd=tmp_path, VIDUR_PLUGINS="none")
    assert_refused(done, tmp_path, "--global_scheduler_config_type ppo_modular needs", "VIDUR_PLUGINS='none'")


def test_an_unknown_plugin_is_reported_with_those_installed(environment: Environment, tmp_path: Path) -> None:
    done = parse(environment, tmp_path, "--help", VIDUR_PLUGINS="vidur_ppo, vidur_pppo")
    warning = "warning: VIDUR_PLUGINS names the plugin 'vidur_pppo', which is not installed (installed: vidur_ppo)\n"
    assert (done.returncode, done.stderr) == (0, warning)
    assert OUR_FLAGS[0] in done.stdout


# --- What is refused before anything is written ---


def test_all_type_flags_of_vidur_are_covered(vidur_help: Done) -> None:
    words = vidur_help.stdout.partition("options:")[2].split()
    assert {word for word in words if word.startswith("--") and word.endswith("_config_type")} == set(TYPE_FLAGS)


@pytest.mark.parametrize("flag", TYPE_FLAGS)
def test_unknown_types(environment: Environment, flag: str, tmp_path: Path) -> None:
    wrong, meant = TYPE_FLAGS[flag]
    done = parse(environment, tmp_path, flag, wrong)
    assert_refused(done, tmp_path, f"error: {flag}: unknown type {wrong!r} (did you mean {meant!r}?); valid types: ")
    assert meant in done.stderr.partition("valid types: ")[2].strip().split(", ")


def test_vidur_main_names_every_unknown_type(environment: Environment, tmp_path: Path) -> None:
    arguments = [f"{flag}={wrong}" for flag, (wrong, _) in TYPE_FLAGS.items()]
    done = environment.run("-m", "vidur.main", *arguments, cwd=tmp_path)
    assert_refused(done, tmp_path, *(f"error: {flag}: unknown type {w!r}" for flag, (w, _) in TYPE_FLAGS.items()))


SPEEDS = "--roofline_execution_time_predictor_config_replica_speed_factors"
CONTEXT_WEIGHT = "--least_tokens_global_scheduler_config_context_weight"
NUM_LONG = "--size_split_global_scheduler_config_num_long_replicas"
BAD_VALUES = [
    ("roofline", [SPEEDS, "1", "2", "3"], f"{SPEEDS} must have one value per replica (4) or a pattern", "got 3 values"),
    ("roofline", [SPEEDS, *"11111"], f"{SPEEDS} must have one value per replica (4) or a pattern", "got 5 values"),
    ("roofline", [SPEEDS, "1", "0"], f"{SPEEDS} must be > 0", "got 0.0"),
    ("roofline", [SPEEDS, "-1"], f"{SPEEDS} must be > 0", "got -1.0"),
    ("roofline", [SPEEDS, "nan"], f"{SPEEDS} must be > 0", "got nan"),
    ("roofline", [SPEEDS, "inf"], f"{SPEEDS} must be > 0", "got inf"),
    ("size_split", [NUM_LONG, "4"], f"{NUM_LONG} must be smaller than the number of replicas (4)", "got 4"),
    ("size_split", [NUM_LONG, "0"], f"{NUM_LONG} must be >= 1", "got 0"),
    ("least_tokens", [CONTEXT_WEIGHT, "-0.5"], f"{CONTEXT_WEIGHT} must be >= 0", "got -0.5"),
    ("least_tokens", [CONTEXT_WEIGHT, "nan"], f"{CONTEXT_WEIGHT} must be >= 0", "got nan"),
    (
        "ppo_modular",
        ["--p_p_o_global_scheduler_modular_config_prior", "random"],
        "--p_p_o_global_scheduler_modular_config_prior must be one of none, least_outstanding, ",
        "got 'random'",
    ),
    ("round_robin", ["--cluster_config_num_replicas", "0"], "--cluster_config_num_replicas must be >= 1", "got 0"),
]


@pytest.mark.parametrize(
    ("type_name", "arguments", "range_", "got"), BAD_VALUES, ids=[f"{case[0]} {case[1]}" for case in BAD_VALUES]
)
def test_bad_values(
    environment: Environment, type_name: str, arguments: list[str], range_: str, got: str, tmp_path: Path
) -> None:
    kind = "execution_time_predictor" if type_name == "roofline" else "global_scheduler"
    types = [f"--{kind}_config_type", type_name, "--cluster_config_num_replicas", "4"]
    assert_refused(parse(environment, tmp_path, *types, *arguments), tmp_path, f"error: {range_}", got)


def test_bad_values_of_types_that_are_not_chosen_do_not_matter(environment: Environment, tmp_path: Path) -> None:
    done = parse(environment, tmp_path, "--global_scheduler_config_type", "round_robin", CONTEXT_WEIGHT, "-1")
    assert (done.returncode, done.stderr) == (0, "")


# --- Plugins of others ---

HEALTHY = """
import sys

def register():
    import third_party_config
    registry = "vidur.scheduler.global_scheduler.global_scheduler_registry"
    print("third_party called", registry in sys.modules, file=sys.stderr)
"""
HEALTHY_CONFIG = """
from dataclasses import dataclass, field
from vidur.config import BaseGlobalSchedulerConfig
from vidur.types import BaseIntEnum

class ThirdPartyType(BaseIntEnum):
    THIRD_PARTY = 7001

@dataclass
class ThirdPartyGlobalSchedulerConfig(BaseGlobalSchedulerConfig):
    knob: int = field(default=3, metadata={"help": "A knob."})

    @staticmethod
    def get_type():
        return ThirdPartyType.THIRD_PARTY
"""


@pytest.fixture
def third_party(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with an installed plugin of someone else."""
    folder = tmp_path / "third_party"
    dist_info = folder / "third_party-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text("[vidur.plugins]\nthird_party = third_party_plugin:register\n")
    (folder / "third_party_plugin.py").write_text(HEALTHY)
    (folder / "third_party_config.py").write_text(HEALTHY_CONFIG)
    return folder


def test_the_plugin_of_another_is_called_in_both_phases(
    environment: Environment, third_party: Path, tmp_path: Path
) -> None:
    done = environment.run("-m", "vidur.main", "--help", cwd=tmp_path, PYTHONPATH=third_party)
    assert done.returncode == 0, done.stderr
    assert "--third_party_global_scheduler_config_knob " in done.stdout
    assert OUR_FLAGS[0] in done.stdout
    calls = done.stderr.splitlines()
    assert calls[0] == "third_party called False"  # after vidur.config
    assert "third_party called True" in calls[1:]  # after a registry


@pytest.mark.parametrize(
    ("switch", "has_theirs", "has_ours"),
    [("third_party", True, False), ("vidur_ppo", False, True), ("third_party , vidur_ppo", True, True)],
)
def test_the_switch_restricts_what_is_loaded(
    environment: Environment, third_party: Path, switch: str, has_theirs: bool, has_ours: bool, tmp_path: Path
) -> None:
    done = parse(environment, tmp_path, "--help", PYTHONPATH=third_party, VIDUR_PLUGINS=switch)
    assert done.returncode == 0, done.stderr
    assert ("--third_party_global_scheduler_config_knob " in done.stdout) == has_theirs
    assert (OUR_FLAGS[0] in done.stdout) == has_ours


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('no luck')", "def register():\n    raise RuntimeError('no luck')"]
)
def test_the_broken_plugin_of_another_is_reported_once_and_skipped(
    environment: Environment, third_party: Path, text: str, tmp_path: Path
) -> None:
    (third_party / "third_party_plugin.py").write_text(text)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    program = f"import vidur.simulator; {PARSE_PROGRAM}"  # all three calls, then the command line
    arguments = ["--global_scheduler_config_type", "least_tokens"]
    done = environment.run("-c", program, *arguments, cwd=cwd, PYTHONPATH=third_party)
    warning = "warning: Vidur plugin 'third_party' failed to load and is skipped: RuntimeError('no luck')\n"
    assert (done.returncode, done.stderr) == (0, warning)
    assert (cwd / "simulator_output").is_dir()


# --- Our own plugin, broken ---


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    return folder


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with our package, whose plugin module fails."""
    folder = tmp_path / "broken"
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / PACKAGE / "plugin.py").write_text("raise RuntimeError('broken on purpose')\n")
    return folder


def test_a_broken_plugin_does_not_disturb_others(environment: Environment, broken: Path, cwd: Path) -> None:
    program = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    done = environment.run("-c", program, cwd=cwd, PYTHONPATH=broken)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(broken / PACKAGE / "__init__.py")  # it is the broken one that was loaded


def test_a_broken_plugin_is_reported(environment: Environment, broken: Path, cwd: Path) -> None:
    done = environment.run("-m", "vidur.main", "--help", cwd=cwd, PYTHONPATH=broken)
    warning = "warning: Vidur plugin 'vidur_ppo' failed to load and is skipped: RuntimeError('broken on purpose')\n"
    assert (done.returncode, done.stderr) == (0, warning)
    assert "--global_scheduler_config_type " in done.stdout


@pytest.mark.parametrize("flag", ["--global_scheduler_config_type", "--global_scheduler_config_t"])
def test_a_run_that_needs_the_broken_plugin_stops(environment: Environment, broken: Path, flag: str, cwd: Path) -> None:
    done = parse(environment, cwd, flag, "ppo_modular", PYTHONPATH=broken)
    need = "error: --global_scheduler_config_type ppo_modular needs the plugin 'vidur_ppo'"
    assert_refused(done, cwd, f"{need}, but it failed to load: RuntimeError('broken on purpose')")


@pytest.fixture
def broken_hook(environment: Environment) -> Iterator[Environment]:
    """The environment with a start-up file whose module cannot even be compiled."""
    hook = environment.site_packages / PACKAGE / "_autoload.py"
    text = hook.read_text()
    hook.write_text("this is no Python\n")
    yield environment
    hook.write_text(text)


def test_a_broken_hook_does_not_disturb_others(broken_hook: Environment, cwd: Path) -> None:
    done = broken_hook.run("-c", "print('undisturbed')", cwd=cwd)
    assert (done.returncode, done.stdout, done.stderr) == (0, "undisturbed\n", "")
    done = parse(broken_hook, cwd, "--global_scheduler_config_type", "round_robin")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--global_scheduler_config_type", "ppo_modular"],
        ["--global_scheduler_config_type=PPO_MODULAR"],
        ["--execution_time_predictor_config_type", "roofline"],
    ],
    ids=" ".join,
)
def test_a_run_that_needs_the_broken_hook_stops(broken_hook: Environment, arguments: list[str], cwd: Path) -> None:
    done = broken_hook.run("-m", "vidur.main", *arguments, cwd=cwd)
    assert_refused(done, cwd, "error: vidur-ppo-plugin is installed but failed to load: SyntaxError(")
