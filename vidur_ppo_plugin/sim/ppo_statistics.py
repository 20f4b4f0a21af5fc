"""What a run of `ppo_modular` has achieved: of the window since the last update, and as a whole."""

import time
from collections import Counter
from typing import Any

import numpy as np

from vidur_ppo_plugin.learn.agent import Agent
from vidur_ppo_plugin.record.histogram import LogHistogram
from vidur_ppo_plugin.record.metrics import MAX_REPLICA_COLUMNS
from vidur_ppo_plugin.record.outcome import Distribution

from .replica_source import VidurReplicaSource

# Weight of the newest completion in the latency that progress shows.
_RECENT_WEIGHT = 0.05


class RunStatistics:
    """Latencies, throughput, shares and where the wall-clock time went."""

    def __init__(self, *, num_replicas: int, has_windows: bool = True) -> None:
        """`has_windows`: whether `take_window` will be called; what it needs would pile up otherwise."""
        self._num_replicas = num_replicas
        self._has_windows = has_windows
        self._started_s = time.perf_counter()
        self._deciding_s = self._learning_s = 0.0
        self._window_started_s = 0.0
        self._window: list[tuple[float, float, float, int]] = []
        # Constant memory: a run may have millions of requests.
        self._latencies_s, self._ttfts_s = LogHistogram(), LogHistogram()
        self._decode_tokens = 0
        self._batches = (0, 0)
        self._shares: Counter[int] = Counter()
        self.last_completion_s = 0.0
        self.recent_latency_s: float | None = None
        self.window_latency_s = 0.0
        self.entropy: float | None = None

    def add_times(self, *, deciding_s: float, learning_s: float) -> None:
        """Wall-clock time of one decision."""
        self._deciding_s += deciding_s
        self._learning_s += learning_s

    def add_completion(self, request: Any) -> None:
        """A request that just completed."""
        completed_s, first_s = request._completed_at, request._prefill_completed_at
        latency_s = completed_s - request._arrived_at
        decode_tokens = request._num_decode_tokens
        between_s = (completed_s - first_s) / max(1, decode_tokens - 1)
        if self._has_windows:
            self._window.append((latency_s, first_s - request._arrived_at, between_s, decode_tokens))
        self._latencies_s.add(latency_s)
        self._ttfts_s.add(first_s - request._arrived_at)
        self._decode_tokens += decode_tokens
        self.last_completion_s = completed_s
        recent_s = latency_s if self.recent_latency_s is None else self.recent_latency_s
        self.recent_latency_s = recent_s + _RECENT_WEIGHT * (latency_s - recent_s)

    def take_window(self, now_s: float, source: VidurReplicaSource, actions: Counter[int]) -> dict[str, float]:
        """The metrics of the window that ends now, by their recorded names."""
        window = np.array(self._window).reshape(-1, 4)
        duration_s = max(1e-9, now_s - self._window_started_s)
        row = {
            "throughput_requests": len(window) / duration_s,
            "throughput_tokens": float(window[:, 3].sum()) / duration_s,
            **self._shares_row(actions),
            **self._wall_shares(),
        }
        if len(window):
            latency, ttft = Distribution.of(window[:, 0].tolist()), Distribution.of(window[:, 1].tolist())
            self.window_latency_s = latency.mean
            row |= {
                "latency_mean": latency.mean,
                "latency_p50": latency.p50,
                "latency_p90": latency.p90,
                "latency_p99": latency.p99,
            }
            row |= {"ttft_p50": ttft.p50, "ttft_p90": ttft.p90, "ttft_p99": ttft.p99}
            row["tbt_p99"] = float(np.percentile(window[:, 2], 99))
        batches, requests = source.num_batches - self._batches[0], source.num_batched_requests - self._batches[1]
        if batches:
            row["batch_size"] = requests / batches
        self._batches = (source.num_batches, source.num_batched_requests)
        loads = source.snapshot(now_s).outstanding_requests
        row["load_spread"] = float(loads.std())
        self._window, self._window_started_s = [], now_s
        return row

    def _shares_row(self, actions: Counter[int]) -> dict[str, float]:
        total = max(1, sum(actions.values()))
        self._shares.update(actions)
        shares = [actions[index] / total for index in range(self._num_replicas)]
        if self._num_replicas <= MAX_REPLICA_COLUMNS:
            return {f"action_replica_{index}": share for index, share in enumerate(shares)}
        return {
            "action_share_min": min(shares),
            "action_share_max": max(shares),
            "action_share_std": float(np.std(shares)),
        }

    def _wall_shares(self) -> dict[str, float]:
        elapsed_s = max(1e-9, time.perf_counter() - self._started_s)
        deciding, learning = self._deciding_s / elapsed_s, self._learning_s / elapsed_s
        return {
            "time_simulating_share": max(0.0, 1.0 - deciding - learning),
            "time_deciding_share": deciding,
            "time_learning_share": learning,
        }

    def summary(self, agent: Agent) -> str:
        """The whole run as a table for people."""
        self._shares.update(agent.take_action_counts())
        total = max(1, sum(self._shares.values()))
        shares = [self._shares[index] / total for index in range(self._num_replicas)]
        lines = [f"{'seconds':<22}{'mean':>9}{'P50':>9}{'P90':>9}{'P99':>9}"]
        for name, values in (("time to first token", self._ttfts_s), ("end-to-end latency", self._latencies_s)):
            d = values.distribution()
            lines.append(f"{name:<22}{d.mean:>9.3f}{d.p50:>9.3f}{d.p90:>9.3f}{d.p99:>9.3f}")
        duration_s = max(1e-9, self.last_completion_s)
        wall = self._wall_shares()
        if self._num_replicas <= 8:
            share_text = " ".join(f"{share:.1%}" for share in shares)
        else:
            share_text = f"{min(shares):.1%} to {max(shares):.1%} of {self._num_replicas} replicas"
        lines += [
            f"{'throughput':<22}{self._latencies_s.count / duration_s:.2f} requests/s, "
            f"{self._decode_tokens / duration_s:.0f} output tokens/s",
            f"{'share of requests':<22}{share_text}",
            f"{'updates, decisions':<22}{agent.ppo.num_updates}, {agent.num_decisions}",
            f"{'wall-clock time':<22}simulating {wall['time_simulating_share']:.0%}, "
            f"deciding {wall['time_deciding_share']:.0%}, learning {wall['time_learning_share']:.0%}",
        ]
        return "\n".join(lines)
