"""The metrics of an update: the columns that a run of `ppo_modular` records too, and the evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.record.metrics import MAX_REPLICA_COLUMNS, header
from vidur_ppo_plugin.record.outcome import Distribution
from vidur_ppo_plugin.record.recorder import Recorder

from .config import TrainConfig, replica_counts
from .slots import CompletedRequests

METRICS_FILE = "ppo_metrics.csv"


def open_recorder(config: TrainConfig, directory: Path) -> tuple[Recorder, Any]:
    """A recorder, and the W&B run that it writes to (None without one)."""
    options, run = config.record, None
    if options.wandb_project:
        import wandb  # only where it is asked for: it takes a second to import

        run = wandb.init(
            project=options.wandb_project,
            group=options.wandb_group or None,
            name=options.wandb_run_name or None,
            dir=str(directory),
            config={"seed": config.seed, "decisions": config.decisions, "policy": config.policy},
        )
    recorder = Recorder(
        header(replica_counts(config)[-1], with_evaluation=True),
        directory / METRICS_FILE,
        wandb_run=run,
        tensorboard_dir=directory / "tensorboard" if options.tensorboard else None,
    )
    return recorder, run


def served_row(parts: Sequence[CompletedRequests]) -> dict[str, float]:
    """Latencies, throughput and load of all clusters since the last update."""
    latency_s, ttft_s, tbt_s, tokens = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("latency_s", "ttft_s", "tbt_s", "decode_tokens")
    )
    duration_s = sum(part.duration_s for part in parts)
    row = {
        "throughput_requests": len(latency_s) / max(duration_s, 1e-9),
        "throughput_tokens": float(tokens.sum()) / max(duration_s, 1e-9),
        "load_spread": float(np.mean([part.load_spread for part in parts])),
    }
    if len(latency_s):
        for name, values in (("latency", latency_s), ("ttft", ttft_s)):
            distribution = Distribution.of(values.tolist())
            row |= {f"{name}_{key}": getattr(distribution, key) for key in ("mean", "p50", "p90", "p99")}
        del row["ttft_mean"]
        row["tbt_p99"] = float(np.percentile(tbt_s, 99))
    return row


def share_row(actions: Sequence[NDArray[np.integer[Any]]], num_columns: int) -> dict[str, float]:
    """Share of the decisions that each replica got, by its number, over clusters of any size."""
    together = np.concatenate([decided.reshape(-1) for decided in actions])
    shares = np.bincount(together, minlength=num_columns) / len(together)
    if num_columns <= MAX_REPLICA_COLUMNS:
        return {f"action_replica_{index}": float(share) for index, share in enumerate(shares)}
    return {
        "action_share_min": float(shares.min()),
        "action_share_max": float(shares.max()),
        "action_share_std": float(shares.std()),
    }
