"""Checkpoints of a learner: complete, verified, atomic.

A checkpoint is ONE file, `<name>-<generation>.ckpt`: a line with the hash of the manifest, the manifest (JSON on one
line, readable with `head -2`), and the state as `torch.save` wrote it, whose size and hash the manifest holds. It is
written beside its destination, synced, and renamed to a generation that did not exist before. A rename of one file is
atomic, and nothing that was there is touched until the new file is complete on the disk; two files (payload and
manifest), or a directory to swap, would have a moment in which they do not belong together. The newest generation of
a name is the one with the highest number, so there is no pointer that could be stale either.

One process at a time writes to a directory.
"""

import contextlib
import hashlib
import io
import json
import logging
import math
import os
import platform
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vidur_ppo_plugin import __version__, pretrained

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LAST, BEST = "last", "best"

_MAGIC = b"vidur-ppo-checkpoint"
_HEADER = re.compile(rb"vidur-ppo-checkpoint (\d+) ([0-9a-f]{64})\n")
_MAX_HEADER_BYTES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FILE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)-(?P<generation>\d{8,})\.ckpt")
_STAGING = re.compile(r"\..+\.ckpt\.tmp-(?P<host>.*)-(?P<pid>\d{1,9})")
_ABANDONED_AFTER_S = 24 * 3600.0  # a staging file of another machine, whose processes we cannot see
_NUMPY = "__numpy__"  # marks what was a numpy array or scalar; `weights_only` admits neither
_BEST_METRIC = "best_metric"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used; the message names the file and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the state as it was saved, what is known about it, and the file it came from."""

    state: dict[str, Any]
    metadata: dict[str, Any]
    path: Path


# --- Saving ---


def save(directory: Path, name: str, state: dict[str, Any], *, metadata: dict[str, Any], keep: int = 2) -> Path:
    """Write the next generation of `name` and remove all but the `keep` newest; returns the new file.

    `state` is any nesting of dicts, lists and tuples of tensors, numpy arrays and scalars, numbers, strings, bytes,
    booleans and None. Tensors and arrays with NaN or infinity, and NaN anywhere, are refused with their place in the
    state (a plain float may be infinite: "nothing seen yet"). `metadata` goes through JSON. If anything fails, the
    generations that were there stay as they are.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"a checkpoint's name has letters, digits, '_', '.' and '-' only, got {name!r}")
    chunks = _chunks(state, metadata)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned_staging(directory)
    known = _generations(directory, name)
    destination = directory / f"{name}-{(known[0][0] if known else 0) + 1:08d}.ckpt"
    _write_atomically(destination, chunks)
    for _, old in _generations(directory, name)[max(1, keep) :]:
        with contextlib.suppress(OSError):  # the new checkpoint is safe; an old one too many does no harm
            old.unlink()
    return destination


def write(destination: Path, state: dict[str, Any], *, metadata: dict[str, Any]) -> None:
    """Write a checkpoint to a file of its own, without generations; an existing file is replaced as a whole."""
    _write_atomically(destination, _chunks(state, metadata))


def save_best(
    directory: Path, state: dict[str, Any], *, metadata: dict[str, Any], metric: float, lower_is_better: bool = True
) -> Path | None:
    """Save as `best` if `metric` beats that of the one saved there (NaN never does); None if it does not."""
    if math.isnan(metric):
        return None
    current = newest(directory, BEST)
    if current is not None:
        try:
            reached = float(read_metadata(current)[_BEST_METRIC])
        except (CheckpointError, KeyError, TypeError) as error:
            logger.warning("%s is replaced: its metric cannot be read (%s)", current, error)
        else:
            if (metric >= reached) if lower_is_better else (metric <= reached):
                return None
    return save(directory, BEST, state, metadata={**metadata, _BEST_METRIC: float(metric)}, keep=1)


def _chunks(state: dict[str, Any], metadata: dict[str, Any]) -> list[Any]:
    """The bytes of a checkpoint file, part by part."""
    import torch

    payload = io.BytesIO()
    torch.save(_encode(state, ""), payload)
    return [_head(payload.getbuffer(), metadata), payload.getbuffer()]


def _head(payload: memoryview, metadata: dict[str, Any]) -> bytes:
    import torch

    versions = {"vidur_ppo_plugin": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
    manifest = {
        "payload_sha256": hashlib.sha256(payload).hexdigest(),
        "payload_bytes": len(payload),
        "metadata": {"versions": versions, "saved_at": datetime.now(timezone.utc).isoformat(), **metadata},
    }
    try:
        line = json.dumps(manifest, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the metadata of a checkpoint must be JSON: {error}") from error
    return b"%s %d %s\n" % (_MAGIC, FORMAT_VERSION, hashlib.sha256(line).hexdigest().encode()) + line


def _write_atomically(destination: Path, chunks: list[Any]) -> None:
    staging = destination.with_name(f".{destination.name}.tmp-{platform.node()}-{os.getpid()}")
    try:
        with staging.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, destination)
        _sync_directory(destination.parent)
    except OSError as error:  # a failed write() names no file
        reason = f"the checkpoint was not written, earlier ones are untouched ({error.strerror})"
        raise OSError(error.errno, reason, str(destination)) from error
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power failure: it is the directory that holds the names."""
    if os.name != "posix":  # Windows opens no directories
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned_staging(directory: Path) -> None:
    for path in directory.iterdir():
        match = _STAGING.fullmatch(path.name)
        if match and _is_abandoned(path, match["host"], int(match["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_abandoned(path: Path, host: str, pid: int) -> bool:
    try:
        if host != platform.node() or os.name != "posix":
            return time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S
        os.kill(pid, 0)
    except OSError as error:  # a process that exists and is not ours gives PermissionError
        return isinstance(error, ProcessLookupError)
    return False


# --- Loading ---


def load(path: Path | str) -> Checkpoint:
    """Read and verify a checkpoint: a file, a directory (then its newest `last`), or `directory/name`.

    A text (not a Path) may also be the name of a policy that came with the package: `pretrained`. Never falls back to
    another file by itself; the error says which earlier one is good.
    """
    file = find(path)
    try:
        return _load_file(file)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_offer(file)}") from error


def verify(path: Path | str) -> dict[str, Any]:
    """The metadata of what `load` would read, after the same checks of the file; without torch."""
    file = find(path)
    try:
        manifest, _ = _read(file, with_payload=True)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_offer(file)}") from error
    return dict(manifest["metadata"])


def newest(directory: Path, name: str = LAST) -> Path | None:
    """The newest generation of `name`, or None."""
    found = _generations(Path(directory), name)
    return found[0][1] if found else None


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint file, without reading its state."""
    manifest, _ = _read(Path(path), with_payload=False)
    return dict(manifest["metadata"])


def check_compatible(metadata: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if `metadata` differs from `expected` in any of its keys, naming each with both values."""
    wanted = json.loads(json.dumps(dict(expected)))  # the file went through JSON: tuples are lists there
    differences = [
        f"{key}: the checkpoint has {repr(metadata[key]) if key in metadata else 'nothing'}, this run needs {value!r}"
        for key, value in wanted.items()
        if key not in metadata or metadata[key] != value
    ]
    if differences:
        raise CheckpointError("the checkpoint does not fit this run: " + "; ".join(differences))


def _generations(directory: Path, name: str | None) -> list[tuple[int, Path]]:
    """The generations of a name (None: of all names), newest first."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else []:
        match = _FILE.fullmatch(path.name)
        if match and name in (None, match["name"]):
            found.append((int(match["generation"]), path))
    return sorted(found, reverse=True)


def find(path: Path | str) -> Path:
    """The file that `load` would read; CheckpointError if there is none."""
    shipped = pretrained.find(path)
    if shipped is not None:
        return shipped.checkpoint
    path = Path(path)
    if path.is_file():
        return path
    directory, name = (path, LAST) if path.is_dir() else (path.parent, path.name)
    found = newest(directory, name)
    if found is not None:
        return found
    reason = f"{directory} holds no {name!r}" if path.is_dir() else "there is no such file, directory or name"
    raise CheckpointError(f"checkpoint {path}: missing ({reason}); {_offer(directory / name)}")


def _offer(bad: Path) -> str:
    """The best other checkpoint of a directory, as advice: same name first, then newest first."""
    match = _FILE.fullmatch(bad.name)
    same = _generations(bad.parent, match["name"]) if match else []
    for _, path in [*same, *_generations(bad.parent, None)]:
        if path != bad:
            with contextlib.suppress(CheckpointError):
                return f"use {_load_file(path).path} instead"
    return "no other good checkpoint lies beside it"


def _read(path: Path, *, with_payload: bool) -> tuple[dict[str, Any], bytes]:
    """The manifest and the payload, each verified against its hash."""
    try:
        with path.open("rb") as file:
            manifest = _read_manifest(path, file)
            payload = file.read() if with_payload else b""
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read ({error.strerror})") from error
    if with_payload:
        expected = manifest["payload_bytes"]
        if len(payload) != expected:
            reason = "truncated" if len(payload) < expected else "longer than it was written"
            raise CheckpointError(f"checkpoint {path}: {reason}, {len(payload)} of {expected} bytes of state")
        if hashlib.sha256(payload).hexdigest() != manifest["payload_sha256"]:
            raise CheckpointError(f"checkpoint {path}: its state does not match its hash (damaged or tampered with)")
    return manifest, payload


def _read_manifest(path: Path, file: BinaryIO) -> dict[str, Any]:
    first = file.readline(_MAX_HEADER_BYTES)
    match = _HEADER.fullmatch(first)
    reason = None
    if not match:
        is_ours = first.startswith(_MAGIC) or _MAGIC.startswith(first)
        reason = "truncated or damaged in its first line" if is_ours else "not a checkpoint of ours"
    elif int(match[1]) != FORMAT_VERSION:
        reason = f"has format version {int(match[1])}, this package reads {FORMAT_VERSION}"
    else:
        line = file.readline()
        if not line.endswith(b"\n"):
            reason = "truncated in its manifest"
        elif hashlib.sha256(line).hexdigest().encode() != match[2]:
            reason = "its manifest does not match its hash (damaged or tampered with)"
    if reason:
        raise CheckpointError(f"checkpoint {path}: {reason}")
    manifest: dict[str, Any] = json.loads(line)
    return manifest


def _load_file(path: Path) -> Checkpoint:
    import torch

    manifest, payload = _read(path, with_payload=True)
    try:
        state = _decode(torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))
    except Exception as error:  # with the right hashes, yet not from `save`: torch raises whatever it stumbles over
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it wants to run {forbidden[1]}" if forbidden else type(error).__name__
        raise CheckpointError(f"checkpoint {path}: its state is not plain data ({what})") from None
    return Checkpoint(state, dict(manifest["metadata"]), path)


# --- What `torch.load(weights_only=True)` admits ---


def _encode(value: Any, path: str) -> Any:
    """`value` in admissible types only; `path` is its place in the state, for the error."""
    import torch

    if value is None or type(value) in (bool, int, str, bytes):
        return value
    if type(value) is float:
        if math.isnan(value):
            raise CheckpointError(f"not saved: {path} is NaN")
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value, path)
    if type(value) in (list, tuple):
        return type(value)(_encode(item, f"{path}.{index}") for index, item in enumerate(value))
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in (str, int) or key == _NUMPY:
                raise CheckpointError(f"not saved: {path} has the key {key!r}; keys are strings or ints")
        return type(value)((key, _encode(item, f"{path}.{key}".lstrip("."))) for key, item in value.items())
    raise CheckpointError(f"not saved: {path} is a {type(value).__name__}, which a checkpoint cannot hold")


def _encode_tensor(value: Any, path: str) -> Any:
    import torch

    if value.layout != torch.strided:
        raise CheckpointError(f"not saved: {path} is a tensor with the layout {value.layout}")
    tensor = value.detach().cpu()
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"not saved: the tensor {path} has NaN or infinite values")
    # torch saves the whole storage behind a view
    is_view = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor


def _encode_numpy(value: Any, path: str) -> dict[str, Any]:
    import torch

    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise CheckpointError(f"not saved: {path} is an array of {array.dtype}, which a checkpoint cannot hold")
    is_scalar = not isinstance(value, np.ndarray)
    if array.dtype.kind in "fc" and bool((np.isnan(array) if is_scalar else ~np.isfinite(array)).any()):
        raise CheckpointError(f"not saved: the array {path} has NaN or infinite values")
    data = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0)
    return {_NUMPY: array.dtype.str, "shape": list(array.shape), "is_scalar": is_scalar, "data": data}


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _NUMPY in value:
            raw = value["data"].numpy().tobytes()
            array = np.frombuffer(bytearray(raw), dtype=value[_NUMPY]).reshape(value["shape"])
            return array[()] if value["is_scalar"] else array
        return type(value)((key, _decode(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_decode(item) for item in value)
    return value
