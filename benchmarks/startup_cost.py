"""What our start-up file costs every Python process on the machine, in milliseconds.

    python benchmarks/startup_cost.py [--json] [--quick] [--repeats 200]

Makes two virtual environments that differ in one thing: our wheel is installed in one of them, by pip. Then
starts `python -c pass` in both, in turn and in changing order, so that whatever else the machine does hits both
alike, and compares the medians. Also measures what our import hook adds to each import of another module.
Exit status 1 if the start-up file adds more than 2 ms. Needs the extra `test` (setuptools and wheel), no network.
"""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _reporting import new_parser, parse_options, positive, report

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vidur_ppo_plugin"
LIMIT_MS = 2.0
WARM_UP = 5

FIND_SPEC = """
import sys, timeit
(finder,) = [f for f in sys.meta_path if type(f).__module__ == "vidur_ppo_plugin._autoload"]
number = 200_000
timer = timeit.Timer("find('email.message', None)", globals={"find": finder.find_spec})
print(min(timer.repeat(5, number)) / number * 1e6)
"""


def main() -> int:
    """Measure, report, judge."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=200, help="pairs of starts (default: 200)")
    options = parse_options(parser, quick={"repeats": 2})
    return report(
        options,
        lambda: measure(options.repeats),
        lines_of,
        lambda result: ["added_ms"] if result["added_ms"] > LIMIT_MS else [],
    )


def measure(repeats: int) -> dict[str, Any]:
    """Build both environments and time them."""
    with tempfile.TemporaryDirectory() as directory:
        return compare(Path(directory), repeats)


def compare(directory: Path, repeats: int) -> dict[str, Any]:
    """Time starts in two new environments."""
    without, with_us = make_environment(directory / "without"), make_environment(directory / "with")
    install(with_us, directory)
    check_difference(without, with_us)
    times_ms: dict[Path, list[float]] = {without: [], with_us: []}
    for repeat in range(-WARM_UP, repeats):
        pair = (without, with_us) if repeat % 2 else (with_us, without)
        for python in pair:
            elapsed_ms = start_ms(python)
            if repeat >= 0:
                times_ms[python].append(elapsed_ms)
    median_without_ms, median_with_ms = (statistics.median(times_ms[python]) for python in (without, with_us))
    differences_ms = [b - a for a, b in zip(times_ms[without], times_ms[with_us], strict=True)]
    return {
        "median_without_ms": round(median_without_ms, 3),
        "median_with_ms": round(median_with_ms, 3),
        "added_ms": round(median_with_ms - median_without_ms, 3),
        "median_of_differences_ms": round(statistics.median(differences_ms), 3),
        "fastest_without_ms": round(min(times_ms[without]), 3),
        "fastest_with_ms": round(min(times_ms[with_us]), 3),
        "limit_ms": LIMIT_MS,
        "find_spec_us": round(float(output_of(with_us, FIND_SPEC)), 4),
        "repeats": repeats,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def make_environment(directory: Path) -> Path:
    """The interpreter of a new, empty virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return directory / "bin" / "python"


def install(python: Path, directory: Path) -> None:
    """Build our wheel from a copy of the source, and let pip install it."""
    source = directory / "source"
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--isolated", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    # A PYTHONPATH with a checkout that was installed in editable mode makes pip say that all is there already.
    subprocess.run(build, check=True, env=clean_environ())
    (wheel,) = directory.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", *offline, str(wheel)], check=True, env=clean_environ())


def check_difference(without: Path, with_us: Path) -> None:
    """The hook is active in one environment and absent from the other; else the comparison means nothing."""
    program = f"import sys; print({PACKAGE + '._autoload'!r} in sys.modules)"
    loaded = [output_of(python, program).strip() for python in (without, with_us)]
    if loaded != ["False", "True"]:
        raise RuntimeError(f"hook loaded without and with our package: {loaded}, expected ['False', 'True']")


def start_ms(python: Path) -> float:
    """Milliseconds from starting `python -c pass` to its end."""
    command, environ = [str(python), "-c", "pass"], clean_environ()
    start_s = time.perf_counter()
    # close_fds=False lets subprocess use the cheap vfork/posix_spawn path: less noise of our own.
    status = subprocess.call(command, env=environ, close_fds=False)
    elapsed_s = time.perf_counter() - start_s
    if status != 0:
        raise RuntimeError(f"{command} exits with status {status}")
    return elapsed_s * 1000


def output_of(python: Path, program: str) -> str:
    return subprocess.run(
        [python, "-c", program], env=clean_environ(), check=True, capture_output=True, text=True
    ).stdout


def clean_environ() -> dict[str, str]:
    """No PYTHONPATH and the like: the environments alone decide what is imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def lines_of(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    verdict = "within" if result["added_ms"] <= LIMIT_MS else "ABOVE"
    return [
        f"`python -c pass`, {result['repeats']} pairs of starts, Python {result['python']}, {result['cpus']} CPUs",
        "",
        "start-up file         median    fastest",
        f"  without        {result['median_without_ms']:8.2f} ms {result['fastest_without_ms']:7.2f} ms",
        f"  with           {result['median_with_ms']:8.2f} ms {result['fastest_with_ms']:7.2f} ms",
        f"  added          {result['added_ms']:8.2f} ms   ({verdict} the limit of {LIMIT_MS:g} ms)",
        "",
        f"each import of another module: {result['find_spec_us']:.2f} us",
    ]


if __name__ == "__main__":
    sys.exit(main())
