"""What `vidur-ppo evaluate-log` says of a record, beside what is true: where it can tell, and what it cannot see.

    python benchmarks/log_evaluation.py [--logs 8] [--sizes 300,1200,4800] [--explore 0.05,0.1,0.3] [--fleets 1/0.4,…]
        [--recorders least_tokens,pretrained] [--targets …] [--forks 600] [--runs 10] [--jobs N] [--json]

Clusters of the twin serve requests with a policy that explores, as `vidur-ppo serve --record --explore` does; other
policies are evaluated on the records, and compared with two truths:

- of one decision: at moments of other records the cluster is copied, the request placed on each replica, and the
  recorded policy goes on until it is served. That is what a record can show, and what the intervals promise. It is
  known to a standard error only, which is added to an interval (root of the sum of squares) to see if it covers;
- of running: the other policy serves the same requests. No estimate from single decisions promises that.

Cases are sorted by how many decisions their weights are worth, also those of which the command would not tell. Each of
`--logs` is a stretch of the largest size, which is cut into records of the smaller ones. `--forks`: decisions that are
copied, for each cluster, recording policy and share of exploration.
"""

import argparse
import copy
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin.hardware.reference import BATCH_SIZE_CAP, BLOCK_SIZE, CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.learn.off_policy import LEAST_EFFECTIVE_SIZE, Estimate, estimate, probabilities_of, with_costs
from vidur_ppo_plugin.record.decision_log import LoggedDecision, LoggedOutcome
from vidur_ppo_plugin.routing.routers import Router, scored
from vidur_ppo_plugin.serve.policies import build_policy
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin, in_order
from vidur_ppo_plugin.workload.requests import Requests

TARGETS = "least_tokens,pretrained,least_work,least_outstanding,round_robin"
# Requests a second for each replica of full speed: a cluster that is busy, and whose queues are short.
QPS_PER_SPEED = 4.6
# Decisions at the beginning that are not counted: the cluster is empty then.
WARM_UP = 150
# Between two moments that are copied, so that they know little of each other.
FORK_EVERY = 23
FORKS_OF_RECORD = 30
RUN_REQUESTS = 1500
FORK_SEED, LOG_SEED, RUN_SEED = 1_000_000, 2_000_000, 3_000_000
#: Limits between the lines of the table.
WORTH = (0.0, 10.0, 20.0, 50.0, 75.0, LEAST_EFFECTIVE_SIZE, 200.0, 500.0, 1000.0, float("inf"))


def cluster(speeds: Sequence[float]) -> TwinConfig:
    """Replicas of these speeds."""
    return TwinConfig(
        roofline=reference_roofline(),
        replica_scheduler="sarathi",
        speed_factors=list(speeds),
        block_size=BLOCK_SIZE,
        num_blocks=30_208,
        watermark_blocks=302,
        batch_size_cap=BATCH_SIZE_CAP,
        max_batch_tokens=CHUNK_SIZE,
        max_request_tokens=8192,
        max_full_requests=59,
    )


def requests(seed: int, size: int, qps: float) -> Requests:
    """Poisson arrivals."""
    rng = np.random.default_rng(seed)
    return Requests(
        np.cumsum(rng.exponential(1.0 / qps, size)), rng.integers(200, 2000, size), rng.integers(50, 200, size)
    )


class Recorder:
    """A cluster of the twin and a router that explores; every decision with its probability."""

    def __init__(self, config: TwinConfig, given: Requests, router: Router, *, explore: float, seed: int) -> None:
        self.twin = Twin(config)
        self._source = TwinReplicaSource(self.twin, num_waiting_slots=4)
        self._given, self._router, self._explore, self._rng = given, router, explore, random.Random(seed)
        #: Snapshot, request, action, probability, whether it was explored.
        self.decided: list[tuple[Any, Any, int, float, bool]] = []

    def place_next(self, forced: int | None = None) -> None:
        """Decide about the next request; or place it where `forced` says."""
        index, size = len(self.decided), self.twin.num_replicas
        now_s, prompt = float(self._given.arrived_at_s[index]), int(self._given.prompt_tokens[index])
        info = self._source.request_info(prompt, now_s)
        snapshot = self._source.snapshot(now_s)
        choice = scored(self._router, snapshot, info)
        is_explored = self._rng.random() < self._explore
        action = self._rng.randrange(size) if is_explored else choice.replica
        if forced is not None:
            action = forced
        share = 1.0 if action == choice.replica else 0.0
        if choice.scores is not None:
            ties = choice.scores == choice.scores[choice.replica]
            share = 1.0 / int(ties.sum()) if ties[action] else 0.0
        probability = (1 - self._explore) * share + self._explore / size
        self.decided.append((snapshot, info, action, probability, is_explored))
        self.twin.submit(action, now_s, prompt, int(self._given.decode_tokens[index]))

    def latency_s(self, replica: int) -> float:
        """Of the next request on this replica, if all goes on as usual then; nothing here changes."""
        fork = copy.copy(self)
        fork.twin, fork.decided = self.twin.copy(), list(self.decided)
        fork._source = self._source.copy(fork.twin)
        fork._router, fork._rng = copy.deepcopy(self._router), copy.deepcopy(self._rng)
        index = len(fork.decided)
        fork.twin.completions()
        fork.place_next(replica)
        while True:
            if len(fork.decided) < len(self._given):
                fork.place_next()
            else:
                fork.twin.drain()
            done = fork.twin.completions()
            found = np.flatnonzero(done.index == index)
            if len(found):
                return float(done.completed_at_s[found[0]] - done.arrived_at_s[found[0]])

    def record(self) -> list[LoggedDecision]:
        """Serve what is left; every decision with what came of it."""
        while len(self.decided) < len(self._given):
            self.place_next()
        self.twin.drain()
        done = in_order(self.twin.completions())
        backends = tuple(f"replica{k}" for k in range(self.twin.num_replicas))
        return [
            LoggedDecision(
                number=index + 1,
                snapshot=snapshot,
                request=info,
                action=action,
                probability=probability,
                is_explored=is_explored,
                is_fallback=False,
                backends=backends,
                outcome=LoggedOutcome(
                    status="ok",
                    latency_s=float(done.completed_at_s[index] - done.arrived_at_s[index]),
                    ttft_s=float(done.first_token_at_s[index] - done.arrived_at_s[index]),
                    prompt_tokens=int(self._given.prompt_tokens[index]),
                    output_tokens=int(self._given.decode_tokens[index]),
                ),
            )
            for index, (snapshot, info, action, probability, is_explored) in enumerate(self.decided)
        ]


def play(
    config: TwinConfig, given: Requests, router: Router, *, explore: float = 0.0, seed: int = 0
) -> list[LoggedDecision]:
    """Serve the requests; every decision with its probability and what came of it."""
    return Recorder(config, given, router, explore=explore, seed=seed).record()


# --- Cases ---


@dataclass(frozen=True)
class World:
    """Where records come from."""

    speeds: tuple[float, ...]
    recorder: str
    explore: float

    def start(self, policy: str, seed: int, size: int, *, explore: float) -> Recorder:
        """A cluster and its next `size` requests after the first ones."""
        given = requests(seed, WARM_UP + size, QPS_PER_SPEED * sum(self.speeds))
        return Recorder(cluster(self.speeds), given, build_policy(policy, seed=seed), explore=explore, seed=seed)

    def record(self, seed: int, size: int) -> list[LoggedDecision]:
        """What the recording policy does."""
        return self.start(self.recorder, seed, size, explore=self.explore).record()[WARM_UP:]


@dataclass(frozen=True)
class Case:
    """An estimate and the truths; differences as shares of the recorded mean."""

    world: World
    target: str
    size: int
    worth: float
    difference: float
    low: float
    high: float
    one_decision: float
    one_decision_error: float
    running: float

    @property
    def is_covered(self) -> bool:
        """Whether the truth of one decision is in the interval, as far as it is known."""
        half, middle = (self.high - self.low) / 2.0, (self.high + self.low) / 2.0
        return bool(abs(middle - self.one_decision) <= np.hypot(half, 1.96 * self.one_decision_error))


def one_decision_truth(world: World, targets: Sequence[str], num_forks: int) -> dict[str, tuple[float, float]]:
    """What one decision otherwise changes, as a share of the recorded mean, and its standard error."""
    changes: dict[str, list[float]] = {target: [] for target in targets}
    means = []
    for seed in range(FORK_SEED, FORK_SEED + max(2, -(-num_forks // FORKS_OF_RECORD))):
        size = min(num_forks, FORKS_OF_RECORD) * FORK_EVERY
        recorder = world.start(world.recorder, seed, size, explore=world.explore)
        forks = {}
        for index in range(WARM_UP + size):
            if index >= WARM_UP and index % FORK_EVERY == 0:
                forks[index] = np.array([recorder.latency_s(replica) for replica in range(len(world.speeds))])
            recorder.place_next()
        logged = with_costs(recorder.record())
        means.append(logged.costs[WARM_UP:].mean())
        for target in targets:
            shares = probabilities_of(build_policy(target, seed=seed), logged)
            found = [float(shares[index] @ costs) - logged.costs[index] for index, costs in forks.items()]
            changes[target].append(float(np.mean(found)))
    mean = float(np.mean(means))
    return {
        target: (float(np.mean(found)) / mean, float(np.std(found, ddof=1)) / len(found) ** 0.5 / mean)
        for target, found in changes.items()
    }


def running_truth(world: World, targets: Sequence[str], num_runs: int) -> dict[str, float]:
    """What it changes if the other policy serves the requests."""

    def mean_s(policy: str, explore: float) -> float:
        runs = [
            world.start(policy, RUN_SEED + run, RUN_REQUESTS, explore=explore).record()[WARM_UP:]
            for run in range(num_runs)
        ]
        return float(np.mean([decision.outcome.latency_s for run in runs for decision in run]))

    recorded_s = mean_s(world.recorder, world.explore)
    return {target: mean_s(target, 0.0) / recorded_s - 1.0 for target in targets}


def cases_of(world: World, options: argparse.Namespace) -> list[Case]:
    """All that is to know of one world."""
    truths = one_decision_truth(world, options.targets, options.forks)
    running = running_truth(world, options.targets, options.runs)
    cases = []
    for seed in range(LOG_SEED, LOG_SEED + options.logs):
        decisions = world.record(seed, max(options.sizes))
        for size, target in itertools.product(options.sizes, options.targets):
            for first in range(0, len(decisions) - size + 1, size):
                logged = with_costs(decisions[first : first + size])
                found = estimate(logged, probabilities_of(build_policy(target, seed=seed), logged))
                cases.append(_case(world, target, found, truths[target], running[target]))
    return cases


def _case(world: World, target: str, found: Estimate, truth: tuple[float, float], running: float) -> Case:
    difference, low, high = (value / found.recorded for value in (found.difference, found.low, found.high))
    return Case(world, target, found.num_decisions, found.effective_size, difference, low, high, *truth, running)


# --- Report ---


def by_worth(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """How often intervals cover, and how large errors are, by what weights are worth."""
    lines = []
    for low, high in itertools.pairwise(WORTH):
        inside = [case for case in cases if low <= case.worth < high]
        if not inside:
            continue
        errors = np.array([abs(case.difference - case.one_decision) for case in inside])
        lines.append(
            {
                "worth_from": low,
                "worth_to": None if np.isinf(high) else high,
                "num_cases": len(inside),
                "is_told": low >= LEAST_EFFECTIVE_SIZE,
                "covered": float(np.mean([case.is_covered for case in inside])),
                "median_error": float(np.median(errors)),
                "p95_error": float(np.percentile(errors, 95)),
                "beyond_10_percent": float(np.mean(errors > 0.1)),
                "median_half_width": float(np.median([(case.high - case.low) / 2.0 for case in inside])),
            }
        )
    return lines


def truths_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One decision beside running, for each world and policy."""
    found = {(case.world, case.target): case for case in cases}
    return [
        {
            **asdict(world),
            "target": target,
            "one_decision": case.one_decision,
            "one_decision_error": case.one_decision_error,
            "running": case.running,
        }
        for (world, target), case in found.items()
    ]


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Markdown."""
    yield "| worth | cases | interval covers | half of it | error, median | error, P95 | beyond 10 % | told |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in result["by_worth"]:
        upper = "" if line["worth_to"] is None else f"{line['worth_to']:.0f}"
        cells = [f"{100 * line[name]:.1f} %" for name in ("covered", "median_half_width", "median_error", "p95_error")]
        beyond, told = f"{100 * line['beyond_10_percent']:.0f} %", "yes" if line["is_told"] else "no"
        yield f"| {line['worth_from']:.0f} to {upper} | {line['num_cases']} | {' | '.join(cells)} | {beyond} | {told} |"
    yield "\n| speeds | recorded | explore | policy | one decision otherwise | running it |\n|---|---|---|---|---|---|"
    for truth in result["truths"]:
        yield (
            f"| {'/'.join(f'{speed:g}' for speed in truth['speeds'])} | {truth['recorder']} | {truth['explore']:g} | "
            f"{truth['target']} | {100 * truth['one_decision']:+.1f} ± {100 * truth['one_decision_error']:.1f} % | "
            f"{100 * truth['running']:+.1f} % |"
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Record, evaluate, and compare with the truths."""
    options.sizes = [int(size) for size in options.sizes.split(",")]
    options.targets = options.targets.split(",")
    fleets = [tuple(float(speed) for speed in fleet.split("/")) for fleet in options.fleets.split(",")]
    shares = [float(share) for share in options.explore.split(",")]
    worlds = [World(*one) for one in itertools.product(fleets, options.recorders.split(","), shares)]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(pool.map(cases_of, worlds, itertools.repeat(options)))
    cases = [case for part in found for case in part]
    return {"least_effective_size": LEAST_EFFECTIVE_SIZE, "by_worth": by_worth(cases), "truths": truths_of(cases)}


def main() -> int:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--logs", type=positive, default=8)
    parser.add_argument("--sizes", default="300,1200,4800")
    parser.add_argument("--explore", default="0.05,0.1,0.3")
    parser.add_argument("--fleets", default="1/0.4,1/1/0.4/0.4", help="speeds of the replicas of each cluster")
    parser.add_argument("--recorders", default="least_tokens,pretrained")
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--forks", type=positive, default=600)
    parser.add_argument("--runs", type=positive, default=10)
    parser.add_argument("--jobs", type=positive, default=1)
    quick = {"logs": 1, "sizes": "300", "explore": "0.3", "fleets": "1/0.4", "recorders": "least_tokens"}
    options = parse_options(parser, {**quick, "targets": "round_robin", "forks": 4, "runs": 1})
    return report(options, lambda: measure(options), lines_of)


if __name__ == "__main__":
    sys.exit(main())
