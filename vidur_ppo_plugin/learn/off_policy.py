"""What another policy would have reached on recorded decisions: importance weighting, alone and with a model of costs.

A record has, for each decision, what was seen, what was done and with which probability, and the latency that came of
it. If every replica had a chance (`--explore`), the cost of another policy on the same states can be estimated without
bias: by weights (Horvitz & Thompson 1952), self-normalised (Swaminathan & Joachims 2015), or doubly robust (Dudik,
Langford & Li 2011), where a model of costs takes most of the noise away and weights correct its bias.

What is estimated is one decision at a time: this request placed otherwise, all else decided as it was. What a policy
does to the queues and caches that it meets later is not in a record; a simulation of the recorded workload shows that.
Where weights are worth too few decisions (`LEAST_EFFECTIVE_SIZE`), an estimate is not to be told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from vidur_ppo_plugin.record.decision_log import LoggedDecision
from vidur_ppo_plugin.routing.routers import Router, scored
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo

#: What can be estimated: the name of a figure of `LoggedOutcome`.
COSTS = ("latency_s", "ttft_s")
#: Weights above this are cut: a single decision shall not decide.
MOST_WEIGHT = 50.0
#: Decisions that weights must be worth (`effective_size`) for an estimate to be told. Where they were worth 100 to 150
#: the error was beyond 10 % of the mean in 5 of 100 records of the twin, at 75 to 100 in 9, at 50 to 75 in 11, at 30 to
#: 50 in 26, below 20 in 50: as large as what policies differ by. `python benchmarks/log_evaluation.py` measures it.
LEAST_EFFECTIVE_SIZE = 100.0
_NUM_FOLDS = 5
_RIDGE = 1.0
# Neighbouring decisions share their states: intervals are of the means of blocks.
_BLOCK = 50


@dataclass(frozen=True)
class LoggedDecisions:
    """Recorded decisions that have a cost, in their order."""

    decisions: tuple[LoggedDecision, ...]
    costs: FloatArray

    def __len__(self) -> int:
        return len(self.decisions)

    @property
    def probabilities(self) -> FloatArray:
        """With which probability each recorded action was taken."""
        return np.array([decision.probability for decision in self.decisions])

    @property
    def actions(self) -> NDArray[np.intp]:
        """The replicas that were taken."""
        return np.array([decision.action for decision in self.decisions], dtype=np.intp)

    def part(self, first: int, last: int) -> "LoggedDecisions":
        """The decisions from `first` up to and without `last`."""
        return LoggedDecisions(self.decisions[first:last], self.costs[first:last])


def with_costs(decisions: Sequence[LoggedDecision], cost: str = "latency_s") -> LoggedDecisions:
    """The decisions whose cost is known; ValueError if there are too few, or other actions had no chance."""
    if cost not in COSTS:
        raise ValueError(f"the cost must be one of {', '.join(COSTS)}, got {cost!r}")
    kept = tuple(d for d in decisions if d.outcome.status == "ok" and getattr(d.outcome, cost) is not None)
    if len(kept) < 2 * _BLOCK:
        raise ValueError(f"the record has {len(kept)} decisions with {cost}, at least {2 * _BLOCK} are needed")
    logged = LoggedDecisions(kept, np.array([getattr(decision.outcome, cost) for decision in kept], dtype=np.float64))
    has_choice = np.array([_num_open(decision.snapshot) > 1 for decision in kept])
    if not np.any(has_choice & (logged.probabilities < 1.0)):
        raise ValueError(
            "every recorded action had probability 1, so nothing is known of others: record with --explore 0.05 or so"
        )
    return logged


def probabilities_of(router: Router, logged: LoggedDecisions) -> list[FloatArray]:
    """The probability with which a policy takes each replica, for each decision."""
    result, members = [], None
    for decision in logged.decisions:
        if decision.backends != members:
            members = decision.backends
            if hasattr(router, "reset"):
                router.reset()
        choice = scored(router, decision.snapshot, decision.request)
        shares = np.zeros(decision.snapshot.num_replicas)
        if choice.scores is None:
            shares[choice.replica] = 1.0
        else:
            shares[choice.scores == choice.scores[choice.replica]] = 1.0
        result.append(shares / shares.sum())
    return result


# --- A model of costs ---


def cost_features(snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
    """What the cost on each replica depends on, [replicas, figures]: size, load there, and how fast it has been."""
    figures = (
        snapshot.outstanding_requests,
        snapshot.waiting_requests,
        snapshot.prefill_tokens,
        snapshot.context_tokens,
        snapshot.recent_latency_s,
        snapshot.token_time_s,
        snapshot.oldest_wait_s,
    )
    columns = [np.log1p(np.maximum(figure, 0.0)) for figure in figures]
    prompt = np.full(snapshot.num_replicas, np.log1p(request.prompt_tokens))
    load = np.log1p(snapshot.prefill_tokens + request.prompt_tokens) * (1.0 + 50.0 * snapshot.token_time_s)
    linear = (snapshot.prefill_tokens + request.prompt_tokens) / 4096.0
    return np.stack([np.ones(snapshot.num_replicas), prompt, load, linear, *columns, prompt * columns[5]], axis=1)


class CostModel:
    """Ridge regression of costs on `cost_features`."""

    def __init__(self, features: FloatArray, costs: FloatArray) -> None:
        self._mean: FloatArray = features.mean(axis=0)
        self._scale: FloatArray = np.maximum(features.std(axis=0), 1e-9)
        self._offset = float(costs.mean())
        x = self._scaled(features)
        gram = x.T @ x + _RIDGE * np.eye(x.shape[1])
        self._weights = np.linalg.solve(gram, x.T @ (costs - self._offset)).astype(np.float64)

    def __call__(self, features: FloatArray) -> FloatArray:
        result: FloatArray = self._scaled(features) @ self._weights + self._offset
        return result

    def _scaled(self, features: FloatArray) -> FloatArray:
        scaled: FloatArray = (features - self._mean) / self._scale
        return scaled


def modelled_costs(logged: LoggedDecisions) -> list[FloatArray]:
    """The modelled cost of each replica, for each decision; the model has not seen the decision's own outcome."""
    features = [cost_features(decision.snapshot, decision.request) for decision in logged.decisions]
    taken = np.stack([rows[action] for rows, action in zip(features, logged.actions, strict=True)])
    # Whole stretches of time are left out: neighbours know too much of each other.
    fold = np.arange(len(logged)) * _NUM_FOLDS // len(logged)
    models = [CostModel(taken[fold != index], logged.costs[fold != index]) for index in range(_NUM_FOLDS)]
    return [models[index](rows) for index, rows in zip(fold, features, strict=True)]


# --- Estimates ---


@dataclass(frozen=True)
class Estimate:
    """The mean cost of a policy on the recorded states, and how it compares with what was recorded."""

    #: Mean of the recorded costs.
    recorded: float
    #: Self-normalised and doubly robust estimates of the policy's mean cost.
    self_normalised: float
    doubly_robust: float
    #: The doubly robust one minus the recorded mean, and its 95 % interval.
    difference: float
    low: float
    high: float
    #: Share of decisions in which the policy would have done the same, and of how many decisions the weights are worth.
    agreement: float
    effective_size: float
    num_decisions: int

    @property
    def why_unknown(self) -> str | None:
        """Why the record cannot tell how the policy would do; None if it can."""
        if self.effective_size >= LEAST_EFFECTIVE_SIZE:
            return None
        text = (
            f"{self.num_decisions:,} recorded decisions are worth {self.effective_size:.0f} for this policy, at least "
            f"{LEAST_EFFECTIVE_SIZE:.0f} are needed"
        )
        if self.effective_size:
            times = LEAST_EFFECTIVE_SIZE / self.effective_size
            text += f": some {times:.1f} times as many, or a larger --explore"
        return text


def robust_values(logged: LoggedDecisions, modelled: Sequence[FloatArray], shares: Sequence[FloatArray]) -> FloatArray:
    """The doubly robust cost of each decision: the model's under the policy, plus the weighted error of the model."""
    weights = importance_weights(logged, shares)
    expected = np.array([float(share @ costs) for share, costs in zip(shares, modelled, strict=True)])
    at_action = np.array([costs[action] for costs, action in zip(modelled, logged.actions, strict=True)])
    values: FloatArray = expected + weights * (logged.costs - at_action)
    return values


def importance_weights(logged: LoggedDecisions, shares: Sequence[FloatArray]) -> FloatArray:
    """How much more likely the policy takes the recorded action than the recorded policy did."""
    taken = np.array([share[action] for share, action in zip(shares, logged.actions, strict=True)])
    return np.minimum(taken / logged.probabilities, MOST_WEIGHT)


def estimate(logged: LoggedDecisions, shares: Sequence[FloatArray]) -> Estimate:
    """Estimated cost of a policy that takes the replicas with the probabilities `shares`."""
    weights = importance_weights(logged, shares)
    values = robust_values(logged, modelled_costs(logged), shares)
    difference = values - logged.costs
    low, high = block_interval(difference)
    total = float(weights.sum())
    return Estimate(
        recorded=float(logged.costs.mean()),
        self_normalised=float(weights @ logged.costs) / total if total else float("nan"),
        doubly_robust=float(values.mean()),
        difference=float(difference.mean()),
        low=low,
        high=high,
        agreement=float(np.mean(weights > 0)),
        effective_size=effective_size(weights),
        num_decisions=len(logged),
    )


def effective_size(weights: FloatArray) -> float:
    """How many decisions the importance weights are worth.

    (sum w)^2 / sum w^2 (Kish 1965), times (mean w)^2 where that is below 1, which it is in the mean of many records:
    the missing weight is that of decisions that the record happens not to show, and Kish's figure alone does not miss
    them. A policy that does otherwise in most decisions and was never seen to would seem well known by the few others.
    """
    squares = float(weights @ weights)
    if not squares:
        return 0.0
    return float(weights.sum()) ** 2 / squares * min(1.0, float(weights.mean())) ** 2


def block_interval(values: FloatArray, *, level: float = 0.95) -> tuple[float, float]:
    """An interval of the mean by Student's t over the means of blocks of decisions in a row (batch means)."""
    means = np.array([block.mean() for block in np.array_split(values, max(2, len(values) // _BLOCK))])
    num_blocks = len(means)
    quantile = float(stdtrit(num_blocks - 1, 0.5 + level / 2.0))
    half, middle = quantile * float(means.std(ddof=1)) / num_blocks**0.5, float(values.mean())
    return middle - half, middle + half


def _num_open(snapshot: ClusterSnapshot) -> int:
    return snapshot.num_replicas if snapshot.available is None else int(np.count_nonzero(snapshot.available))
