"""Records of real decisions: what the router saw, what it did and with which probability, and what came of it.

A record is JSON lines: a header, then a line for each decision, written when its outcome is known (so in the order of
outcomes; `n` counts decisions). It has no content of requests. A line holds the whole snapshot, not the features of one
policy, so any policy can be asked what it would have done.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.workload.recorded import KIND

FORMAT_VERSION = 1


class RecordError(ValueError):
    """A record that cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class LoggedOutcome:
    """The outcome of a decision. Times are from the request's arrival, in seconds; None where it never got so far."""

    #: ok, failed (the backend did), rejected (the backend refused the request), or gone (the client went away).
    status: str
    latency_s: float | None
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoggedDecision:
    """One line of a record: a decision and its outcome."""

    number: int
    snapshot: ClusterSnapshot
    request: RequestInfo
    action: int
    #: With which probability that action was taken, exploration included.
    probability: float
    is_explored: bool
    is_fallback: bool
    backends: tuple[str, ...]
    outcome: LoggedOutcome


def header_line(**facts: Any) -> str:
    """The first line; `facts`: the policy, the share of exploration, and whatever helps later."""
    return _line({"kind": KIND, "format": FORMAT_VERSION, "rows": list(ROWS), **facts})


def decision_line(decision: LoggedDecision) -> str:
    """The line of a decision."""
    snapshot, request = decision.snapshot, decision.request
    available = snapshot.available
    return _line(
        {
            "n": decision.number,
            "t": request.arrived_at_s,
            "prompt_tokens": request.prompt_tokens,
            "since_last_arrival_s": request.since_last_arrival_s,
            "arrival_rate_per_s": request.arrival_rate_per_s,
            "now_s": snapshot.now_s,
            "kv_block_size": snapshot.kv_block_size,
            "expected_decode_tokens": snapshot.expected_decode_tokens,
            "values": snapshot.values.tolist(),
            "waiting": snapshot.waiting.tolist(),
            "available": None if available is None else available.tolist(),
            "backends": list(decision.backends),
            "action": decision.action,
            "p": decision.probability,
            "explored": decision.is_explored,
            "fallback": decision.is_fallback,
            "outcome": asdict(decision.outcome),
        }
    )


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def read_record(path: Path) -> list[LoggedDecision]:
    """All decisions in the order they were made; RecordError names the line that is wrong.

    A last line without its end is what a router that was killed leaves behind: it is left out.
    """
    decisions = sorted(_decisions(path), key=lambda decision: decision.number)
    if not decisions:
        raise RecordError(f"{path}: has no decisions")
    return decisions


def _opened(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["kind"] != KIND:
            raise KeyError
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path}:1: is not a record of `vidur-ppo serve --record`") from None
    if header.get("format") != FORMAT_VERSION or header.get("rows") != list(ROWS):
        raise RecordError(
            f"{path}:1: was written by another version (format {header.get('format')}, {len(header.get('rows', ()))} "
            f"rows); this one reads format {FORMAT_VERSION} with {len(ROWS)} rows"
        )
    return header  # type: ignore[no-any-return]


def _decisions(path: Path) -> Iterator[LoggedDecision]:
    with _opened(path) as file:
        _header(path, file.readline())
        for number, line in enumerate(file, start=2):
            if not line.endswith("\n"):
                return
            try:
                yield _decision(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise RecordError(f"{path}:{number}: is not a decision: {error!r}") from error


def _decision(entry: dict[str, Any]) -> LoggedDecision:
    snapshot = ClusterSnapshot(
        entry["now_s"],
        np.array(entry["values"], dtype=np.float64),
        kv_block_size=entry["kv_block_size"],
        expected_decode_tokens=entry["expected_decode_tokens"],
        waiting=np.array(entry["waiting"], dtype=np.float64).reshape(len(entry["waiting"]), len(entry["backends"])),
    )
    if entry["available"] is not None:
        snapshot.available = np.array(entry["available"], dtype=np.bool_)
    decision = LoggedDecision(
        number=entry["n"],
        snapshot=snapshot,
        request=RequestInfo(
            entry["prompt_tokens"], entry["t"], entry["since_last_arrival_s"], entry["arrival_rate_per_s"]
        ),
        action=entry["action"],
        probability=entry["p"],
        is_explored=entry["explored"],
        is_fallback=entry["fallback"],
        backends=tuple(entry["backends"]),
        outcome=LoggedOutcome(**entry["outcome"]),
    )
    if not 0 <= decision.action < snapshot.num_replicas:
        raise ValueError(f"action must be in 0 ... {snapshot.num_replicas - 1}, got {decision.action}")
    if not 0.0 < decision.probability <= 1.0:
        raise ValueError(f"p must be > 0 and <= 1, got {decision.probability}")
    return decision
