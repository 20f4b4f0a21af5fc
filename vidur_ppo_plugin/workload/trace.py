"""Traces: when requests came and how long they were, from a CSV file; every error names the line and the column.

The columns are recognised by their names: those of Vidur's traces (Time, PromptTokenCount, CompletionTokenCount; or
arrived_at, num_prefill_tokens, num_decode_tokens) and of Azure's (TIMESTAMP, ContextTokens, GeneratedTokens). Other
columns are ignored. Times are seconds or dates with time; they must not decrease. A record of `vidur-ppo serve` is a
trace as well.
"""

import csv
import math
import re
from datetime import datetime
from pathlib import Path

import numpy as np

from .recorded import is_record, read_recorded
from .requests import Requests

TIME_COLUMNS = ("arrived_at_s", "arrived_at", "time", "timestamp")
PROMPT_COLUMNS = ("prompt_tokens", "num_prefill_tokens", "prompttokencount", "contexttokens")
DECODE_COLUMNS = ("decode_tokens", "num_decode_tokens", "completiontokencount", "generatedtokens")

# Azure writes seven digits; Python reads six.
_FRACTION = re.compile(r"(\.\d{6})\d+")


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, line and column."""


def read_trace(path: Path) -> Requests:
    """A trace with arrival times, at least two of them different."""
    trace = _read(path, with_times=True)
    if len(trace) < 2 or trace.arrived_at_s[-1] == trace.arrived_at_s[0]:
        raise TraceError(f"{path}: needs requests at two different times at least, has {len(trace)} requests")
    return trace


def read_lengths(path: Path) -> Requests:
    """Only the lengths of a file."""
    trace = _read(path, with_times=False)
    if len(trace) == 0:
        raise TraceError(f"{path}: has no requests")
    return trace


def _read(path: Path, *, with_times: bool) -> Requests:
    if not is_record(path):
        return _Rows(path, with_times=with_times).read()
    try:
        return read_recorded(path)
    except ValueError as error:
        raise TraceError(str(error)) from error


class _Rows:
    """Reads one file; keeps where it is for the messages."""

    def __init__(self, path: Path, *, with_times: bool) -> None:
        self._path = path
        self._with_times = with_times
        self._line = 1

    def read(self) -> Requests:
        times: list[float] = []
        prompts: list[int] = []
        decodes: list[int] = []
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file)
                columns = self._columns(next(reader, []))
                for row in reader:
                    self._line = reader.line_num
                    if not row:
                        continue
                    prompts.append(self._tokens(row, *columns[1]))
                    decodes.append(self._tokens(row, *columns[2]))
                    if self._with_times:
                        times.append(self._time(row, *columns[0], times[-1] if times else -math.inf))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"{self._path}: cannot be read: {error}") from error
        return Requests(np.array(times), np.array(prompts, np.int64), np.array(decodes, np.int64))

    def _columns(self, header: list[str]) -> list[tuple[int, str]]:
        names = [name.strip().lower() for name in header]
        found = []
        for purpose, accepted in (("arrival", TIME_COLUMNS), ("prompt", PROMPT_COLUMNS), ("output", DECODE_COLUMNS)):
            matches = [names.index(name) for name in accepted if name in names]
            if not matches and (purpose != "arrival" or self._with_times):
                raise TraceError(
                    f"{self._path}:1: no column for the {purpose}: expected one of {', '.join(accepted)} "
                    f"(in any case), got {', '.join(header) or 'an empty file'}"
                )
            found.append((matches[0], header[matches[0]]) if matches else (-1, ""))
        return found

    def _cell(self, row: list[str], index: int, name: str) -> str:
        if index >= len(row):
            raise self._error(name, f"is missing: the line has {len(row)} fields")
        return row[index].strip()

    def _tokens(self, row: list[str], index: int, name: str) -> int:
        text = self._cell(row, index, name)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Azure's traces contain requests without output tokens: such a request still costs one.
        if not (0 <= value < 2**53 and value == int(value)):
            raise self._error(name, f"must be a whole number of tokens >= 0, got {text!r}")
        return max(1, int(value))

    def _time(self, row: list[str], index: int, name: str, last_s: float) -> float:
        text = self._cell(row, index, name)
        try:
            value = float(text)
        except ValueError:
            value = self._date(name, text)
        if not math.isfinite(value):
            raise self._error(name, f"must be a finite time, got {text!r}")
        if value < last_s:
            raise self._error(name, f"must not be before the line above, got {text!r}")
        return value

    def _date(self, name: str, text: str) -> float:
        try:
            return datetime.fromisoformat(_FRACTION.sub(r"\1", text)).timestamp()
        except ValueError:
            raise self._error(name, f"must be seconds or a date with time, got {text!r}") from None

    def _error(self, name: str, problem: str) -> TraceError:
        return TraceError(f"{self._path}:{self._line}: column {name!r} {problem}")
