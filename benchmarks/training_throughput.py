"""How fast `vidur-ppo train` learns: against training inside `vidur.main`, and against Stable-Baselines3.

    python benchmarks/training_throughput.py [--json] [--quick] [--decisions N] [--vidur-requests N]
        [--attempts 3] [--sb3-limit-s S]

Everything runs on `configs/train/mixed_long.yaml`, one thing after the other, in one run on one machine, by the clock:
run it where nothing else does. Evaluations do not count.

    decisions_per_s            training with two workers
    two_workers_ratio          that over training with one worker
    machine_two_workers_ratio  what two processes that only count reach over one, by the clock: 2 on an idle machine
    twin_over_vidur            decisions_per_s over that of `ppo_modular` learning inside `vidur.main`, same scenario
    rollout_over_sb3           rollouts in one process over those of Stable-Baselines3's PPO with the same network,
                               environments, batch and credit, on `vidur_ppo/Routing-v0`, in one process too
    time_to_quality_over_sb3   seconds until mean latency on held-out requests is 5 % below that of least_tokens: theirs
                               over ours, with two workers and their start; a lower bound if sb3_reached is 0

Stable-Baselines3 needs `pip install 'vidur-ppo-plugin[rl]'`. Exits with 1 if a ratio is below its target.
"""

import argparse
import csv
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the networks are tiny; read when torch is imported

import numpy as np
from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.scenario import find_scenario
from vidur_ppo_plugin.train.clusters import Cluster, build_clusters
from vidur_ppo_plugin.train.config import TrainConfig, load_config
from vidur_ppo_plugin.train.engines import InProcessEngine, LocalEngine
from vidur_ppo_plugin.train.evaluation import Evaluator
from vidur_ppo_plugin.train.trainer import Trainer

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "train" / "mixed_long.yaml"
TARGETS = {
    "twin_over_vidur": 30.0,
    "rollout_over_sb3": 3.0,
    "time_to_quality_over_sb3": 3.0,
    "two_workers_ratio": 1.6,
}
#: The quality that is waited for: change of mean latency against least_tokens.
QUALITY = -0.05
#: Updates that are not counted: functions are compiled, clusters fill.
WARM_UP = 4


def settings(options: argparse.Namespace) -> TrainConfig:
    """The shipped configuration, evaluated often against least_tokens."""
    evaluation = {
        "every_decisions": 4096,
        "seeds": 3,
        "num_requests": options.evaluation_requests,
        "baselines": ["least_tokens"],
    }
    return load_config(CONFIG, {"decisions": options.decisions, "evaluation": evaluation})


def rows_of(out: Path) -> list[dict[str, str]]:
    """The updates of a run."""
    with (out / "ppo_metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["decisions_per_s"]]


def train(config: TrainConfig, clusters: dict[str, Cluster], workers: int) -> dict[str, float]:
    """Decisions per second of training, and seconds until the quality was reached."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        began_s = time.perf_counter()
        engine = LocalEngine(config, clusters, workers=workers)
        try:
            trainer = Trainer(config, clusters, engine, out, num_jobs=workers)
            ready_s = time.perf_counter() - began_s  # the first update waits for the workers, and so counts their start
            trainer.train()
        finally:
            engine.close()
        rows = rows_of(out)
    size = config.decisions_per_update
    seconds = [size / float(row["decisions_per_s"]) for row in rows]
    reached = [
        index
        for index, row in enumerate(rows)
        if row["evaluation_e2e_mean"] and float(row["evaluation_e2e_mean"]) <= QUALITY
    ]
    return {
        "updates": float(len(rows)),
        "decisions_per_s": size / float(np.median(seconds[min(WARM_UP, len(seconds) - 1) :])),
        "quality_s": ready_s + sum(seconds[: reached[0] + 1]) if reached else float("inf"),
        "quality_decisions": float(size * (reached[0] + 1)) if reached else float("inf"),
    }


def machine_ratio(number: int) -> float:
    """How much more two processes get done than one, here and now."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_count, [0, 0])  # they are started now
        (alone_s,) = pool.map(_count, [number])
        return 2 * alone_s / max(pool.map(_count, [number, number], chunksize=1))


def _count(number: int) -> float:
    """Seconds to count so far."""
    began_s = time.perf_counter()
    for _ in range(number):
        pass
    return time.perf_counter() - began_s


def vidur_rate(num_requests: int) -> float:
    """Decisions per second of `ppo_modular` learning inside Vidur, without imports and output."""
    scenario = find_scenario("mixed_long").at(num_requests=num_requests)
    spec = SchedulerSpec("ppo_modular", "ppo_modular")
    run_cell(scenario.at(num_requests=200), spec, 100, engine="vidur")  # compiles
    began_s = time.perf_counter()
    run_cell(scenario, spec, 101, engine="vidur")
    return num_requests / (time.perf_counter() - began_s)


def rollout_rate(config: TrainConfig, clusters: dict[str, Cluster]) -> float:
    """Decisions per second of our rollouts in this process."""
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(config, clusters, InProcessEngine(config, clusters), Path(name), num_jobs=1)
        for _ in range(WARM_UP):
            _collect(trainer)
        began_s = time.perf_counter()
        num_decisions = sum(_collect(trainer) for _ in range(8))
        return num_decisions / (time.perf_counter() - began_s)


def _collect(trainer: Trainer) -> int:
    size = trainer.collect().num_decisions
    trainer.state.agent.num_decisions += size
    return size


def sb3(config: TrainConfig, clusters: dict[str, Cluster], limit_s: float) -> dict[str, float]:
    """The same with Stable-Baselines3: rollouts per second, and seconds until the quality was reached."""
    from _sb3_policy import RolloutTimes, build_model  # beside this file; imports Stable-Baselines3

    began_s = time.perf_counter()
    model = build_model(config)
    spent_s = time.perf_counter() - began_s  # as ours, which counts the start of the workers
    evaluator = Evaluator(config, InProcessEngine(config, clusters))
    size = config.decisions_per_update
    evaluated_every = max(1, 4096 // size) * size
    callback = RolloutTimes()
    result = {"sb3_reached": 0.0, "sb3_quality_s": limit_s}
    while model.num_timesteps == 0 or spent_s < limit_s:
        began_s = time.perf_counter()
        model.learn(evaluated_every, callback=callback, reset_num_timesteps=False)
        spent_s += time.perf_counter() - began_s
        actor = Actor.from_network(model.policy.network)
        change = evaluator.evaluate((actor.weights, actor.shape), model.num_timesteps).changes["mixed_long"]["e2e_mean"]
        print(f"Stable-Baselines3: {model.num_timesteps} decisions, {spent_s:.0f} s, {change:+.1%}", file=sys.stderr)
        if change <= QUALITY:
            result = {"sb3_reached": 1.0, "sb3_quality_s": spent_s}
            break
    rollout_s = callback.rollout_s[2:] or callback.rollout_s
    return {**result, "sb3_decisions": model.num_timesteps, "sb3_rollout_decisions_per_s": size / np.median(rollout_s)}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    _autoload.install()
    config = settings(options)
    clusters = build_clusters(["mixed_long"])
    figures: dict[str, float] = {}
    # Neighbours come and go even on an idle machine: several attempts in turn, of which the median counts.
    attempts = [(train(config, clusters, 1), train(config, clusters, 2)) for _ in range(options.attempts)]
    one, two = (
        {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
        for runs in zip(*attempts, strict=True)
    )
    figures["machine_two_workers_ratio"] = machine_ratio(options.count)
    figures |= {f"one_worker_{name}": value for name, value in one.items()} | two
    ratios = [pair[1]["decisions_per_s"] / pair[0]["decisions_per_s"] for pair in attempts]
    figures["two_workers_ratio"] = float(np.median(ratios))
    print("training done", file=sys.stderr)
    figures["vidur_decisions_per_s"] = vidur_rate(options.vidur_requests)
    figures["twin_over_vidur"] = two["decisions_per_s"] / figures["vidur_decisions_per_s"]
    figures["rollout_decisions_per_s_in_process"] = rollout_rate(config, clusters)
    figures |= sb3(config, clusters, options.sb3_limit_s)
    theirs = figures["sb3_rollout_decisions_per_s"]
    figures["rollout_over_sb3"] = figures["rollout_decisions_per_s_in_process"] / theirs
    figures["time_to_quality_over_sb3"] = figures["sb3_quality_s"] / two["quality_s"]
    return figures


def lines_of(figures: dict[str, float]) -> Iterator[str]:
    """For people."""
    for name, value in figures.items():
        target = f"   (target: at least {TARGETS[name]:g})" if name in TARGETS else ""
        yield f"{name:<38}{value:>12,.2f}{target}"


def main() -> int:
    """Measure and print; 1 if a target was missed."""
    parser = new_parser(__doc__)
    parser.add_argument("--decisions", type=positive, default=120_000, help="of each training run")
    parser.add_argument("--attempts", type=positive, default=3, help="training runs of each kind; the median counts")
    parser.add_argument("--evaluation-requests", type=positive, default=2000, help="of each run of an evaluation")
    parser.add_argument("--vidur-requests", type=positive, default=1500, help="placed by ppo_modular inside Vidur")
    parser.add_argument("--sb3-limit-s", type=float, default=240.0, help="how long Stable-Baselines3 may try")
    parser.add_argument("--count", type=positive, default=100_000_000, help="how far the processes that only count get")
    quick = {
        "decisions": 8192,
        "attempts": 1,
        "evaluation_requests": 200,
        "vidur_requests": 200,
        "sb3_limit_s": 1.0,
        "count": 1_000_000,
    }
    options = parse_options(parser, quick=quick)
    return report(
        options,
        lambda: measure(options),
        lines_of,
        lambda figures: [name for name, target in TARGETS.items() if figures[name] < target],
    )


if __name__ == "__main__":
    sys.exit(main())
