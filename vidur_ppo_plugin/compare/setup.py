"""The set-up of a comparison: what is compared, as the metadata of its results directory says it.

A results directory may be continued only with the set-up that it was begun with; the reference alone may change, since
it matters for reading only.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import __version__
from vidur_ppo_plugin.scenario import Scenario

from . import metrics
from .results import METADATA, Results, ResultsError, to_json, write_atomically
from .schedulers import SchedulerSpec

_PACKAGES = ("vidur", "numpy", "torch", "numba", "pandas")
#: What must be the same for a directory to be continued.
_FIXED = ("scenarios", "schedulers", "seeds", "engine", "plugin_version")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A comparison that is about to run."""

    scenarios: list[Scenario]
    schedulers: list[SchedulerSpec]
    seeds: list[int]
    reference: str
    engine: str
    is_quick: bool

    def metadata(self) -> dict[str, Any]:
        """Everything that somebody needs to judge or repeat the results."""
        return {
            "reference": self.reference,
            "seeds": self.seeds,
            "engine": self.engine,
            "is_quick": self.is_quick,
            "scenarios": {scenario.name: _scenario_facts(scenario) for scenario in self.scenarios},
            "schedulers": {spec.label: _scheduler_facts(spec) for spec in self.schedulers},
            "plugin_version": __version__,
            "versions": versions(),
            "revision": revision(),
            "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "definitions": metrics.definitions(),
        }

    def open(self, directory: Path) -> Results:
        """The results directory, new or to be continued; ResultsError if it belongs to another set-up."""
        wanted = json.loads(to_json(self.metadata()))
        if not (directory / METADATA).exists():
            if directory.exists() and any(directory.iterdir()):
                raise ResultsError(f"--out {directory}: has files, but no {METADATA}: it is not a results directory")
            return Results.create(directory, wanted)
        found = Results(directory)
        different = _differences(found.metadata, wanted)
        if different:
            raise ResultsError(
                f"--out {directory}: holds the results of another set-up (different: {'; '.join(different)}); "
                f"choose another directory"
            )
        if found.metadata["reference"] != self.reference:
            write_atomically(directory / METADATA, to_json({**found.metadata, "reference": self.reference}))
            return Results(directory)
        return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def revision() -> str | None:
    """The git revision of the checkout that this package runs from, with a mark if files differ; None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _scenario_facts(scenario: Scenario) -> dict[str, Any]:
    facts = dataclasses.asdict(scenario)
    del facts["name"]
    if scenario.trace is not None:
        facts["trace"] |= {"path": str(scenario.trace.path), "digest": _digest(scenario.trace.path)}
        facts["trace"]["windows"] = {str(seed): window for seed, window in scenario.trace.windows.items()}
    return facts | {
        "num_replicas": scenario.num_replicas,
        "capacity_qps": None if scenario.capacity is None else scenario.capacity.qps,
        "qps": scenario.qps,
    }


def _scheduler_facts(spec: SchedulerSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": spec.kind,
        "deployable": spec.is_deployable,
        "note": spec.note,
        "options": dict(spec.options),
    }
    if spec.checkpoint:
        facts |= {"checkpoint": spec.checkpoint, "digest": _digest(Path(spec.checkpoint))}
    return facts


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs, in words short enough for an error message."""
    texts = []
    for key in _FIXED:
        old, new = found.get(key), wanted[key]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts = [f"+{name}" for name in new if name not in old] + [f"-{name}" for name in old if name not in new]
            parts += [name for name in new if name in old and old[name] != new[name]]
            texts.append(f"{key} {', '.join(parts)}" if parts else f"order of {key}")
        else:
            texts.append(f"{key} {old!r}, now {new!r}")
    return texts
