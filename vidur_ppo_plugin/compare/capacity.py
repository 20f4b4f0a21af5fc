"""The capacity of a cluster for a mix of requests: the highest arrival rate that it can serve for long.

Definition. `least_tokens` places a long run of requests. The run is stable if nothing piles up: the mean latency of the
last quarter of the requests is at most GROWTH times that of the second quarter, over all seeds together. The capacity
is found by bisection, to PRECISION, as the highest rate that is stable. Arrivals are Poisson (a trace keeps its own),
and what a scenario does to its replicas (draining, old reports) does not count: it is the cluster and the mix that have
a capacity.
"""

from collections.abc import Sequence

import numpy as np

from vidur_ppo_plugin.scenario import Capacity, Scenario, ScenarioError

from .engines import run_cell
from .schedulers import SchedulerSpec
from .seeds import CAPACITY

SCHEDULER = "least_tokens"
NUM_SEEDS = 3
GROWTH = 1.25
PRECISION = 0.005
#: Requests of a run for each replica: at 4 replicas 20,000, which take 5 to 25 minutes of simulated time.
REQUESTS_PER_REPLICA = 5_000
# Where the search begins, in requests/s for each replica; it doubles until the cluster is overloaded.
_FIRST_QPS_PER_REPLICA = 1.0
# Where it ends: no replica serves so many. Requests that are few or tiny are through before anything can pile up.
_MOST_QPS_PER_REPLICA = 2.0**14


def find_capacity(scenario: Scenario, *, engine: str, seeds: Sequence[int] = CAPACITY[:NUM_SEEDS]) -> Capacity:
    """Bisection between a stable and an unstable rate."""
    num_requests = capacity_requests(scenario)
    high = _FIRST_QPS_PER_REPLICA * scenario.num_replicas
    while is_stable(scenario, high, num_requests, engine=engine, seeds=seeds):
        high *= 2
        if high > _MOST_QPS_PER_REPLICA * scenario.num_replicas:
            raise ScenarioError(
                f"scenario {scenario.name!r} has no capacity that could be found: {num_requests:,} of its requests are "
                f"served at any rate, and nothing piles up; it takes more or longer requests"
            )
    low = high / 2
    while high / low > 1 + PRECISION:
        middle = (low * high) ** 0.5
        if is_stable(scenario, middle, num_requests, engine=engine, seeds=seeds):
            low = middle
        else:
            high = middle
    return Capacity(qps=float(f"{low:.3g}"), scheduler=SCHEDULER, num_requests=num_requests, num_seeds=len(seeds))


def capacity_requests(scenario: Scenario) -> int:
    """Requests of a run that decides whether a rate is stable."""
    if scenario.trace is not None:
        return scenario.num_requests
    return REQUESTS_PER_REPLICA * scenario.num_replicas


def is_stable(scenario: Scenario, qps: float, num_requests: int, *, engine: str, seeds: Sequence[int]) -> bool:
    """Whether nothing piles up at an arrival rate; see the top of this file."""
    quarters = []
    at_rate = at_qps(scenario, qps).at(num_requests=num_requests)
    for seed in seeds:
        requests = run_cell(at_rate, SchedulerSpec(SCHEDULER, SCHEDULER), seed, engine=engine).requests
        latency_s = np.asarray(requests["completed_at_s"] - requests["arrived_at_s"])
        quarters.append([part.mean() for part in np.array_split(latency_s, 4)])
    second, last = np.mean(quarters, axis=0)[[1, 3]]
    return bool(last <= GROWTH * second)


def at_qps(scenario: Scenario, qps: float) -> Scenario:
    """The scenario's mix as Poisson arrivals at a rate, on replicas that all serve and report at once."""
    capacity = Capacity(qps=qps, scheduler=SCHEDULER, num_requests=0, num_seeds=0)
    return scenario.at(capacity=capacity, load=1.0, cv=1.0, drained=(), report_delay_s=0.0)
