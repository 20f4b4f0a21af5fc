"""Learning on from a loaded policy must not lose what it can: every so often the present one is put to a trial.

The trial is a replay of the latest requests in a twin of the cluster, as they came and in other orders, with what was
learned and with the best weights so far (at first the loaded ones), both greedy: what they make of the same traffic.
Weights that prove better, and no worse than the loaded ones in anything, are the best from then on; weights that are
worse are given up for the best. With `serves_best` it is the best weights that decide, so what has not been proved
never serves a request; then a part of what was learned will do, if all of it goes too far. Where no twin covers the
cluster, the gain in credit over the loaded policy, in the states of the rollouts, is judged instead.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .agent import Agent

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
Network = dict[str, Any]


class ReplayedLatencies(NamedTuple):
    """Latencies of the requests of one replay, in order of arrival."""

    latency_s: FloatArray
    first_token_s: FloatArray


#: What would have happened to the latest requests had a network routed them greedily: as they came, and in other
#: orders, the same for every network. None if they are too few.
Replay = Callable[[Network], Sequence[ReplayedLatencies] | None]

# Share of the requests, the slowest, whose mean stands for the tail.
_TAIL_SHARE = 0.05
# The replica queues of a replay are empty at first: this share of its requests is not judged.
_WARM_UP_SHARE = 0.125
# Standard errors beyond which a difference is not noise: a wrong step back costs little, a wrong step forward stays.
_SURE_WORSE, _SURE_BETTER = 1.0, 2.0
# Shares of the way from the best weights to what was learned that are tried, where the learned ones need not serve.
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)


@dataclass(frozen=True)
class Verdict:
    """Relative change of a policy against another, below 0 if it is better, and the standard error of that.

    `worst` is the largest of the changes that `change` weighs, and `surely_worst` the largest that is left of them
    after a standard error of each: no gain makes up for a loss elsewhere.
    """

    change: float
    error: float
    worst: float
    surely_worst: float

    def is_worse(self, tolerance: float) -> bool:
        """Whether the policy is worse beyond noise, as a whole or by more than the tolerance in one figure."""
        return self.change > max(0.0, _SURE_WORSE * self.error) or self.surely_worst > tolerance

    def is_better(self, tolerance: float) -> bool:
        """Whether the policy is better beyond noise, and in no figure worse than the tolerance."""
        return self.change < min(0.0, -_SURE_BETTER * self.error) and self.worst <= tolerance


def judge(ours: Sequence[ReplayedLatencies], theirs: Sequence[ReplayedLatencies], tail_preference: float) -> Verdict:
    """Verdict on replays of the same requests: changes of mean and tail of latency and of time to first token.

    Weighed by the preference, what is won is mean latency and the slowest of both; the mean of first tokens only must
    not be lost.
    """
    figures = [np.array([_figures(*outcome) for outcome in outcomes]) for outcomes in (ours, theirs)]
    return _verdict(figures[0] / figures[1] - 1.0, _weights(tail_preference))


def _figures(latency_s: FloatArray, first_token_s: FloatArray) -> list[float]:
    """Mean and tail of latency and of time to first token, in seconds, in the order of `_weights`; warm-up left out."""
    first = int(_WARM_UP_SHARE * len(latency_s))
    latency_s, first_token_s = latency_s[first:], first_token_s[first:]
    return [latency_s.mean(), _slowest(latency_s), first_token_s.mean(), _slowest(first_token_s)]


def _weights(tail_preference: float) -> FloatArray:
    return np.array([1.0 - tail_preference, 0.5 * tail_preference, 0.0, 0.5 * tail_preference])


def _slowest(values_s: FloatArray) -> float:
    count = max(1, round(_TAIL_SHARE * len(values_s)))
    return float(np.partition(values_s, -count)[-count:].mean())


def _verdict(changes: FloatArray, weights: FloatArray) -> Verdict:
    """The verdict on relative changes [replays, figures], the figures weighed by `weights`."""
    weighed, means = changes @ weights, changes.mean(axis=0)
    surely = means - _SURE_WORSE * _error(changes)
    return Verdict(float(weighed.mean()), float(_error(weighed[:, None])[0]), float(means.max()), float(surely.max()))


def _error(values: FloatArray) -> FloatArray:
    """Standard error of the mean of each column."""
    if len(values) < 2:
        return np.full(values.shape[1], math.inf)
    errors: FloatArray = values.std(axis=0, ddof=1) / math.sqrt(len(values))
    return errors


def can_serve_best(agent: Agent) -> bool:
    """Whether the policy that learns need not act: each action has its credit, and another network can act for it."""
    flags, ppo = agent.flags, agent.ppo
    if not flags.pays_at_once or ppo.network.shape.attention_heads:
        return False
    return flags.guard_serves_best and ppo.parameters.expected_gradient


@dataclass
class PolicyGuard:
    """Keeps the best weights and goes back to them."""

    agent: Agent
    #: None where there is no twin.
    replay: Replay | None
    #: The best weights decide, greedily, while others are learned; needs a replay.
    serves_best: bool = False
    best: Network = field(default_factory=dict)
    loaded: Network = field(default_factory=dict)
    num_reverts: int = 0
    _gains: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the loaded weights for the best so far, unless others are given."""
        self._flags = self.agent.flags
        self.best = self.best or self._present()
        self.loaded = self.loaded or self.best
        self._serve()

    def _serve(self) -> None:
        if self.serves_best:
            self.agent.serve(self.best)

    def _present(self) -> Network:
        return {name: tensor.clone() for name, tensor in self.agent.ppo.network.state_dict().items()}

    @property
    def serving(self) -> Network:
        """The weights that decide."""
        return self.best if self.serves_best else self._present()

    def after_update(self, gain_over_loaded: float | None) -> dict[str, float]:
        """Hold a trial if one is due; the metrics to record. The open rollout must be empty."""
        if gain_over_loaded is not None:
            self._gains.append(gain_over_loaded)
        row = {"guard_reverts": float(self.num_reverts)}
        if self.agent.ppo.num_updates % self._flags.guard_interval:
            return row
        return self._trial() | {"guard_reverts": float(self.num_reverts)}

    def finish(self) -> None:
        """End of the run: what is saved is the best, unless what was learned since has proved better."""
        self._trial(is_last=True)
        self._revert()

    def _trial(self, *, is_last: bool = False) -> dict[str, float]:
        """Promote what was learned or a part of it, or give it up, or wait; the metrics to record."""
        verdict = self._judge_credit() if self.replay is None else self._judge_replays(self.replay)
        if verdict is None:
            return {}
        # Credit compares with the loaded policy, not with the best: it serves to give up, and to judge the whole run.
        if self.replay is None and is_last and verdict.is_better(self._flags.guard_tolerance):
            self.best = self._present()
        if verdict.is_worse(self._flags.guard_tolerance):
            self._give_up(verdict)
        return {"guard_change": verdict.change}

    def _judge_credit(self) -> Verdict | None:
        """Verdict from the credit gained over the loaded policy; None if no gain is known."""
        gains, self._gains = self._gains, []
        return _verdict(-np.array(gains)[:, None], np.ones(1)) if gains else None

    def _judge_replays(self, replay: Replay) -> Verdict | None:
        """Verdict on what was learned, or on the part of it that becomes the best; None with too few requests."""
        of_best = replay(self.best)
        if of_best is None:
            return None
        of_loaded = of_best if self.best is self.loaded else replay(self.loaded)
        learned, verdicts = self._present(), []
        for share in _SHARES if self.serves_best else _SHARES[:1]:
            candidate = {name: torch.lerp(self.best[name], learned[name], share) for name in learned}
            outcome = replay(candidate)
            assert outcome is not None and of_loaded is not None  # there are as many requests as for the best
            verdicts.append(judge(outcome, of_best, self._flags.tail_preference))
            # Small losses that were borne one after the other must not add up.
            since_loaded = judge(outcome, of_loaded, self._flags.tail_preference)
            if (
                verdicts[-1].is_better(self._flags.guard_tolerance)
                and since_loaded.worst <= self._flags.guard_tolerance
            ):
                self.best = candidate
                self._serve()
                self._revert()
                return verdicts[-1]
        return verdicts[0]

    def _give_up(self, verdict: Verdict) -> None:
        self._revert()
        self.num_reverts += 1
        logger.info(
            "what was learned was %+.2f %% +- %.2f %% against the best so far (%+.2f %% in the worst figure), which "
            "takes its place again",
            100 * verdict.change,
            100 * verdict.error,
            100 * verdict.worst,
        )

    def _revert(self) -> None:
        self.agent.restore_policy(self.best)

    def state_dict(self) -> dict[str, Any]:
        """Best and loaded weights and the count of reverts, for a checkpoint."""
        return {"best": self.best, "loaded": self.loaded, "num_reverts": self.num_reverts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.best, self.num_reverts = dict(state["best"]), state["num_reverts"]
        # One that was written before there was this entry: what it had proved is where it starts from.
        self.loaded = dict(state.get("loaded", self.best))
        self._serve()
