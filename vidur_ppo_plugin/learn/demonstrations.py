"""Demonstrations: what teachers saw and what they did, in one file from which any actor can be cloned.

The file is an `.npz` without pickles. A decision among n replicas has n rows in `replicas` and `prior_costs`; n may
differ from decision to decision, so the rows of decision i are `offsets[i]` to `offsets[i + 1]`.

    header       JSON: format, feature hash, teachers and their shares, number of decisions, names of the priors
    replicas     [rows, features of a replica], float32
    request      [decisions, features of request and cluster], float32
    prior_costs  [rows, priors], float64: the cost of EVERY heuristic that can be a prior
    offsets      [decisions + 1], int64
    actions      [decisions], int64: the teacher's choice, counted within the decision's rows

Logits of the prior are not in it: they follow from `prior` and `prior_weight` of the run that learns. With the costs of
every prior in full precision (a few numbers a replica), one recording serves them all, to the last bit.
"""

import contextlib
import hashlib
import io
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.features import Float32Array, Observation
from vidur_ppo_plugin.routing.prior import NAMES, Prior
from vidur_ppo_plugin.routing.snapshot import FloatArray

FORMAT_VERSION = 1
#: The heuristics whose costs are recorded, in the order of the columns.
PRIORS = tuple(name for name in NAMES if name != "none")
_DTYPES = {
    "replicas": "float32",
    "request": "float32",
    "prior_costs": "float64",
    "offsets": "int64",
    "actions": "int64",
}


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Decisions of teachers, ragged: see the top of this file."""

    feature_hash: str
    teachers: dict[str, float]
    priors: tuple[str, ...]
    replicas: Float32Array
    request: Float32Array
    prior_costs: FloatArray
    offsets: NDArray[np.int64]
    actions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_replicas(self) -> NDArray[np.int64]:
        """How many replicas each decision chose from."""
        return np.diff(self.offsets)

    @property
    def digest(self) -> str:
        """Hash of the contents: equal digests, equal demonstrations."""
        digest = hashlib.sha256(repr((self.feature_hash, self.priors)).encode())
        for name in _DTYPES:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()[:16]

    def prior_logits(self, decision: int, prior: Prior) -> Float32Array:
        """Logits of the prior for a decision, from the costs recorded with it."""
        rows = slice(self.offsets[decision], self.offsets[decision + 1])
        if prior.name == "none":
            return prior.logits(np.zeros(rows.stop - rows.start))
        return prior.logits(self.prior_costs[rows, self.priors.index(prior.name)])

    def problem(self) -> str | None:
        """Why the demonstrations cannot be used; None if they can."""
        num_decisions, num_rows = len(self.actions), len(self.replicas)
        if num_decisions == 0:
            return "it has no decisions"
        if len(self.offsets) != num_decisions + 1 or len(self.request) != num_decisions:
            return f"it has {num_decisions} actions, {len(self.request)} requests and {len(self.offsets)} offsets"
        if self.offsets[0] != 0 or self.offsets[-1] != num_rows or self.num_replicas.min() < 1:
            return f"its offsets do not divide its {num_rows} rows of replicas into decisions"
        if self.prior_costs.shape != (num_rows, len(self.priors)):
            return f"its prior_costs have shape {self.prior_costs.shape}, not {(num_rows, len(self.priors))}"
        wrong = np.flatnonzero((self.actions < 0) | (self.actions >= self.num_replicas))
        if len(wrong):
            action, size = self.actions[wrong[0]], self.num_replicas[wrong[0]]
            return f"the action of decision {wrong[0]} is {action}, out of range for {size} replicas"
        for name in ("replicas", "request", "prior_costs"):
            values = getattr(self, name)
            if not np.isfinite(values).all():
                row, column = (int(index) for index in np.argwhere(~np.isfinite(values))[0])
                return f"{name}[{row}, {column}] is not finite: {values[row, column]}"
        return None


class DemonstrationBuffer:
    """Collects decisions of a run; its memory grows with them, as its purpose is to keep them."""

    def __init__(self, *, feature_hash: str, teachers: dict[str, float]) -> None:
        self._feature_hash = feature_hash
        self._teachers = teachers
        self._observations: list[Observation] = []
        self._prior_costs: list[FloatArray] = []
        self._actions: list[int] = []

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, observation: Observation, prior_costs: FloatArray, action: int) -> None:
        """A decision: what was seen, [replicas, PRIORS] of costs, and what the teacher chose."""
        self._observations.append(observation)
        self._prior_costs.append(prior_costs)
        self._actions.append(action)

    def collect(self) -> Demonstrations:
        """All decisions so far; there must be one."""
        sizes = [len(observation.replicas) for observation in self._observations]
        return Demonstrations(
            feature_hash=self._feature_hash,
            teachers=self._teachers,
            priors=PRIORS,
            replicas=np.concatenate([observation.replicas for observation in self._observations]),
            request=np.stack([observation.request for observation in self._observations]),
            prior_costs=np.concatenate(self._prior_costs),
            offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            actions=np.array(self._actions, dtype=np.int64),
        )


def save(demonstrations: Demonstrations, path: Path) -> None:
    """Write the file beside its destination, sync it and rename it: it is there whole or not at all."""
    problem = demonstrations.problem()
    if problem:
        raise ValueError(f"demonstrations are not written to {path}: {problem}")
    header = {
        "format": FORMAT_VERSION,
        "feature_hash": demonstrations.feature_hash,
        "teachers": demonstrations.teachers,
        "num_decisions": len(demonstrations),
        "priors": list(demonstrations.priors),
    }
    content = io.BytesIO()
    arrays: dict[str, Any] = {name: getattr(demonstrations, name) for name in _DTYPES}
    np.savez_compressed(content, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with staging.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


def load(path: Path, *, feature_hash: str, flag: str) -> Demonstrations:
    """Read and verify a file that `save` wrote; ValueError naming the flag, the file and the reason."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"{flag}={path}: {reason}")

    if not path.is_file():
        raise refuse("there is no such file")
    try:
        header, arrays = _read(path)
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise refuse(f"it is not a file of demonstrations ({error})") from error
    if header.get("format") != FORMAT_VERSION:
        raise refuse(f"it has format {header.get('format')!r}, this version reads {FORMAT_VERSION}")
    if header.get("feature_hash") != feature_hash:
        raise refuse(
            f"it was recorded with the features {header.get('feature_hash')}, this run has {feature_hash}; record it "
            "with the same max_queue_requests_per_replica, trend_window and scales"
        )
    try:
        demonstrations = Demonstrations(
            feature_hash=feature_hash, teachers=dict(header["teachers"]), priors=tuple(header["priors"]), **arrays
        )
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"its header is damaged ({error!r})") from error
    problem = demonstrations.problem()
    if problem is None and header.get("num_decisions") != len(demonstrations):
        problem = f"its header counts {header.get('num_decisions')} decisions, it has {len(demonstrations)}"
    if problem:
        raise refuse(problem)
    return demonstrations


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays; any of a handful of errors if the file is something else."""
    loaded = np.load(path, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise TypeError("a single array, not an .npz")
    with loaded:
        header = json.loads(bytes(loaded["header"]).decode())
        if not isinstance(header, dict):
            raise TypeError("its header is not an object")
        if header.get("format") != FORMAT_VERSION:
            return header, {}  # another format may have other arrays
        arrays = {name: loaded[name] for name in _DTYPES}
    for name, array in arrays.items():
        num_axes = 1 if name in ("offsets", "actions") else 2
        if str(array.dtype) != _DTYPES[name] or array.ndim != num_axes:
            raise TypeError(f"{name} is {array.dtype} with {array.ndim} axes, not {_DTYPES[name]} with {num_axes}")
    return header, arrays
