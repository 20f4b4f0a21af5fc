"""A results directory made in seconds: requests routed over a toy cluster of first-come-first-served replicas.

The shape of the numbers is that of real comparisons (queues, tails, a long class that can be starved), so that tables,
plots and the page can be tested and looked at without hours of simulation. `python tests/compare/sample_results.py DIR`
writes one, with its report and plots.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vidur_ppo_plugin.compare.metrics import SLO, cell_metrics
from vidur_ppo_plugin.compare.results import Cell, Results

PREFILL_TOKENS_PER_S = 8_000.0
DECODE_S_PER_TOKEN = 0.02
BOUNDARY_TOKENS = 4_000
WARM_UP_FRACTION = 0.1

# A router sees the seconds of work ahead of each replica, the request's prompt tokens, its index, and a generator.
Router = Callable[[np.ndarray, int, int, np.random.Generator], int]

ROUTERS: dict[str, Router] = {
    "round_robin": lambda work_s, prompt, index, rng: index % len(work_s),
    "random": lambda work_s, prompt, index, rng: int(rng.integers(len(work_s))),
    "least_tokens": lambda work_s, prompt, index, rng: int(np.argmin(work_s)),
    "size_split": lambda work_s, prompt, index, rng: (
        len(work_s) - 1 if prompt > BOUNDARY_TOKENS else int(np.argmin(work_s[:-1]))
    ),
    "power_of_two": lambda work_s, prompt, index, rng: int(
        min(rng.choice(len(work_s), 2, replace=False), key=lambda replica: work_s[replica])
    ),
    "sticky": lambda work_s, prompt, index, rng: (index // 40) % len(work_s),
    "ppo_modular:checkpoints/mixture-2025-11": lambda work_s, prompt, index, rng: int(
        np.argmin(work_s + 0.05 * np.arange(len(work_s)) * (prompt < BOUNDARY_TOKENS))
    ),
    "oracle": lambda work_s, prompt, index, rng: int(np.argmin(work_s)),
    "least_outstanding": lambda work_s, prompt, index, rng: int(np.argmin(np.round(work_s, 1))),
    "least_kv": lambda work_s, prompt, index, rng: int(np.argmin(np.round(work_s, 0))),
    "shortest_delay": lambda work_s, prompt, index, rng: int(np.argmin(np.round(work_s, 2))),
    "lor": lambda work_s, prompt, index, rng: int(np.argmin(np.maximum(work_s - 0.3, 0))),
}

# name: (load, replicas, share of long prompts, why)
SCENARIOS: dict[str, tuple[float, int, float, str]] = {
    "mixed_long": (0.8, 4, 0.03, "A document of 8k to 24k tokens delays every chat request behind it by seconds."),
    "light": (0.3, 4, 0.1, "Hardly any queue: a router must not do harm & cannot do much <good>."),
    "fleet16": (0.85, 16, 0.05, "Many replicas: there is nearly always a free one, if one looks."),
    "arxiv": (0.9, 4, 0.5, "Near saturation, with prompts alike: little to gain over counting tokens."),
    **{f"variant_{i}": (0.5 + 0.04 * i, 4, 0.05, "One more, to fill the page.") for i in range(10)},
}


def sample_results(
    directory: Path,
    *,
    scenarios: Sequence[str] = ("mixed_long", "light"),
    schedulers: Sequence[str] = ("round_robin", "least_tokens", "size_split", "oracle"),
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    num_requests: int = 200,
    failing: Sequence[Cell] = (),
) -> Results:
    """Write and open a results directory; the first scheduler is the reference, the cells of `failing` failed."""
    results = Results.create(directory, _metadata(scenarios, schedulers, seeds, num_requests))
    for cell in results.planned:
        if cell in failing:
            results.write_failure(cell, 'Traceback:\n  File "sim.py"\nAssertionError: <script>alert("&")</script>')
            continue
        load, num_replicas, long_share, _ = SCENARIOS[cell.scenario]
        requests = _route(cell, load, num_replicas, long_share, num_requests)
        metrics = cell_metrics(
            requests,
            num_replicas=num_replicas,
            slo=SLO(),
            class_boundary_tokens=BOUNDARY_TOKENS,
            decision_us=3.0 + len(cell.scheduler) * 0.7,
        )
        results.write_cell(cell, metrics, requests)
    return results


def _metadata(
    scenarios: Sequence[str], schedulers: Sequence[str], seeds: Sequence[int], num_requests: int
) -> dict[str, Any]:
    return {
        "reference": schedulers[0],
        "seeds": list(seeds),
        "scenarios": {
            name: {
                "why": SCENARIOS[name][3],
                "load": SCENARIOS[name][0],
                "num_requests": num_requests,
                "warm_up_fraction": WARM_UP_FRACTION,
                "capacity_qps": 7.0 * SCENARIOS[name][1],
                "num_replicas": SCENARIOS[name][1],
                "slo": asdict(SLO()),
                "class_boundary_tokens": BOUNDARY_TOKENS,
            }
            for name in scenarios
        },
        "schedulers": {
            name: {
                "kind": "bound" if name == "oracle" else "heuristic",
                "deployable": name != "oracle",
                "note": "knows true output lengths" if name == "oracle" else "",
            }
            for name in schedulers
        },
        "versions": {"vidur": "0.0.26", "vidur-ppo-plugin": "0.1.0", "python": "3.11.2"},
        "revision": "0123456789abcdef",
        "created_at": "2025-11-16T12:00:00+00:00",
        "engine": "toy",
    }


def _route(cell: Cell, load: float, num_replicas: int, long_share: float, num_requests: int) -> pd.DataFrame:
    rng = np.random.default_rng([cell.seed, len(cell.scenario), num_replicas])
    is_long = rng.random(num_requests) < long_share
    prompts = np.where(is_long, rng.integers(8_000, 24_000, num_requests), rng.lognormal(5.5, 0.8, num_requests))
    prompts = prompts.astype(int) + 1
    decodes = rng.lognormal(4.5, 0.6, num_requests).astype(int) + 2
    speed = PREFILL_TOKENS_PER_S * num_replicas
    arrived_s = np.cumsum(rng.exponential(prompts.mean() / speed / load, num_requests))
    free_at_s = np.zeros(num_replicas)
    router, routing = ROUTERS[cell.scheduler], np.random.default_rng(cell.seed)
    replica, scheduled_s = np.zeros(num_requests, dtype=int), np.zeros(num_requests)
    for i in range(num_requests):
        replica[i] = router(np.maximum(free_at_s - arrived_s[i], 0), int(prompts[i]), i, routing)
        scheduled_s[i] = max(arrived_s[i], free_at_s[replica[i]])
        free_at_s[replica[i]] = scheduled_s[i] + prompts[i] / PREFILL_TOKENS_PER_S
    first_s = scheduled_s + prompts / PREFILL_TOKENS_PER_S
    speedup = 0.97 if cell.scheduler == "oracle" else 1.0
    return pd.DataFrame(
        {
            "arrived_at_s": arrived_s,
            "prompt_tokens": prompts,
            "decode_tokens": decodes,
            "replica": replica,
            "scheduled_at_s": scheduled_s,
            "first_token_at_s": first_s,
            "completed_at_s": first_s + decodes * DECODE_S_PER_TOKEN * speedup,
            "num_restarts": 0,
            "is_warm_up": np.arange(num_requests) < WARM_UP_FRACTION * num_requests,
        }
    )


if __name__ == "__main__":
    from vidur_ppo_plugin.compare.plots import write_plots
    from vidur_ppo_plugin.compare.report import write_report
    from vidur_ppo_plugin.compare.table import print_tables

    folder = Path(sys.argv[1])
    num_scenarios, num_schedulers = (int(argument) for argument in sys.argv[2:4]) if len(sys.argv) > 2 else (3, 6)
    sample = sample_results(
        folder,
        scenarios=list(SCENARIOS)[:num_scenarios],
        schedulers=list(ROUTERS)[:num_schedulers],
        num_requests=1_500,
        failing=[Cell("mixed_long", "random", 2)],
    )
    print_tables(sample)
    write_plots(sample, folder / "plots")
    write_report(sample, folder / "report.html")
