"""Throw-away environments with Vidur and our dependencies in them, but not our package; and ways to install it.

Nothing is downloaded or copied: what the running interpreter has in site-packages is linked into the new one.
"""

import ensurepip
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vidur_ppo_plugin"
START_UP_FILES = (f"{PACKAGE}.pth", f"{PACKAGE}.start")
SOURCE_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "constraints.txt", "MANIFEST.in")

# One flag each of the scheduler, of a baseline and of the predictor.
OUR_FLAGS = (
    "--p_p_o_global_scheduler_modular_config_seed",
    "--least_tokens_global_scheduler_config_seed",
    "--roofline_execution_time_predictor_config_replica_speed_factors",
)

# The first statement of `vidur.main`: all of its command line in a tenth of its import time.
PARSE_PROGRAM = "from vidur.config import SimulationConfig; SimulationConfig.create_from_cli_args()"

# A simulation that takes well under a second and needs no download.
SMALL_RUN = (
    *("--execution_time_predictor_config_type", "roofline"),
    *("--replica_config_model_name", "meta-llama/Llama-3-8B"),
    *("--replica_config_device", "a100"),
    *("--replica_config_network_device", "a100_dgx"),
    *("--replica_scheduler_config_type", "sarathi"),
    *("--cluster_config_num_replicas", "2"),
    *("--synthetic_request_generator_config_num_requests", "10"),
    *("--no-metrics_config_store_plots", "--no-metrics_config_enable_chrome_trace"),
)


def clean_environ(**changes: object) -> dict[str, str]:
    """The environment variables without those that change what Python imports or what we load."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIDUR_", "WANDB_"))}
    return {**environ, "HF_HUB_OFFLINE": "1", **{name: str(value) for name, value in changes.items()}}


def run_python(
    python: Path | str, *arguments: object, cwd: Path, **environ: object
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end; its exit status is the caller's to judge."""
    command = [str(python), *map(str, arguments)]
    variables = clean_environ(**environ)
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=120)


@dataclass(frozen=True)
class Environment:
    """A virtual environment on disk."""

    root: Path

    @property
    def scripts(self) -> Path:
        return self.root / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.scripts / "python"

    @property
    def site_packages(self) -> Path:
        variables = {"base": str(self.root), "platbase": str(self.root)}
        return Path(sysconfig.get_path("purelib", scheme="venv", vars=variables))

    def run(self, *arguments: object, cwd: Path, **environ: object) -> subprocess.CompletedProcess[str]:
        return run_python(self.python, *arguments, cwd=cwd, **environ)

    def pip(self, *arguments: object) -> None:
        """Run pip on this environment; fails with pip's output."""
        run_pip("--python", self.python, *arguments)

    def install(self, *arguments: object) -> None:
        self.pip("install", "--no-deps", "--no-build-isolation", "--no-index", *arguments)

    def own_entries(self) -> list[Path]:
        """What was put into this environment's site-packages and scripts, apart from the links to others."""
        entries = [*self.site_packages.iterdir(), *self.scripts.iterdir()]
        return [entry for entry in entries if not entry.is_symlink()]

    def entries_of_ours(self) -> list[str]:
        """Files and folders, at any depth, that carry our name."""
        found = []
        for entry in self.own_entries():
            for path in [entry, *entry.rglob("*")]:
                if PACKAGE[:9] in path.name.replace("-", "_"):
                    found.append(str(path.relative_to(self.root)))
        return found


def make_environment(directory: Path) -> Environment:
    """A virtual environment in `directory` with everything that is installed here, except our package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    environment = Environment(directory)
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            # `~…` is what an interrupted pip leaves behind.
            if entry.name.startswith(("~", PACKAGE, "__editable__", "__pycache__")):
                continue
            link = environment.site_packages / entry.name
            if not link.exists():
                link.symlink_to(entry)
    return environment


def copy_source(directory: Path) -> Path:
    """What a build needs, copied: building in the checkout would leave build/ and egg-info there."""
    directory.mkdir(parents=True)
    for name in SOURCE_FILES:
        shutil.copy2(ROOT / name, directory / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / PACKAGE, directory / PACKAGE, ignore=ignore)
    shutil.copytree(ROOT / "configs", directory / "configs")
    return directory


def build_wheel(source: Path, directory: Path) -> Path:
    """The wheel that pip makes of a source folder or archive."""
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", directory, source)
    (wheel,) = directory.glob("*.whl")
    return wheel


def installed_environment(directory: Path) -> Environment:
    """An environment with our package installed from a wheel."""
    environment = make_environment(directory / "environment")
    environment.install(build_wheel(copy_source(directory / "source"), directory / "wheels"))
    return environment


def run_pip(*arguments: object) -> None:
    """Run pip; fails with pip's output."""
    command = [*_pip_command(), "--isolated", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # An environment made by `uv` has no pip; Python carries one.
    (bundled,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    return [sys.executable, str(bundled / "pip")]
