"""`vidur-ppo doctor`: can the main job run here, and if not, why not?"""

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from vidur_ppo_plugin import __version__, _autoload

PACKAGE = "vidur-ppo-plugin"
START_UP_FILE = "vidur_ppo_plugin.pth"
EXTRAS = ("ray", "serve", "tensorboard", "dashboard", "test", "dev")


def report() -> int:
    """Print the report; 0 if the main job can run, 1 if not."""
    # Asked first: running the main job below installs the hook in other processes only, but imports may here.
    loaded_at_start = _autoload.is_installed()
    print(f"{PACKAGE} {__version__}, Python {platform.python_version()} on {platform.platform()}\n")
    problems = [*_check_requirements(), *_check_vidur(), *_check_loading(loaded_at_start), *_check_main_job()]
    if problems:
        print("\nThe main job cannot run:")
        for problem in problems:
            print(f"  - {problem}")
        return 1
    print("\nThe main job can run: vidur-ppo run")
    return 0


def _check_requirements() -> Iterator[str]:
    """Print each requirement with its version; yield those that are missing or out of range."""
    optional: dict[str, list[str]] = {}
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:
        lines = []
        print(f"  {PACKAGE} is not installed (a checkout on PYTHONPATH?): versions of its requirements not checked")
    for line in lines:
        requirement = Requirement(line)
        installed = _installed_version(requirement.name)
        if requirement.marker is not None:
            extras = [extra for extra in EXTRAS if requirement.marker.evaluate({"extra": extra})]
            if extras and installed is None:
                optional.setdefault(extras[0], []).append(requirement.name)
            continue
        in_range = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        status = "ok" if in_range else "WRONG"
        shown = installed or ("unknown" if find_spec(requirement.name) else "missing")
        print(f"  {status:<6}{requirement.name:<16}{shown:<12} (needs {requirement.specifier})")
        if not in_range:
            yield f"{requirement} is needed, found {installed or 'none'}: pip install {str(requirement)!r}"
    for extra, names in optional.items():
        print(f"  absent [{extra}] (optional): {', '.join(sorted(set(names)))}; pip install '{PACKAGE}[{extra}]'")


def _check_vidur() -> Iterator[str]:
    """Print which Vidur Python finds, if it is not of the line that we build on; yield the same."""
    found = find_spec("vidur")
    folders = [Path(name) for name in found.submodule_search_locations or ()] if found is not None else []
    # PyPI's has a compiled part; the one on GitHub has not, nor much else of what we use.
    if folders and not any(any(folder.glob("_native*")) for folder in folders):
        print(f"  WRONG vidur is imported from {folders[0]}")
        yield (
            f"the Vidur in {folders[0]} is not PyPI's, which the one on GitHub differs from: take it off the path; "
            f"`pip install {PACKAGE}` brings PyPI's"
        )


def _check_loading(loaded_at_start: bool) -> Iterator[str]:
    """Print how plugins get loaded here; yield what keeps ours from loading."""
    print()
    site_packages = Path(sysconfig.get_paths()["purelib"])
    has_file = (site_packages / START_UP_FILE).exists()
    print(f"  start-up file {START_UP_FILE}: {'installed' if has_file else 'not in site-packages'}")
    if loaded_at_start:
        print("  plugin hook: loaded at start-up, `python -m vidur.main` knows our types")
    else:
        print("  plugin hook: NOT loaded at start-up; run `python -m vidur_ppo_plugin`, not `python -m vidur.main`")
    switch = os.environ.get(_autoload.SWITCH)
    print(f"  {_autoload.SWITCH}: {'not set (all plugins load)' if switch is None else repr(switch)}")
    names = sorted(entry_point.name for entry_point in entry_points(group=_autoload.GROUP))
    print(f"  plugins installed in the group {_autoload.GROUP}: {', '.join(names) or 'none'}")
    if switch is not None and _autoload.OWN_PLUGIN[0] not in [name.strip() for name in switch.split(",")]:
        yield f"{_autoload.SWITCH}={switch!r} keeps the plugin {_autoload.OWN_PLUGIN[0]!r} from loading"


def _check_main_job() -> Iterator[str]:
    """Run a small main job in a new process; yield the end of its error output if it fails."""
    command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "run"]
    small = ["--synthetic_request_generator_config_num_requests", "20", "--metrics_config_output_dir"]
    with tempfile.TemporaryDirectory() as directory:
        small.append(str(Path(directory, "output")))
        done = subprocess.run([*command, *small], cwd=directory, capture_output=True, text=True, check=False)
    print(f"\n  {'ok' if done.returncode == 0 else 'FAILED'}    a run of 20 requests on the embedded default")
    if done.returncode != 0:
        last_lines = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        yield f"`{' '.join(command[1:])}` exits with status {done.returncode}: {last_lines}"


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
