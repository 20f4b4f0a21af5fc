"""Import paths that the documentation has shown keep working until 1.0: those that have moved, with a warning."""

import importlib
import subprocess
import sys
import warnings

import pytest

# Every import that a page of documentation showed before paths began to move, and where it is now if it has moved.
DOCUMENTED = {
    "_autoload.command_line_checks": "",
    "compare.report.write_report": "",
    "compare.results.Results": "",
    "compare.statistics.compare_cells": "",
    "hardware.DEVICES": "",
    "hardware.NETWORKS": "",
    "hardware.ModelShape": "",
    "hardware.Roofline": "",
    "scenario.Scenario": "",
    "sim.replica_source.VidurReplicaSource": "",
    "sim.twin_filler.twin_config": "sim.twin_config.twin_config",
    "twin.acting.ActingTwin": "twin.policy_twin.PolicyTwin",
    "twin.play.play": "twin.cluster.play",
    "twin.source.TwinReplicaSource": "",
    "twin.twin.Twin": "",
    "twin.twin.run": "",
    "twin.vector.VectorTwin": "",
}


def imported(path: str) -> object:
    module, _, name = f"vidur_ppo_plugin.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_was_documented_can_be_imported(path: str) -> None:
    new = DOCUMENTED[path]
    if not new:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            assert imported(path) is not None
        return
    message = f"vidur_ppo_plugin.{path} is vidur_ppo_plugin.{new} now; the old path works until 1.0"
    with pytest.warns(DeprecationWarning, match=message):
        assert imported(path) is imported(new)


def test_the_warning_names_the_line_that_imports() -> None:
    code = "from vidur_ppo_plugin.twin.acting import ActingTwin"
    result = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:1: DeprecationWarning: vidur_ppo_plugin.twin.acting.ActingTwin is" in result.stderr


def test_other_names_fail_as_ever() -> None:
    with pytest.raises(AttributeError, match=r"module 'vidur_ppo_plugin.twin.acting' has no attribute 'nothing'"):
        imported("twin.acting.nothing")
