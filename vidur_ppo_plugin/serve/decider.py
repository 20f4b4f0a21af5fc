"""Decides where a request goes: the policy, its fallback, exploration, and what a shadow policy would have done."""

import logging
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.routing.routers import Router, Scored, scored
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo

from .fleet import Backend, Fleet
from .instruments import Instruments
from .policies import build_policy, is_learned
from .settings import SettingsError

logger = logging.getLogger(__name__)

# Seconds between two lines of the log about the same thing.
_LOG_INTERVAL_S = 5.0
#: Waiting requests of each replica that a record shows, at least: as many as policies are usually learned with.
RECORDED_SLOTS = 4


@dataclass(frozen=True)
class Decision:
    """Where a request goes, and why."""

    backend: Backend
    snapshot: ClusterSnapshot
    request: RequestInfo
    action: int
    probability: float
    is_explored: bool
    is_fallback: bool
    members: Sequence[Backend]
    #: What the choice was made by, the highest wins; None where the policy has no scores.
    scores: FloatArray | None


class NamedPolicy:
    """A policy by its name; forgets its trends when the replicas change."""

    def __init__(self, flag: str, name: str, *, seed: int) -> None:
        self.name = name
        try:
            self.router: Router = build_policy(name, seed=seed)
        except ValueError as error:
            raise SettingsError(f"--{flag}: {error}") from error
        self._is_random = name == "random"
        self._members: list[Backend] = []

    @property
    def num_waiting_slots(self) -> int:
        """How many waiting requests of each replica the policy wants to see."""
        return int(getattr(self.router, "num_waiting_slots", 0))

    @property
    def is_learned(self) -> bool:
        """Whether the policy was learned."""
        return is_learned(self.router)

    def choose(self, snapshot: ClusterSnapshot, request: RequestInfo, members: list[Backend]) -> Scored:
        """The chosen replica and the scores of all."""
        if members != self._members:
            self._members = members
            if hasattr(self.router, "reset"):
                self.router.reset()
        return scored(self.router, snapshot, request)

    def probability(self, choice: Scored, action: int, available: NDArray[np.bool_] | None) -> float:
        """Probability of an action where the policy made this choice: only ties and `random` leave it to chance."""
        if self._is_random:
            return _random_share(action, len(self._members), available)
        if choice.scores is None:
            return 1.0 if action == choice.replica else 0.0
        is_best = choice.scores == choice.scores[choice.replica]
        return 1.0 / int(np.count_nonzero(is_best)) if is_best[action] else 0.0


def _random_share(action: int, num_replicas: int, available: NDArray[np.bool_] | None) -> float:
    """`random` draws among all replicas and takes the next open one, which has the share of closed ones before it."""
    num_ways = 1
    while available is not None and num_ways < num_replicas and not available[(action - num_ways) % num_replicas]:
        num_ways += 1
    return num_ways / num_replicas


class Decider:
    """Decides for every request of the router."""

    def __init__(
        self,
        fleet: Fleet,
        instruments: Instruments,
        *,
        policy: NamedPolicy,
        fallback: NamedPolicy,
        shadow: NamedPolicy | None,
        explore: float,
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.shadow = shadow
        self._fleet = fleet
        self._instruments = instruments
        self._fallback = fallback
        self._explore = explore
        self._rng = rng
        self._last_logged_s: dict[str, float] = {}
        #: How often the shadow policy agreed, disagreed and failed.
        self.shadow_counts = {"same": 0, "other": 0, "failed": 0}
        self.num_fallbacks = 0

    def decide(
        self,
        request: RequestInfo,
        now_s: float,
        *,
        model: str = "",
        excluded: Collection[Backend] = (),
        only: Backend | None = None,
    ) -> Decision:
        """Where to send a request; NoBackendError if nowhere. The policy never fails it: if it cannot decide, the
        fallback does, which is counted and logged."""
        started = time.perf_counter()
        members, available = self._fleet.members(now_s, model=model, excluded=excluded, only=only)
        snapshot = self._fleet.source.snapshot(now_s, [backend.replica for backend in members])
        snapshot.available = available
        num_available = len(members) if available is None else int(np.count_nonzero(available))
        is_fallback = False
        try:
            choice = self._checked(self.policy, snapshot, request, members)
        except Exception as error:  # whatever a learned policy or its file does must not fail a request
            is_fallback = True
            self._on_fallback(error, now_s)
            choice = self._checked(self._fallback, snapshot, request, members)
        policy = self._fallback if is_fallback else self.policy
        action, is_explored = choice.replica, bool(self._explore) and self._rng.random() < self._explore
        if is_explored:
            self._instruments.explored.inc()
            open_to = range(len(members)) if available is None else available.nonzero()[0]
            action = int(open_to[self._rng.randrange(num_available)])
        # Both ways to the action count.
        share = policy.probability(choice, action, available)
        probability = (1.0 - self._explore) * share + self._explore / num_available
        self._instruments.decision_seconds.observe(time.perf_counter() - started)
        return Decision(
            members[action], snapshot, request, action, probability, is_explored, is_fallback, members, choice.scores
        )

    def _checked(
        self, policy: NamedPolicy, snapshot: ClusterSnapshot, request: RequestInfo, members: list[Backend]
    ) -> Scored:
        choice = policy.choose(snapshot, request, members)
        if not 0 <= choice.replica < len(members):
            raise ValueError(f"{policy.name} chose replica {choice.replica} of {len(members)}")
        if snapshot.available is not None and not snapshot.available[choice.replica]:
            raise ValueError(f"{policy.name} chose a replica that takes no requests")
        return choice

    def _on_fallback(self, error: Exception, now_s: float) -> None:
        self.num_fallbacks += 1
        self._instruments.fallbacks.inc()
        if self._may_log("fallback", now_s):
            logger.error(
                "policy %s could not decide, %s did (%d times so far): %r",
                self.policy.name,
                self._fallback.name,
                self.num_fallbacks,
                error,
            )

    def ask_shadow(self, decision: Decision, now_s: float) -> None:
        """What the shadow policy would have done with the same snapshot; counted, and logged with the scores."""
        if self.shadow is None:
            return
        members = list(decision.members)
        try:
            choice = self._checked(self.shadow, decision.snapshot, decision.request, members)
        except Exception as error:  # a broken shadow must not touch traffic
            self._count_shadow("failed")
            if self._may_log("shadow failed", now_s):
                logger.warning("shadow policy %s could not decide: %r", self.shadow.name, error)
            return
        is_tied = choice.scores is not None and choice.scores[decision.action] == choice.scores[choice.replica]
        if choice.replica == decision.action or is_tied:  # what is equal to it is no disagreement
            self._count_shadow("same")
            return
        self._count_shadow("other")
        if self._may_log("shadow", now_s):
            logger.info(
                "shadow %s would send a prompt of %d tokens to %s, %s sent it to %s%s; %s; scores of %s: %s; of %s: %s",
                self.shadow.name,
                decision.request.prompt_tokens,
                members[choice.replica].name,
                self.policy.name,
                decision.backend.name,
                " at random" if decision.is_explored else "",
                self.shadow_summary(),
                self.shadow.name,
                _scores(choice.scores, members),
                self._fallback.name if decision.is_fallback else self.policy.name,
                _scores(decision.scores, members),
            )

    def shadow_summary(self) -> str:
        """How often policy and shadow disagree, in words."""
        total = sum(self.shadow_counts.values())
        other = self.shadow_counts["other"]
        return f"{other} of {total} decisions differ, {100.0 * other / max(total, 1):.1f} %"

    def _count_shadow(self, result: str) -> None:
        self.shadow_counts[result] += 1
        self._instruments.shadow.labels(result).inc()

    def _may_log(self, what: str, now_s: float) -> bool:
        last_s = self._last_logged_s.get(what)
        if last_s is not None and now_s - last_s < _LOG_INTERVAL_S:
            return False
        self._last_logged_s[what] = now_s
        return True


def _scores(scores: FloatArray | None, members: Sequence[Backend]) -> str:
    if scores is None:
        return "none"
    pairs = zip(members, scores.tolist(), strict=True)
    return ", ".join(f"{member.name} {score:.4g}" for member, score in pairs)
