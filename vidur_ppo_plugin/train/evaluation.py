"""How good the policy is on requests that it was not trained on: paired with the best baseline of each scenario."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.policy.actor import Weights

from .config import TrainConfig
from .engines import Engine
from .episodes import FIRST_EVALUATION_SEED
from .worker import POLICY, EvaluateJob

#: Metrics of a run, one number for each seed.
Figures = dict[str, list[float]]
_REPORTED = ("e2e_mean", "e2e_p99", "ttft_mean")


@dataclass(frozen=True)
class Result:
    """One evaluation: relative changes against the best baseline, paired by seed; below 0 is better."""

    decisions: int
    score: float
    #: Case -> the baseline that is best there, by mean latency. A case is a scenario, followed by @ and the
    #: `tail_preference` where the policy is evaluated at several.
    best_baselines: dict[str, str]
    #: Case -> metric -> mean change over seeds.
    changes: dict[str, dict[str, float]]

    def mean_change(self, metric: str) -> float:
        """Mean relative change of a metric over all cases."""
        return float(np.mean([change[metric] for change in self.changes.values()]))

    def row(self) -> dict[str, float]:
        """The metrics to record."""
        return {"evaluation_score": self.score} | {f"evaluation_{name}": self.mean_change(name) for name in _REPORTED}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in ("decisions", "score", "best_baselines", "changes")}

    def __str__(self) -> str:
        """One line for people."""
        parts = [
            f"{name}: mean {change['e2e_mean']:+.1%}, P99 {change['e2e_p99']:+.1%}, TTFT {change['ttft_mean']:+.1%} "
            f"against {self.best_baselines[name]}"
            for name, change in self.changes.items()
        ]
        return f"evaluation after {self.decisions:,} decisions: score {self.score:+.4f}; {'; '.join(parts)}"


@dataclass
class Evaluator:
    """Runs evaluations; baselines need to be run only once."""

    config: TrainConfig
    engine: Engine
    baselines: dict[str, dict[str, Figures]] = field(default_factory=dict)

    def evaluate(self, weights: Weights, decisions: int) -> Result:
        """Evaluate the policy with these weights, which has made so many decisions."""
        if not self.baselines:
            for name in self.config.evaluation.baselines:
                self.baselines[name] = self._figures(name, None)
        best, changes = {}, {}
        preferences = self.config.evaluation.tail_preferences
        for preference in preferences:
            for scenario, figures in self._figures(POLICY, weights, preference).items():
                case = f"{scenario}@{preference:g}" if len(preferences) > 1 else scenario
                best[case] = self._best_baseline(scenario)
                changes[case] = _changes(figures, self.baselines[best[case]][scenario])
        weight = self.config.evaluation.p99_weight
        score = float(np.mean([change["e2e_mean"] + weight * change["e2e_p99"] for change in changes.values()]))
        return Result(decisions, score, best, changes)

    def _best_baseline(self, scenario: str) -> str:
        return min(self.baselines, key=lambda name: float(np.mean(self.baselines[name][scenario]["e2e_mean"])))

    def _figures(self, router: str, weights: Weights | None, tail_preference: float = BALANCED) -> dict[str, Figures]:
        """Figures of a router, one for each seed: scenario -> metric -> figures."""
        evaluation = self.config.evaluation
        jobs = [
            EvaluateJob(name, router, FIRST_EVALUATION_SEED + seed, evaluation.num_requests, tail_preference)
            for name in self.config.evaluated_scenarios
            for seed in range(evaluation.seeds)
        ]
        figures: dict[str, Figures] = {}
        for job, metrics in zip(jobs, self.engine.run(jobs, weights), strict=True):
            of_scenario = figures.setdefault(job.scenario, {})
            for name, value in metrics.items():
                of_scenario.setdefault(name, []).append(value)
        return figures


def _changes(ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: float(np.mean(np.array(ours[name]) / np.array(theirs[name]) - 1.0)) for name in ours}
