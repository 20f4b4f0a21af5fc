"""What was compiled and kept is used again, and never after one of the sources that went into it has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_tools import PACKAGE as PACKAGE_NAME
from packaging_tools import ROOT

from vidur_ppo_plugin.routing.compiled import sources_digest

PACKAGE = ROOT / PACKAGE_NAME
# A constant of `snapshot` goes into `features.observe`, whose own file does not change.
PROGRAM = """
import numpy as np
from vidur_ppo_plugin.routing.features import FeatureTable, _observe_compiled
from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo

table = FeatureTable(num_waiting_slots=0)
snapshot = ClusterSnapshot(0.0, np.full((len(ROWS), 2), 100.0), kv_block_size=16, expected_decode_tokens=10.0)
load = [feature.name for feature in table.replica_features].index("load")
replicas = table.observe(snapshot, RequestInfo(10, 0.0)).replicas
print(replicas[0, load], len(_observe_compiled.dispatcher.stats.cache_hits))
"""


def test_a_constant_in_another_file_makes_it_stale(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run() -> tuple[float, int]:
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        value, hits = done.stdout.split()
        return float(value), int(hits)

    before, hits = run()
    assert hits == 0
    assert run() == (before, 1)  # kept
    source = tmp_path / PACKAGE.name / "routing" / "snapshot.py"
    text = source.read_text()
    assert "CONTEXT_WEIGHT = 0.05" in text
    source.write_text(text.replace("CONTEXT_WEIGHT = 0.05", "CONTEXT_WEIGHT = 0.5"))
    after, hits = run()
    assert hits == 0 and after > before


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("twin.policy_kernels", "policy/forward.py"),
        ("twin.policy_kernels", "routing/heuristics.py"),
        ("twin.policy_kernels", "twin/layout.py"),
        ("twin.kernels", "routing/snapshot.py"),
        ("routing.averages", "routing/snapshot.py"),
    ],
)
def test_every_source_that_goes_in_counts(module: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{PACKAGE.name}.{module}"
    before, read_bytes = sources_digest.__wrapped__(name), Path.read_bytes

    def changed(path: Path) -> bytes:
        return read_bytes(path) + (b"# changed" if path == PACKAGE / source else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert sources_digest.__wrapped__(name) != before
