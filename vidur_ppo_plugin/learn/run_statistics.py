"""What a run of `ppo_modular` has achieved: of the window since the last update, and as a whole."""

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vidur_ppo_plugin.clusters.cluster import Completion
from vidur_ppo_plugin.clusters.drive import Arrival, Listener
from vidur_ppo_plugin.record.histogram import LogHistogram
from vidur_ppo_plugin.record.metrics import MAX_REPLICA_COLUMNS
from vidur_ppo_plugin.record.outcome import Distribution

# Weight of the newest completion in the latency that progress shows.
_RECENT_WEIGHT = 0.05


class RunStatistics(Listener):
    """Latencies, throughput, shares and where the wall-clock time went."""

    def __init__(self, *, num_replicas: int, num_decisions: int = 0, has_windows: bool = True) -> None:
        """`num_decisions`: made in runs before, by a learner that was resumed.

        `has_windows`: whether `take_window` will be called; what it needs would pile up otherwise.
        """
        self._num_replicas = num_replicas
        self._has_windows = has_windows
        self._started_s = time.perf_counter()
        self._deciding_s = self._learning_s = self._updating_s = 0.0
        self._window_started_s = 0.0
        self._window: list[tuple[float, float, float, int]] = []
        # Constant memory: a run may have millions of requests.
        self._latencies_s, self._ttfts_s = LogHistogram(), LogHistogram()
        self._decode_tokens = 0
        self._batches = (0, 0)
        # Decisions of the window and of those before it.
        self._actions: Counter[int] = Counter()
        self._shares: Counter[int] = Counter()
        self.num_decisions = num_decisions
        self._last_completion_s = 0.0
        self.recent_latency_s: float | None = None
        self.window_latency_s = 0.0
        self.entropy: float | None = None

    def add_deciding(self, seconds: float) -> None:
        """Wall-clock time in which requests were placed; updates that happened in it count as learning."""
        self._deciding_s += seconds - self._updating_s
        self._learning_s += self._updating_s
        self._updating_s = 0.0

    def add_update(self, seconds: float) -> None:
        """Wall-clock time of an update, which happens while a request is placed."""
        self._updating_s += seconds

    def on_decision(self, arrival: Arrival, replica: int) -> None:
        """A request was placed."""
        self.num_decisions += 1
        self._actions[replica] += 1

    def on_completions(self, completions: Sequence[Completion]) -> None:
        """Requests were completed."""
        for done in completions:
            latency_s, ttft_s = done.latency_s, done.ttft_s
            if self._has_windows:
                between_s = (done.completed_at_s - done.first_token_at_s) / max(1, done.decode_tokens - 1)
                self._window.append((latency_s, ttft_s, between_s, done.decode_tokens))
            self._latencies_s.add(latency_s)
            self._ttfts_s.add(ttft_s)
            self._decode_tokens += done.decode_tokens
            self._last_completion_s = done.completed_at_s
            recent_s = latency_s if self.recent_latency_s is None else self.recent_latency_s
            self.recent_latency_s = recent_s + _RECENT_WEIGHT * (latency_s - recent_s)

    def take_window(self, now_s: float, batch_counts: tuple[int, int]) -> dict[str, float]:
        """The metrics of the window that ends now, by their recorded names; `batch_counts` are the cluster's."""
        window = np.array(self._window).reshape(-1, 4)
        duration_s = max(1e-9, now_s - self._window_started_s)
        row = {
            "throughput_requests": len(window) / duration_s,
            "throughput_tokens": float(window[:, 3].sum()) / duration_s,
            **self._shares_row(),
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
        batches, requests = (now - before for now, before in zip(batch_counts, self._batches, strict=True))
        if batches:
            row["batch_size"] = requests / batches
        self._batches = batch_counts
        self._window, self._window_started_s = [], now_s
        return row

    def _shares_row(self) -> dict[str, float]:
        actions, self._actions = self._actions, Counter()
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

    def summary(self, num_updates: int) -> str:
        """The whole run as a table for people."""
        self._shares.update(self._actions)
        total = max(1, sum(self._shares.values()))
        shares = [self._shares[index] / total for index in range(self._num_replicas)]
        lines = [f"{'seconds':<22}{'mean':>9}{'P50':>9}{'P90':>9}{'P99':>9}"]
        for name, values in (("time to first token", self._ttfts_s), ("end-to-end latency", self._latencies_s)):
            d = values.distribution()
            lines.append(f"{name:<22}{d.mean:>9.3f}{d.p50:>9.3f}{d.p90:>9.3f}{d.p99:>9.3f}")
        duration_s = max(1e-9, self._last_completion_s)
        wall = self._wall_shares()
        if self._num_replicas <= 8:
            share_text = " ".join(f"{share:.1%}" for share in shares)
        else:
            share_text = f"{min(shares):.1%} to {max(shares):.1%} of {self._num_replicas} replicas"
        lines += [
            f"{'throughput':<22}{self._latencies_s.count / duration_s:.2f} requests/s, "
            f"{self._decode_tokens / duration_s:.0f} output tokens/s",
            f"{'share of requests':<22}{share_text}",
            f"{'updates, decisions':<22}{num_updates}, {self.num_decisions}",
            f"{'wall-clock time':<22}simulating {wall['time_simulating_share']:.0%}, "
            f"deciding {wall['time_deciding_share']:.0%}, learning {wall['time_learning_share']:.0%}",
        ]
        return "\n".join(lines)
