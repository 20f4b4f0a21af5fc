"""How much room there is: a router that knows the future tries every replica out before it decides.

    python benchmarks/clairvoyant.py [--policy FILE.npz] [--tail 0] [--scenarios mixed_long,mixed] [--later 25]
        [--seeds 4] [--requests N] [--squared 0] [--json] [--quick]

Every request is followed on every replica into the very future that will come: the --later requests a replica that
arrive next, with their true lengths, placed as the policy would, and everybody served to the last token; it goes where
the sum of all latencies (plus --squared times that of their squares, each relative to its mean) is least. That is one
step of improvement of the policy with perfect knowledge of arrivals and lengths, which no router has: much more than
the greedy `oracle` of `vidur-ppo compare` knows, and still no proof of the optimum. Changes against least_tokens on the
same requests, in the twin, of the policy and of the clairvoyant, with 95 % intervals. The policy is the shipped one
unless --policy names a file that `vidur-ppo export` wrote.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _reporting import new_parser, parse_options, positive, report
from _requirements import METRICS, PRIOR, change, text_of

from vidur_ppo_plugin import _autoload, pretrained
from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.compare.seeds import COMPARISON
from vidur_ppo_plugin.learn.credit.look_ahead import look_ahead
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.scenario import Scenario, find_scenario
from vidur_ppo_plugin.train.clusters import Cluster, build_clusters
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin

#: The metrics of each seed.
Rows = list[dict[str, float]]


def open_twin(scenario: Scenario, cluster: Cluster, options: argparse.Namespace) -> tuple[PolicyTwin, Actor]:
    """A cluster for each seed, and the policy."""
    policy = Policy.load(
        options.policy, rng=random.Random(0), delay_model=cluster.delay_model, tail_preference=options.tail
    )
    assert isinstance(policy.actor, Actor)
    assert cluster.twin is not None
    requests = [scenario.requests(seed) for seed in COMPARISON[: options.seeds]]
    twin = PolicyTwin(
        cluster.twin,
        requests,
        prior=policy.prior,
        features=policy.features,
        tail_preferences=[options.tail] * len(requests),
        report_delay_s=scenario.report_delay_s,
        drains=[scenario.drains(part) for part in requests],
    )
    return twin, policy.actor


def run(scenario: Scenario, cluster: Cluster, options: argparse.Namespace, *, knows_the_future: bool) -> Rows:
    """The metrics of each seed."""
    twin, actor = open_twin(scenario, cluster, options)
    steps, rng = scenario.num_requests, np.random.default_rng(0)
    if not knows_the_future:
        twin.play(actor, steps, uniforms=rng.random((twin.num_clusters, steps, 2)))
    else:
        for _ in range(steps):
            prospects = look_ahead(twin, actor, options.later * twin.num_replicas, rng)
            weights = np.array([1.0, options.squared, 0.0, 0.0]) / prospects.means
            costs = np.einsum("crk,ck->cr", prospects.sums, weights)
            twin.play(actor, 1, forced=costs.argmin(axis=1)[:, None])
    twin.drain()
    clusters, done = twin.completions()
    rows = []
    for number in range(twin.num_clusters):
        mine = clusters == number
        kept = done.index[mine] >= int(scenario.warm_up_fraction * steps)
        arrived_s = done.arrived_at_s[mine][kept]
        e2e_s, ttft_s = (part[mine][kept] - arrived_s for part in (done.completed_at_s, done.first_token_at_s))
        rows.append(
            {
                "e2e_mean": float(e2e_s.mean()),
                "e2e_p99": float(np.percentile(e2e_s, 99)),
                "ttft_mean": float(ttft_s.mean()),
                "ttft_p99": float(np.percentile(ttft_s, 99)),
            }
        )
    return rows


def study(scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    """Changes against PRIOR."""
    cluster = build_clusters([scenario.name])[scenario.name]
    (prior,) = parse_schedulers([PRIOR])
    seeds = COMPARISON[: options.seeds]
    theirs = [run_cell(scenario, prior, seed, engine="twin").metrics(scenario) for seed in seeds]
    found = {}
    for name in ("policy", "clairvoyant"):
        ours = run(scenario, cluster, options, knows_the_future=name == "clairvoyant")
        found[name] = {
            metric: change((row[metric] for row in ours), (row[metric] for row in theirs)) for metric in METRICS
        }
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All scenarios."""
    _autoload.install()
    results = {}
    for name in options.scenarios.split(","):
        scenario = find_scenario(name)
        results[name] = study(scenario.at(num_requests=options.requests or scenario.num_requests), options)
        print(f"{name} done", file=sys.stderr)
    return {"policy": str(options.policy), "tail_preference": options.tail, "scenarios": results}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    yield f"against {PRIOR}\n\n| | | seeds | " + " | ".join(METRICS) + " |\n|---|---|---|" + "---|" * len(METRICS)
    for name, by_router in result["scenarios"].items():
        for router, entries in by_router.items():
            cells = [str(entries[METRICS[0]]["seeds"]), *(text_of(entries[metric]) for metric in METRICS)]
            yield f"| {name} | {router} | " + " | ".join(cells) + " |"


def main() -> int:
    """Run, print."""
    parser = new_parser(__doc__)
    shipped = pretrained.find(pretrained.DEFAULT)
    assert shipped is not None
    parser.add_argument("--policy", type=Path, default=shipped.policy)
    parser.add_argument("--tail", type=float, default=0.0, help="tail_preference")
    parser.add_argument("--scenarios", default="mixed_long,mixed")
    parser.add_argument("--later", type=positive, default=25, help="requests that are followed, for each replica")
    parser.add_argument("--squared", type=float, default=0.0, help="weight of the squared latency")
    parser.add_argument("--seeds", type=positive, default=4)
    parser.add_argument("--requests", type=positive, help="of each run; the scenario's own unless given")
    options = parse_options(parser, quick={"scenarios": "mixed_long", "later": 2, "seeds": 1, "requests": 50})
    if not 0.0 <= options.tail <= 1.0:
        parser.error(f"--tail must be from 0 to 1, got {options.tail}")
    if options.seeds > len(COMPARISON) or options.squared < 0:
        parser.error(f"--seeds must be at most {len(COMPARISON)} and --squared >= 0")
    if not options.policy.is_file():
        parser.error(f"--policy: there is no file {options.policy}; `vidur-ppo export CHECKPOINT FILE.npz` writes one")
    return report(options, lambda: measure(options), lines_of)


if __name__ == "__main__":
    sys.exit(main())
