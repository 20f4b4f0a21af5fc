"""Whether a change that only moves code left every result as it was, to the last bit.

    python benchmarks/same_results.py --out before.json          # in a checkout without the change
    python benchmarks/same_results.py --against before.json      # in one with it, on the same machine

Runs seeded commands of `vidur-ppo` and keeps a digest of each table that they leave: decisions and latencies of every
request for all heuristics and the shipped policy in the quick comparison (in the twin and in Vidur), the metrics of
trainings with and without look-ahead, of training in Vidur, in one process and in two, and of runs that learn online.
What a clock measures is left out. Digests depend on the processor, so none is committed.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from _reporting import new_parser, parse_options, report

Result = dict[str, Any]

COMMAND = [sys.executable, "-m", "vidur_ppo_plugin.cli"]
HEURISTICS = (
    "random,round_robin,lor,least_outstanding,power_of_two,least_kv,least_tokens,least_work,shortest_delay,size_split"
)
POLICIES = "balanced=ppo_modular:pretrained,mean=ppo_modular:pretrained@0"
P = "--p_p_o_global_scheduler_modular_config"
#: Columns that a clock measures, by a part of their name.
CLOCK = (
    "_us",
    "seconds",
    "wall",
    "per_s",
    "time_share",
    "_share_time",
    "elapsed",
    "simulating",
    "deciding",
    "learning",
)

TRAININGS = {
    "marginal_delay": {
        "decisions": 16384,
        "environments": 16,
        "clusters_in_step": 4,
        "mixture": [
            {"scenario": "mixed_long", "load": [0.6, 1.0]},
            {"scenario": "heterogeneous"},
            {"scenario": "vllm"},
        ],
        "policy": {"rollout_len": 64, "epochs": 2, "minibatch_size": 256, "lr": 0.003},
    },
    "look_ahead": {
        "decisions": 8192,
        "environments": 8,
        "clusters_in_step": 2,
        "mixture": [
            {"scenario": "mixed", "tail_preference": [0, 1], "report_delay_s": [0, 1]},
            {"scenario": "heterogeneous", "tail_preference": [0, 0.3], "look_ahead": {"marginal_delay": [1, 1]}},
        ],
        "policy": {
            "rollout_len": 128,
            "epochs": 2,
            "minibatch_size": 32,
            "prior": "log_least_work",
            "prior_weight": 1.0,
            "kl_ref_coef": 0.2,
            "kl_ref_steps": 0,
        },
        "look_ahead": {"requests_per_replica": 10, "every": 16, "boldness": [16, 7], "latency_squared": [0.3, 0.8]},
    },
    "queue_delay": {
        "decisions": 4096,
        "environments": 8,
        "clusters_in_step": 4,
        "enable_critic": True,
        "mixture": [{"scenario": "chat"}, {"scenario": "kv_tight"}],
        "policy": {"reward_mode": "queue_delay", "gamma": 0.99, "rollout_len": 64, "minibatch_size": 128},
    },
    "in_vidur": {
        "decisions": 512,
        "environments": 2,
        "clusters_in_step": 1,
        "backend": "vidur",
        "mixture": [{"scenario": "mixed"}],
        "policy": {"rollout_len": 64, "minibatch_size": 64},
    },
}
TRAINING_COMMON = {"seed": 5, "evaluation": {"every_decisions": 0, "seeds": 1, "num_requests": 400}}
ONLINE = {
    "learning": ["configs/learning.yaml"],
    "from_pretrained": ["configs/learning.yaml", f"{P}_load_checkpoint", "pretrained"],
    "plan": ["configs/plan_2025_09_18.yaml"],
    "candidates": [
        "configs/learning.yaml",
        f"{P}_max_candidates",
        "2",
        f"{P}_reward_mode",
        "queue_delay",
        f"{P}_gamma",
        "0.9",
    ],
    "attention": [
        "configs/learning.yaml",
        f"{P}_attention_heads",
        "2",
        f"{P}_reward_mode",
        "hybrid",
        f"{P}_gamma",
        "0.9",
    ],
}
ONLINE_REQUESTS = ["--synthetic_request_generator_config_num_requests", "1500"]


def run(arguments: list[str], directory: Path) -> None:
    """Run a command of ours; what it prints is kept beside its results."""
    with (directory / "log.txt").open("a") as log:
        subprocess.run(
            [*COMMAND, *arguments], check=True, stdout=log, stderr=log, env={**os.environ, "WANDB_MODE": "offline"}
        )


def digest(table: pd.DataFrame) -> str:
    """Of every value of a table, to the last bit, but for columns that a clock measures or that have no value."""
    total = hashlib.sha256()
    for name in sorted(table.dropna(axis="columns", how="all").columns):
        if any(part in name for part in CLOCK):
            continue
        column = table[name].to_numpy()
        data = column.tobytes() if column.dtype.kind in "fiub" else "\n".join(map(str, column)).encode()
        total.update(f"{name}:{column.dtype.kind}:".encode() + data)
    return total.hexdigest()[:16]


def compared(directory: Path, engine: str, schedulers: str, scenarios: str) -> Iterator[tuple[str, str]]:
    """Every request of every cell of a quick comparison."""
    out = directory / "results"
    options = ["--out", str(out), "--engine", engine, "--schedulers", schedulers, "--reference", "round_robin"]
    run(["compare", "--quick", "--jobs", "2", *options, *(["--scenarios", scenarios] if scenarios else [])], directory)
    files = sorted(out.rglob("*.parquet"))
    if not files:
        raise SystemExit(f"{out}: no tables of requests")
    for file in files:
        yield f"compare {engine} {file.relative_to(out).with_suffix('')}", digest(pd.read_parquet(file))


def trained(directory: Path, name: str, workers: int) -> Iterator[tuple[str, str]]:
    """The metrics of a training."""
    path, out = directory / "train.yaml", directory / "out"
    path.write_text(yaml.safe_dump({**TRAINING_COMMON, **TRAININGS[name]}))
    run(["train", str(path), "--out", str(out), "--workers", str(workers)], directory)
    for file in sorted(out.rglob("*.csv")):
        yield f"train {name} workers={workers} {file.relative_to(out)}", digest(pd.read_csv(file))


def learned_online(directory: Path, name: str) -> Iterator[tuple[str, str]]:
    """The metrics of a run that learns, and Vidur's own table of requests."""
    out, metrics = directory / "vidur", directory / "metrics"
    options = ["--metrics_config_output_dir", str(out), f"{P}_metrics_dir", str(metrics)]
    run(["run", *ONLINE[name], *ONLINE_REQUESTS, *options, "--compare="], directory)
    for file in [metrics / "ppo_metrics.csv", *sorted(out.rglob("request_metrics.csv"))]:
        yield f"online {name} {file.name}", digest(pd.read_csv(file))


def cases(is_quick: bool) -> dict[str, Callable[[Path], Iterator[tuple[str, str]]]]:
    """Everything that is run, by name."""
    if is_quick:
        return {
            "compare-twin": lambda d: compared(d, "twin", "round_robin,least_tokens", "arxiv"),
            "train-marginal_delay-1": lambda d: trained(d, "marginal_delay", 1),
        }
    all_schedulers = f"{HEURISTICS},{POLICIES}"
    found = {
        "compare-twin": lambda d: compared(d, "twin", f"{all_schedulers},oracle", ""),
        "compare-vidur": lambda d: compared(d, "vidur", all_schedulers, "mixed_long,hetero_mixed8,stale,drain"),
    }
    for name in TRAININGS:
        for workers in (1, 2):
            found[f"train-{name}-{workers}"] = lambda d, name=name, workers=workers: trained(d, name, workers)
    for name in ONLINE:
        found[f"online-{name}"] = lambda d, name=name: learned_online(d, name)
    return found


def measure(options: argparse.Namespace, chosen: Mapping[str, Callable[[Path], Iterator[tuple[str, str]]]]) -> Result:
    """The digests, and which of them differ from those of `--against`."""
    digests: dict[str, str] = {}
    for name, run_case in chosen.items():
        with tempfile.TemporaryDirectory(prefix="same-results-") as directory:
            try:
                found = dict(run_case(Path(directory)))
            except subprocess.CalledProcessError:
                sys.exit(f"{name} failed:\n{(Path(directory) / 'log.txt').read_text()[-3000:]}")
        digests |= found
        print(f"{name}: {len(found)} tables", file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(digests, indent=1))
    before = json.loads(options.against.read_text()) if options.against else digests
    return {"digests": digests, "different": [name for name in digests if before.get(name) != digests[name]]}


def lines_of(result: Result) -> Iterator[str]:
    """Each table, and whether it is the one of before."""
    for name, value in result["digests"].items():
        yield f"{value} {'DIFFERS ' if name in result['different'] else ''}{name}"


def main() -> int:
    """Run, write, compare; 1 if something differs."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the digests there")
    parser.add_argument("--against", type=Path, help="digests of another checkout on this machine")
    parser.add_argument("--only", default="", help="cases, comma-separated; all if empty")
    options = parse_options(parser, {})
    chosen = cases(options.quick)
    wanted = options.only.split(",") if options.only else list(chosen)
    unknown = [name for name in wanted if name not in chosen]
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(chosen)}")
    return report(options, lambda: measure(options, {name: chosen[name] for name in wanted}), lines_of, _different)


def _different(result: Result) -> list[str]:
    return [f"{name} is not the table of --against" for name in result["different"]]


if __name__ == "__main__":
    sys.exit(main())
