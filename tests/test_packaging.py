"""Real installs into throw-away environments: every way to install loads the plugin, uninstalling leaves nothing."""

import base64
import hashlib
import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging_tools import (
    OUR_FLAGS,
    PACKAGE,
    ROOT,
    SMALL_RUN,
    START_UP_FILES,
    Environment,
    build_wheel,
    copy_source,
    make_environment,
    run_python,
)

WAYS_TO_INSTALL = ("wheel", "plain", "editable", "editable_strict")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_source(directory / "source"), directory / "wheels")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Vidur without our package."""
    return make_environment(tmp_path_factory.mktemp("stock") / "environment")


@dataclass
class Life:
    """What was seen from installing to uninstalling."""

    way: str
    installed: list[str]
    record: dict[str, str | None]  # each file with its hash
    start_up_hashes: dict[str, str]  # of the start-up files as they lie there
    help_installed: subprocess.CompletedProcess[str]
    left_over: list[str]
    pointing_to_source: list[str]
    help_uninstalled: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module", params=WAYS_TO_INSTALL)
def life(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    directory = tmp_path_factory.mktemp(request.param)
    unrelated = directory / "unrelated"
    unrelated.mkdir()
    environment = make_environment(directory / "environment")
    source = copy_source(directory / "source")
    arguments = {
        "wheel": [wheel],
        "plain": [source],
        "editable": ["-e", source],
        "editable_strict": ["-e", source, "--config-settings", "editable_mode=strict"],
    }[request.param]

    environment.install(*arguments)
    installed = environment.entries_of_ours()
    (dist_info,) = environment.site_packages.glob(f"{PACKAGE}-*.dist-info")
    files = PathDistribution(dist_info).files or []
    record = {str(file): file.hash.value if file.hash else None for file in files}
    start_up_hashes = {name: _hash(environment.site_packages / name) for name in START_UP_FILES}
    help_installed = environment.run("-m", "vidur.main", "--help", cwd=unrelated)

    environment.pip("uninstall", "--yes", "vidur-ppo-plugin")
    return Life(
        way=request.param,
        installed=installed,
        record=record,
        start_up_hashes=start_up_hashes,
        help_installed=help_installed,
        left_over=environment.entries_of_ours(),
        pointing_to_source=_files_naming(environment, str(source)),
        help_uninstalled=environment.run("-m", "vidur.main", "--help", cwd=unrelated),
    )


def _hash(path: Path) -> str:
    """As RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _files_naming(environment: Environment, text: str) -> list[str]:
    files = [path for entry in environment.own_entries() for path in [entry, *entry.rglob("*")] if path.is_file()]
    return [str(path) for path in files if text.encode() in path.read_bytes()]


def test_start_up_files_are_installed_and_recorded(life: Life) -> None:
    installed = {Path(entry).name for entry in life.installed}
    assert set(START_UP_FILES) <= installed
    # With hashes: pip adds files that a wheel's RECORD lacks, but without; other installers refuse such a wheel.
    assert {name: life.record.get(name) for name in START_UP_FILES} == life.start_up_hashes
    assert "vidur-ppo" in installed  # the command


def test_vidur_offers_our_flags(life: Life) -> None:
    assert life.help_installed.returncode == 0, life.help_installed.stderr
    assert life.help_installed.stderr == ""
    for flag in OUR_FLAGS:
        assert f"{flag} " in life.help_installed.stdout


def test_uninstalling_leaves_nothing(life: Life) -> None:
    assert life.left_over == []
    assert life.pointing_to_source == []


def test_vidur_works_after_uninstalling(life: Life) -> None:
    assert life.help_uninstalled.returncode == 0, life.help_uninstalled.stderr
    assert life.help_uninstalled.stderr == ""
    assert "--global_scheduler_config_type " in life.help_uninstalled.stdout
    for flag in OUR_FLAGS:
        assert flag not in life.help_uninstalled.stdout


def test_editable_installs_add_a_path_and_no_import_finder(life: Life) -> None:
    """setuptools' finder would cost every interpreter start several times what our hook does."""
    if life.way == "editable":
        assert any(entry.endswith(".pth") and "__editable__" in entry for entry in life.installed)
    assert not [entry for entry in life.installed if entry.endswith("_finder.py")]


def test_the_installed_command_simulates(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment")
    environment.install(wheel)
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()

    done = environment.run(environment.scripts / "vidur-ppo", "run", *SMALL_RUN, cwd=unrelated)

    assert done.returncode == 0, done.stderr
    assert "scheduler ppo_modular, 10 of 10 requests completed on 2 replicas" in done.stdout
    assert len(list(unrelated.glob("simulator_output/*/request_metrics.csv"))) == 1

    program = "from vidur_ppo_plugin.scenario import load_scenario; print(load_scenario('chat').qps > 0)"
    done = environment.run("-c", program, cwd=unrelated)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_contents_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.py")}
    assert sources <= names
    assert {f"{PACKAGE}/pretrained/pretrained{suffix}" for suffix in (".ckpt", ".npz", ".json")} <= names
    assert {f"{PACKAGE}/quickstart.yaml", f"{PACKAGE}/py.typed", *START_UP_FILES} <= names
    scenarios = {f"{PACKAGE}/scenarios/{path.name}" for path in (ROOT / "configs" / "scenarios").glob("*.yaml")}
    assert scenarios and scenarios <= names
    assert [name for name in names if name.endswith("/LICENSE")]
    top_level = {name.split("/")[0] for name in names}
    (dist_info,) = (name for name in top_level if name.endswith(".dist-info"))
    assert top_level == {PACKAGE, dist_info, *START_UP_FILES}  # no tests, no benchmarks, no configs


def test_a_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    done = run_python(sys.executable, "-c", program, tmp_path, cwd=source)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if "/tests" in name]

    again = build_wheel(archive, tmp_path / "wheels")

    with zipfile.ZipFile(wheel) as expected, zipfile.ZipFile(again) as actual:
        assert sorted(actual.namelist()) == sorted(expected.namelist())


def test_a_target_folder_needs_our_own_main(wheel: Path, stock: Environment, tmp_path: Path) -> None:
    """`pip install --target` with PYTHONPATH: Python reads no .pth there."""
    target = tmp_path / "target"
    stock.install("--target", target, wheel)
    assert (target / START_UP_FILES[0]).exists()

    vidur_main = stock.run("-m", "vidur.main", "--help", cwd=tmp_path, PYTHONPATH=target)
    own_main = stock.run("-m", PACKAGE, "--help", cwd=tmp_path, PYTHONPATH=target)

    assert (vidur_main.returncode, own_main.returncode) == (0, 0), own_main.stderr
    assert own_main.stdout.startswith(f"usage: python -m {PACKAGE} ")
    for flag in OUR_FLAGS:
        assert flag not in vidur_main.stdout
        assert flag in own_main.stdout


def test_doctor_reports_from_a_bare_checkout(stock: Environment, tmp_path: Path) -> None:
    """On PYTHONPATH there is neither a start-up file nor metadata; `vidur-ppo run` works all the same."""
    source = copy_source(tmp_path / "source")
    done = stock.run("-m", f"{PACKAGE}.cli", "doctor", cwd=tmp_path, PYTHONPATH=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "NOT loaded at start-up" in line)
    assert f"`python -m {PACKAGE}`" in line


def test_the_start_file_names_a_function(wheel: Path) -> None:
    """Python 3.15 and later read `vidur_ppo_plugin.start` (PEP 829): lines of `module:function`."""
    with zipfile.ZipFile(wheel) as archive:
        (line,) = archive.read(START_UP_FILES[1]).decode().splitlines()
    module, _, function = line.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_extras(metadata: Message) -> None:
    assert {"test", "dev", "ray", "serve", "tensorboard"} <= set(metadata.get_all("Provides-Extra"))


def test_constraints_are_exact_and_satisfy_our_ranges(metadata: Message) -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {}
    for line in filter(None, lines):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^=*<>!~,;\s]+)", line)
        assert match is not None, f"constraints.txt: {line!r} is not an exact pin"
        assert match[1].lower() not in pins, f"constraints.txt pins {match[1]} twice"
        pins[match[1].lower()] = match[2]
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    needed = {r.name.lower(): r.specifier for r in required if r.marker is None}
    assert "vidur" in pins and "vidur" in needed
    for name in pins.keys() & needed.keys():
        assert needed[name].contains(pins[name]), f"constraints.txt: {name}=={pins[name]} is not {needed[name]}"
