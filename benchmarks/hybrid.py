"""What the user's own configuration leads to: the plan of 2025-09-18, with its hybrid reward.

    python benchmarks/hybrid.py [--parts plan,scratch] [--seeds 10] [--json] [--quick]

plan      configs/plan_2025_09_18.yaml with 8,000 requests and updates of 256, from its prior: the plan's own checks
          of the metrics, and then the policy, greedy, on other requests of the same workload.
scratch   The same flags with `prior none`: one run of 40,000 requests in Vidur on each of three scenarios, then the
          policy, greedy, on the held-out seeds of `vidur-ppo compare`.

Changes are paired by seed, with 95 % intervals. Exit status 1 if the policy is not below random, round_robin and, from
its prior, lor in mean latency and mean and P99 of first tokens, or if a check of the plan fails.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _comparison import open_results, run_cells
from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.cli import load_flags
from vidur_ppo_plugin.compare.engines import quietly
from vidur_ppo_plugin.compare.same_requests import run_on_same_requests
from vidur_ppo_plugin.compare.schedulers import LEARNED, parse_schedulers
from vidur_ppo_plugin.compare.seeds import COMPARISON
from vidur_ppo_plugin.compare.statistics import paired_change
from vidur_ppo_plugin.record import health
from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.scenario import find_scenario
from vidur_ppo_plugin.sim.ppo_scheduler import METRICS_FILE

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "configs" / "plan_2025_09_18.yaml"
PREFIX = "p_p_o_global_scheduler_modular_config_"
SEED_FLAGS = ("synthetic_request_generator_config_seed", "uniform_request_length_generator_config_seed")
METRICS = ("e2e_mean", "ttft_mean", "ttft_p99")
OPPONENTS = ("random", "round_robin", "lor", "least_tokens")
#: Of runs from scratch: asked of the placement, or paid from decision to decision as the plan has it.
CREDITS: dict[str, dict[str, Any]] = {"placement": {}, "window": {"hybrid_credit": "window", "gamma": 0.99}}
#: Requests of training: no comparison uses this seed.
TRAINING_SEED = 70_007
# Rows of metrics that the plan's checks ask for.
SHARES = tuple(f"action_replica_{index}" for index in range(4))


def run(flags: Mapping[str, Any]) -> RunOutcome:
    """A run of Vidur that writes no metrics of its own."""
    from vidur_ppo_plugin.sim import launch
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    with quietly(to_arguments(flags, known_flags())) as arguments:
        return launch.run(arguments)


def own(**flags: Any) -> dict[str, Any]:
    """Flags of `ppo_modular`."""
    return {f"{PREFIX}{name}": value for name, value in flags.items()}


def plan_checks(history: health.History) -> dict[str, tuple[bool, str]]:
    """What the plan asks of its metrics: whether it holds, and the figure."""
    deltas, entropy = history.column("delta_score"), history.column("entropy")
    shares = {name: history.column(name).mean() for name in SHARES}
    scores, totals = history.column("absolute_score"), history.column("total_reward")
    pulses = int(np.sum(np.diff(history.column("temp_is_pulsing")) > 0))
    due = len(history) // history.flags.pulse_interval - 1
    clipped = history.column("clipfrac")
    return {
        "shares near 25 %, none above 50 %": (
            min(shares.values()) > 0.2 and max(shares.values()) < 0.3,
            ", ".join(f"{share:.1%}" for share in shares.values()),
        ),
        "absolute_score above 1": (float(scores.min()) > 1.0, f"{scores.min():.3g} to {scores.max():.3g}"),
        "total_reward positive": (float(totals.min()) > 0.0, f"{totals.min():.3g} to {totals.max():.3g}"),
        "delta_score not constant": (float(np.ptp(deltas)) > 0.0, f"{deltas.min():+.3f} to {deltas.max():+.3f}"),
        "pulses regular": (pulses >= max(1, due), f"{pulses} in {len(history)} updates"),
        "entropy above 0.5": (float(entropy.min()) > 0.5, f"{entropy.min():.3f} to {entropy.max():.3f}"),
        "clipfrac below 0.3": (float(clipped.max()) < 0.3, f"{clipped.min():.2f} to {clipped.max():.2f}"),
    }


def plan(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The plan's command from its prior."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    saved, metrics = directory / "saved", directory / "metrics"
    flags = load_flags(str(PLAN)) | own(save_checkpoint=str(saved), metrics_dir=str(metrics), rollout_len=256)
    run({**flags, "synthetic_request_generator_config_num_requests": options.plan_requests})
    checks = plan_checks(health.read(metrics / METRICS_FILE))
    figures: dict[str, list[list[float]]] = {}
    specs = parse_schedulers([f"plan={LEARNED}:{saved}", *OPPONENTS[:-1]])
    for seed in COMPARISON[: options.seeds]:
        # The prior in Vidur, the others in its twin, on the same requests.
        held_out = {name: value for name, value in flags.items() if not name.startswith(PREFIX)}
        held_out |= {**dict.fromkeys(SEED_FLAGS, seed), "global_scheduler_config_type": OPPONENTS[-1]}
        held_out["synthetic_request_generator_config_num_requests"] = options.requests
        outcome = run(held_out)
        with quietly(to_arguments(held_out, known_flags())) as arguments:
            others = run_on_same_requests(outcome, arguments, specs)
        for one in (*others, outcome):
            figures.setdefault(one.scheduler, []).append([one.e2e_s.mean, one.ttft_s.mean, one.ttft_s.p99])
    ours = np.array(figures["plan"])
    changes = {
        name: {
            metric: paired_change(ours[:, column], np.array(figures[name])[:, column])
            for column, metric in enumerate(METRICS)
        }
        for name in OPPONENTS
    }
    return {"name": "plan", "checks": checks, "changes": changes}


def scratch(name: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The plan's flags with nothing to lean on, learned in one run of a scenario."""
    saved, scenario = directory / "saved", find_scenario(name)
    flags = {key: value for key, value in load_flags(str(PLAN)).items() if key.startswith(PREFIX)}
    flags |= own(prior="none", rollout_len=256, save_checkpoint=str(saved), metrics_dir=str(directory / "metrics"))
    workload = scenario.vidur_flags(TRAINING_SEED, options.scratch_requests)
    flags |= own(**CREDITS[options.credit])
    learned = run({**workload, **flags, "global_scheduler_config_type": LEARNED})
    specs = parse_schedulers([*OPPONENTS, f"plan={LEARNED}:{saved}"])
    setup, results = open_results(
        directory / "results", [scenario.at(num_requests=options.requests)], specs, COMPARISON[: options.seeds]
    )
    run_cells(setup, results, lambda _: True, options.jobs)
    cells = {label: group.set_index("seed").sort_index() for label, group in results.cells.groupby("scheduler")}
    changes = {
        other: {
            metric: paired_change(cells["plan"][metric].to_numpy(float), cells[other][metric].to_numpy(float))
            for metric in METRICS
        }
        for other in OPPONENTS
    }
    return {"name": f"scratch, {name}", "wall_s": learned.wall_s, "changes": changes}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that are wanted."""
    _autoload.install()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for part in options.parts.split(","):
            names = options.scenarios.split(",") if part == "scratch" else [""]
            for name in names:
                place = Path(directory) / part / name
                place.mkdir(parents=True)
                results.append(scratch(name, options, place) if part == "scratch" else plan(options, place))
                print(f"{results[-1]['name']}: done", file=sys.stderr)
    return {"results": results}


def missed(result: Mapping[str, Any]) -> Sequence[str]:
    """What the user asks for and does not get."""
    found = []
    for part in result["results"]:
        found += [
            f"{part['name']}: {name}: {figure}" for name, (holds, figure) in part.get("checks", {}).items() if not holds
        ]
        for other in OPPONENTS[: 3 if part["name"] == "plan" else 2]:
            for metric, (change, _, high) in part["changes"][other].items():
                if not high < 0:
                    found.append(f"{part['name']}: {metric} against {other}: {change:+.1%}, up to {high:+.1%}")
        if part["name"] == "plan":
            for metric, (change, _, high) in part["changes"]["least_tokens"].items():
                if not change < 0.01:
                    found.append(f"plan: {metric} against its prior: {change:+.1%}, up to {high:+.1%}")
    return found


def lines_of(result: Mapping[str, Any]) -> Iterator[str]:
    """A table for people."""
    for part in result["results"]:
        yield f"{part['name']}" + (f": learned in {part['wall_s']:.0f} s" if "wall_s" in part else "")
        for name, (holds, figure) in part.get("checks", {}).items():
            yield f"  {'ok ' if holds else 'NO '} {name}: {figure}"
        for other, changes in part["changes"].items():
            cells = [
                f"{metric} {change:+.1%} [{low:+.1%}, {high:+.1%}]" for metric, (change, low, high) in changes.items()
            ]
            yield f"  against {other:<13}{'  '.join(cells)}"


def main() -> int:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--parts", default="plan,scratch", help="which of plan and scratch, comma-separated")
    parser.add_argument("--scenarios", default="arxiv,mixed_long,heterogeneous", help="of scratch, comma-separated")
    parser.add_argument("--credit", choices=list(CREDITS), default="placement", help="of scratch")
    parser.add_argument("--plan-requests", type=positive, default=8000, help="that the plan's run learns on")
    parser.add_argument("--scratch-requests", type=positive, default=40_000, help="that a run from scratch learns on")
    parser.add_argument("--requests", type=positive, default=4000, help="of each held-out seed")
    parser.add_argument("--seeds", type=positive, default=10, help="held-out seeds")
    parser.add_argument("--jobs", type=positive, default=2, help="processes of comparisons")
    quick = {
        "scenarios": "mixed_long",
        "plan_requests": 800,
        "scratch_requests": 600,
        "requests": 200,
        "seeds": 2,
        "jobs": 1,
    }
    options = parse_options(parser, quick)
    for part in options.parts.split(","):
        if part not in ("plan", "scratch"):
            parser.error(f"--parts {part}: there are plan and scratch")
    return report(options, lambda: measure(options), lines_of, missed)


if __name__ == "__main__":
    sys.exit(main())
