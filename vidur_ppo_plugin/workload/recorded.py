"""The workload of a record of `vidur-ppo serve`: when real requests came and how long they were."""

import json
from pathlib import Path

import numpy as np

from .requests import Requests

#: How the header of a record begins.
KIND = "vidur-ppo record"


def is_record(path: Path) -> bool:
    """Whether a file is a record; False too if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.readline(200).startswith(b'{"kind":"' + KIND.encode())
    except OSError:
        return False


def read_recorded(path: Path) -> Requests:
    """The requests of a record that were served, by arrival; ValueError names a line that is wrong."""
    rows = []
    with path.open(encoding="utf-8") as file:
        file.readline()
        for number, line in enumerate(file, start=2):
            if not line.endswith("\n"):
                break  # the router was ended in the middle of it
            try:
                entry = json.loads(line)
                outcome = entry["outcome"]
                if outcome["status"] == "ok":
                    rows.append((float(entry["t"]), int(outcome["prompt_tokens"]), int(outcome["output_tokens"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: is not a decision: {error!r}") from error
    rows.sort()
    times, prompts, decodes = (np.array(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return Requests(
        np.asarray(times, np.float64),
        np.maximum(np.asarray(prompts, np.int64), 1),
        np.maximum(np.asarray(decodes, np.int64), 1),
    )
