"""What happened in a run: per request, and as a summary for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RequestOutcome:
    """One request: what it was, where it went, and when it was served (None: not by the end of the run)."""

    arrived_at_s: float
    prompt_tokens: int
    decode_tokens: int
    replica: int | None
    first_token_at_s: float | None
    completed_at_s: float | None
    num_restarts: int
    scheduled_at_s: float | None = None


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """Mean and percentiles of a sample; all NaN if it is empty."""
        if len(values) == 0:
            return cls(*[float("nan")] * 4)
        array = np.asarray(values)
        p50, p90, p99 = np.percentile(array, [50, 90, 99])
        return cls(float(array.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True)
class RunOutcome:
    """A whole run: its requests, and what the summary needs besides."""

    scheduler: str
    num_replicas: int
    wall_s: float
    output_dir: str
    requests: list[RequestOutcome]
    #: Wall-clock seconds spent on placement decisions.
    decision_s: float = 0.0

    @property
    def completed(self) -> list[RequestOutcome]:
        """The requests that were completed."""
        return [request for request in self.requests if request.completed_at_s is not None]

    @property
    def e2e_s(self) -> Distribution:
        """End-to-end latency of the completed requests."""
        return self._distribution(lambda r: r.completed_at_s)

    @property
    def ttft_s(self) -> Distribution:
        """Time to first token of the completed requests."""
        return self._distribution(lambda r: r.first_token_at_s)

    def _distribution(self, moment: Callable[[RequestOutcome], float | None]) -> Distribution:
        return Distribution.of([(moment(r) or 0.0) - r.arrived_at_s for r in self.completed])

    @property
    def duration_s(self) -> float:
        """Simulated seconds from the first arrival to the last completion."""
        if not self.completed:
            return 0.0
        return max(r.completed_at_s or 0.0 for r in self.completed) - self.requests[0].arrived_at_s

    @property
    def replica_shares(self) -> list[float]:
        """Fraction of the placed requests that each replica got."""
        placed = [r.replica for r in self.requests if r.replica is not None]
        return [placed.count(index) / max(1, len(placed)) for index in range(self.num_replicas)]


def format_summary(outcome: RunOutcome) -> str:
    """The result of a run as a table for people."""
    completed, duration_s = outcome.completed, outcome.duration_s
    tokens = sum(r.decode_tokens for r in completed)
    preemptions = sum(r.num_restarts for r in outcome.requests)
    shares = outcome.replica_shares
    if outcome.num_replicas <= 8:
        share_text = " ".join(f"{share:.1%}" for share in shares)
    else:
        share_text = f"{min(shares):.1%} to {max(shares):.1%} of {outcome.num_replicas} replicas"
    lines = [
        f"Result: scheduler {outcome.scheduler}, {len(completed)} of {len(outcome.requests)} requests completed "
        f"on {outcome.num_replicas} replicas",
        "",
        f"{'seconds':<22}{'mean':>9}{'P50':>9}{'P90':>9}{'P99':>9}",
    ]
    for name, d in (("time to first token", outcome.ttft_s), ("end-to-end latency", outcome.e2e_s)):
        lines.append(f"{name:<22}{d.mean:>9.3f}{d.p50:>9.3f}{d.p90:>9.3f}{d.p99:>9.3f}")
    rate = "-"
    if duration_s > 0:
        rate = f"{len(completed) / duration_s:.2f} requests/s, {tokens / duration_s:.0f} output tokens/s"
    lines += [
        "",
        f"{'throughput':<22}{rate}",
        f"{'share of requests':<22}{share_text}",
        f"{'preemptions':<22}{preemptions}",
        f"{'simulated / wall time':<22}{duration_s:.1f} s / {outcome.wall_s:.1f} s",
        f"{'files':<22}{outcome.output_dir}",
    ]
    return "\n".join(lines)
