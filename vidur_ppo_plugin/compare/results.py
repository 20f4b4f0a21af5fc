"""A directory of results: what is written for each cell, and how it is read back.

    metadata.json                               what was compared, and how
    cells/SCENARIO/SCHEDULER/SEED.parquet       what happened to each request of a cell
    cells/SCENARIO/SCHEDULER/SEED.json          its metrics; written last, so it exists only if the cell is finished
    cells/SCENARIO/SCHEDULER/SEED.error.json    in their place: why it failed
    cells.csv                                   all finished cells, without wall-clock times: the same in every run

Every file is written beside its destination and moved there, so a killed run leaves whole files or none.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from .metrics import METRICS, REQUEST_COLUMNS, check_columns

METADATA = "metadata.json"
CELLS = "cells"
TABLE = "cells.csv"


class ResultsError(ValueError):
    """A results directory that cannot be used; the message names the file and what is wrong with it."""


class Cell(NamedTuple):
    """One simulation of a comparison."""

    scenario: str
    scheduler: str
    seed: int


class Results:
    """The results in a directory; cells are read when asked for, so a running comparison can be looked at."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / METADATA
        try:
            self.metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path}: not the metadata of a comparison: {error}") from error

    @classmethod
    def create(cls, directory: Path, metadata: Mapping[str, Any]) -> "Results":
        """Start a results directory; it may exist, but not with results in it."""
        if (directory / METADATA).exists():
            raise ResultsError(f"{directory / METADATA}: exists")
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / METADATA, to_json(metadata))
        return cls(directory)

    @property
    def planned(self) -> list[Cell]:
        """Every cell of the comparison, in the order of scenarios, schedulers and seeds."""
        return [
            Cell(scenario, scheduler, seed)
            for scenario in self.metadata["scenarios"]
            for scheduler in self.metadata["schedulers"]
            for seed in self.metadata["seeds"]
        ]

    def is_finished(self, cell: Cell) -> bool:
        """Whether the cell was run successfully."""
        return self._path(cell, ".json").exists()

    @property
    def cells(self) -> pd.DataFrame:
        """A row for each finished cell: scenario, scheduler, seed, and a column for each metric."""
        rows = []
        for cell in self.planned:
            path = self._path(cell, ".json")
            if not path.exists():
                continue
            try:
                metrics = json.loads(path.read_text(encoding="utf-8"))
                check_columns(metrics)
            except (ValueError, TypeError) as error:
                raise ResultsError(f"{path}: not the metrics of a cell: {error}") from error
            rows.append({**cell._asdict(), **{name: _number(metrics[name]) for name in METRICS}})
        return pd.DataFrame(rows, columns=[*Cell._fields, *METRICS])

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The cells that failed: scenario, scheduler, seed, error (a traceback)."""
        return [
            {**cell._asdict(), "error": json.loads(path.read_text(encoding="utf-8"))["error"]}
            for cell in self.planned
            if (path := self._path(cell, ".error.json")).exists()
        ]

    def requests(self, scenario: str, scheduler: str, seed: int) -> pd.DataFrame:
        """What happened to each request of a finished cell, in order of arrival."""
        path = self._path(Cell(scenario, scheduler, seed), ".parquet")
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path}: cannot be read: {error}") from error

    def write_cell(self, cell: Cell, metrics: Mapping[str, float], requests: pd.DataFrame) -> None:
        """Keep a finished cell; a failure kept for it before is forgotten."""
        check_columns(metrics)
        path = self._path(cell, ".parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, requests[list(REQUEST_COLUMNS)].to_parquet(index=False))
        write_atomically(self._path(cell, ".json"), to_json(metrics))
        self._path(cell, ".error.json").unlink(missing_ok=True)

    def write_failure(self, cell: Cell, error: str) -> None:
        """Keep the traceback of a cell that failed."""
        path = self._path(cell, ".error.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json({"error": error}))

    def write_table(self) -> Path:
        """All finished cells as CSV, without what differs from run to run; returns its path."""
        varying = [metric.name for metric in METRICS.values() if not metric.is_deterministic]
        text = self.cells.drop(columns=varying).to_csv(index=False, lineterminator="\n")
        write_atomically(self.directory / TABLE, text.encode())
        return self.directory / TABLE

    def _path(self, cell: Cell, suffix: str) -> Path:
        folder = self.directory / CELLS / file_name(cell.scenario) / file_name(cell.scheduler)
        return folder / f"{cell.seed}{suffix}"


def file_name(label: str) -> str:
    """A label as the name of a file; labels are checked to be distinct as such."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", label)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all, also if the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def to_json(data: Mapping[str, Any]) -> bytes:
    """Readable JSON; NaN, which JSON does not know, becomes null."""
    plain = {key: None if isinstance(value, float) and value != value else value for key, value in data.items()}
    return (json.dumps(plain, indent=2, allow_nan=False) + "\n").encode()


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
