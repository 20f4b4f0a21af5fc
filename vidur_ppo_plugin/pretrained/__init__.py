"""The policies that come with the package, by name: where their files are and what is known of them; without torch.

NAME.ckpt    the network, for `ppo_modular`; written by `vidur-ppo pretrained make`
NAME.npz     the actor alone, for routers without torch
NAME.json    hashes of both, how it was trained, and what was measured
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
#: The name of the policy that is meant where none is given.
DEFAULT = "pretrained"
#: Both files of a policy together, in bytes.
MOST_BYTES = 1_000_000


class PretrainedError(ValueError):
    """A policy of the package that is damaged; the message names the file."""


@dataclass(frozen=True)
class Pretrained:
    """A policy and its files."""

    name: str
    directory: Path = DIRECTORY

    @property
    def checkpoint(self) -> Path:
        """The checkpoint, for `ppo_modular`."""
        return self.directory / f"{self.name}.ckpt"

    @property
    def policy(self) -> Path:
        """The numpy file, for `policy.actor.Actor`."""
        return self.directory / f"{self.name}.npz"

    @property
    def metadata_file(self) -> Path:
        """The JSON file with the metadata."""
        return self.directory / f"{self.name}.json"

    @property
    def metadata(self) -> dict[str, Any]:
        """How the policy was trained and what was measured."""
        try:
            metadata: dict[str, Any] = json.loads(self.metadata_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PretrainedError(f"{self.metadata_file}: cannot be read: {error}") from error
        return metadata

    @property
    def num_bytes(self) -> int:
        """Size of checkpoint and numpy file together, in bytes."""
        return self.checkpoint.stat().st_size + self.policy.stat().st_size

    def verify(self) -> dict[str, Any]:
        """The metadata, after checking that both files are the ones it describes; PretrainedError if not."""
        metadata = self.metadata
        for file, key in ((self.checkpoint, "checkpoint_sha256"), (self.policy, "policy_sha256")):
            try:
                found = sha256(file)
            except OSError as error:
                raise PretrainedError(f"{file}: cannot be read: {error.strerror}") from error
            if found != metadata.get(key):
                raise PretrainedError(f"{file}: is not what {self.metadata_file.name} describes ({key} differs)")
        return metadata


def names() -> list[str]:
    """Names of all policies that came with the package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


def find(name: str | Path) -> Pretrained | None:
    """The policy of that name; None if there is none. A Path is never a name: `./pretrained` is a directory."""
    return Pretrained(name, DIRECTORY) if isinstance(name, str) and name in names() else None


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
