"""Records for the tests: of a cluster of the twin, decided as `serve` decides, with exploration and true outcomes."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vidur_ppo_plugin.record.decision_log import LoggedDecision, decision_line, header_line

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from log_evaluation import World, cluster, one_decision_truth, play, requests

__all__ = ["World", "cluster", "mean_latency", "one_decision_truth", "play", "requests", "write"]


def write(path: Path, decisions: Sequence[LoggedDecision]) -> Path:
    path.write_text(header_line(policy="least_tokens", explore=0.1) + "".join(map(decision_line, decisions)))
    return path


def mean_latency(decisions: Sequence[LoggedDecision]) -> float:
    return float(np.mean([decision.outcome.latency_s for decision in decisions]))
