"""Other schedulers on the very requests of a run: `vidur-ppo run --compare round_robin,least_tokens`.

In the compiled twin where it covers the cluster, which takes a second; otherwise in Vidur, one run after the other.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.record.health import Finding, compare_with
from vidur_ppo_plugin.record.outcome import RequestOutcome, RunOutcome
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.workload.requests import Requests

from .engines import EngineError, play_in_twin, quietly
from .scheduler_router import build_scheduler_router
from .schedulers import ORACLE, SchedulerSpec

# Flags of the schedulers: those of the run are not those of who it is compared with.
_SCHEDULER_FLAG = "_global_scheduler_"


def run_on_same_requests(
    outcome: RunOutcome, arguments: Sequence[str], schedulers: Sequence[SchedulerSpec]
) -> list[RunOutcome]:
    """What each scheduler makes of the requests of a run, given the run's own command line."""
    return [_SameRequestsRun(outcome, arguments, scheduler).run() for scheduler in schedulers]


class _SameRequestsRun:
    """One scheduler on the requests of a run."""

    def __init__(self, outcome: RunOutcome, arguments: Sequence[str], scheduler: SchedulerSpec) -> None:
        from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
        from vidur_ppo_plugin.sim.launch import parse

        self._outcome = outcome
        self._scheduler = scheduler
        with quietly(arguments) as quiet:
            config = parse(quiet)
        self._seed = config.seed
        self._run_flags = config.cluster_config.global_scheduler_config
        kind = SchedulerSpec("", "round_robin") if scheduler.kind == ORACLE else scheduler
        flags = kind.vidur_flags(self._seed, **({} if kind.kind in STOCK else self._hidden()))
        self._arguments = [*without_scheduler_flags(arguments), *to_arguments(flags, known_flags())]

    def _hidden(self) -> dict[str, Any]:
        """The flags that hide from the scheduler what the router of the run does not see either."""
        names = ("report_delay_s", "drained")
        return {name: value for name in names if (value := getattr(self._run_flags, name, None))}

    def _visibility(self) -> Visibility:
        if not hasattr(self._run_flags, "drained"):
            return Visibility()
        return Visibility.from_flags(self._run_flags, self._outcome.num_replicas)

    def run(self) -> RunOutcome:
        """Run the scheduler, in the twin if the twin covers it, otherwise in Vidur."""
        from vidur_ppo_plugin.sim.launch import parse
        from vidur_ppo_plugin.sim.twin_config import twin_config

        outcome, scheduler = self._outcome, self._scheduler
        with quietly(self._arguments) as arguments:
            config = parse(arguments)
            try:
                cluster = twin_config(config)
            except ValueError as error:
                if scheduler.kind == ORACLE:
                    raise EngineError(f"--compare {scheduler.label}: {error}") from error
                return self._in_vidur(arguments)
            # The twin has no time limit: a run that was cut short is compared in Vidur, which cuts the others too.
            if len(outcome.completed) < len(outcome.requests) or scheduler.is_learning:
                return self._in_vidur(arguments)
            return self._in_twin(cluster, config)

    def _in_twin(self, cluster: TwinConfig, config: Any) -> RunOutcome:
        requests, started_s = requests_of(self._outcome), time.perf_counter()
        done, deciding_s = play_in_twin(cluster, config, requests, self._scheduler, self._visibility(), self._seed)
        columns = (
            requests.arrived_at_s,
            requests.prompt_tokens,
            requests.decode_tokens,
            done.replica,
            done.first_token_at_s,
            done.completed_at_s,
            done.num_restarts,
            done.scheduled_at_s,
        )
        return RunOutcome(
            scheduler=self._scheduler.label,
            num_replicas=self._outcome.num_replicas,
            wall_s=time.perf_counter() - started_s,
            output_dir="",
            requests=[RequestOutcome(*row) for row in zip(*(column.tolist() for column in columns), strict=True)],
            decision_s=deciding_s,
        )

    def _in_vidur(self, arguments: list[str]) -> RunOutcome:
        from dataclasses import replace

        from vidur_ppo_plugin.sim.launch import run
        from vidur_ppo_plugin.sim.schedulers import replace_router

        seen = self._visibility()

        def replace_stock_scheduler(simulator: Any, config: Any) -> None:
            replace_router(simulator, config, build_scheduler_router(self._scheduler, config, seed=self._seed)[0], seen)

        is_told_less = self._scheduler.kind in STOCK and not seen.is_clear
        outcome = run(arguments, replace_stock_scheduler if is_told_less else None)
        return replace(outcome, scheduler=self._scheduler.label, output_dir="")


def health_of(outcome: RunOutcome, arguments: Sequence[str]) -> list[Finding]:
    """How a run that learned did against random, round_robin and its prior, on the requests of its second half.

    Nothing for other runs, and for one that was cut short.
    """
    from vidur_ppo_plugin.sim.launch import parse

    with quietly(arguments) as quiet:
        flags = parse(quiet).cluster_config.global_scheduler_config
    is_learning = isinstance(flags, PPOModularFlags) and not (flags.inference_only or flags.demonstrate_with)
    if not is_learning or len(outcome.completed) < len(outcome.requests):
        return []
    prior = flags.prior.removeprefix("log_")
    names = ["random", "round_robin", *([prior] if prior in HEURISTICS else [])]
    others = run_on_same_requests(outcome, arguments, [SchedulerSpec(name, name) for name in names])
    latencies_s = {one.scheduler: _second_half(one) for one in others}
    return compare_with(_second_half(outcome), latencies_s, prior)


def _second_half(outcome: RunOutcome) -> float:
    """Mean latency of the requests that arrived last."""
    completed = outcome.requests[len(outcome.requests) // 2 :]
    return float(np.mean([(row.completed_at_s or math.nan) - row.arrived_at_s for row in completed]))


def without_scheduler_flags(arguments: Sequence[str]) -> list[str]:
    """A command line of Vidur without the flags of global schedulers, their type included, and their values."""
    kept: list[str] = []
    is_kept = True
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            is_kept = _SCHEDULER_FLAG not in name and "--global_scheduler_config" not in name
        if is_kept:
            kept.append(argument)
    return kept


def requests_of(outcome: RunOutcome) -> Requests:
    """The requests of a run, in order of arrival."""
    rows = outcome.requests
    return Requests(
        np.array([row.arrived_at_s for row in rows]),
        np.array([row.prompt_tokens for row in rows], np.int64),
        np.array([row.decode_tokens for row in rows], np.int64),
    )


def format_comparison(outcome: RunOutcome, others: Sequence[RunOutcome]) -> str:
    """The run and the others as a table for people: seconds, and how much less or more the run has."""
    width = max(len(one.scheduler) for one in (outcome, *others)) + 2
    lines = [
        f"On the same {len(outcome.requests)} requests, in seconds; in parentheses what {outcome.scheduler} changes",
        "",
        f"{'':<{width}}{'time to first token':^38}{'end-to-end latency':^38}".rstrip(),
        f"{'scheduler':<{width}}" + "".join(f"{name:>9}{'':10}" for name in ("mean", "P99") * 2).rstrip(),
    ]
    ours = _figures(outcome)
    for one in (outcome, *others):
        cells = []
        for own, value in zip(ours, _figures(one), strict=True):
            change = "" if one is outcome else f"({100 * (own / value - 1):+.1f} %)"
            cells.append(f"{value:>9.3f}{change:>10}")
        lines.append(f"{one.scheduler:<{width}}" + "".join(cells).rstrip())
    return "\n".join(lines)


def _figures(outcome: RunOutcome) -> tuple[float, float, float, float]:
    return outcome.ttft_s.mean, outcome.ttft_s.p99, outcome.e2e_s.mean, outcome.e2e_s.p99
