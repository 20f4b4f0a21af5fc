"""Import paths that the documentation has shown keep working until 1.0: those that have moved, with a warning."""

import importlib
import subprocess
import sys
import warnings

import pytest

from vidur_ppo_plugin import _old_imports

# Every import that a page of documentation showed before paths began to move.
DOCUMENTED = [
    "vidur_ppo_plugin._autoload.command_line_checks",
    "vidur_ppo_plugin.compare.report.write_report",
    "vidur_ppo_plugin.compare.results.Results",
    "vidur_ppo_plugin.compare.statistics.compare_cells",
    "vidur_ppo_plugin.hardware.DEVICES",
    "vidur_ppo_plugin.hardware.NETWORKS",
    "vidur_ppo_plugin.hardware.ModelShape",
    "vidur_ppo_plugin.hardware.Roofline",
    "vidur_ppo_plugin.scenario.Scenario",
    "vidur_ppo_plugin.sim.replica_source.VidurReplicaSource",
    "vidur_ppo_plugin.sim.twin_filler.TwinFiller",
    "vidur_ppo_plugin.sim.twin_filler.twin_config",
    "vidur_ppo_plugin.twin.acting.ActingTwin",
    "vidur_ppo_plugin.twin.play.play",
    "vidur_ppo_plugin.twin.source.TwinReplicaSource",
    "vidur_ppo_plugin.twin.twin.Twin",
    "vidur_ppo_plugin.twin.twin.run",
    "vidur_ppo_plugin.twin.vector.VectorTwin",
]


def imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_was_documented_can_be_imported(path: str) -> None:
    new = _old_imports.MOVED.get(path)
    if new is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            assert imported(path) is not None
        return
    with pytest.warns(DeprecationWarning, match=f"{path} is {new} now; the old path works until 1.0"):
        assert imported(path) is imported(new)


def test_only_what_was_documented_is_kept() -> None:
    assert set(_old_imports.MOVED) <= set(DOCUMENTED)


def test_the_warning_names_the_line_that_imports() -> None:
    code = "from vidur_ppo_plugin.twin.acting import ActingTwin\nfrom vidur_ppo_plugin.twin import acting"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:1: DeprecationWarning: vidur_ppo_plugin.twin.acting.ActingTwin is" in result.stderr


def test_other_names_fail_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'vidur_ppo_plugin.twin.nothing'"):
        importlib.import_module("vidur_ppo_plugin.twin.nothing")
    with pytest.raises(AttributeError, match=r"module 'vidur_ppo_plugin.twin.acting' has no attribute 'nothing'"):
        imported("vidur_ppo_plugin.twin.acting.nothing")


def test_the_table_is_read_when_it_is_needed() -> None:
    code = "import sys, vidur_ppo_plugin.scenario; print('vidur_ppo_plugin._old_imports' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
