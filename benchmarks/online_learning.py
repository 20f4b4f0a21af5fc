"""`ppo_modular` trained in one simulation, then compared greedily with the heuristics on requests it has not seen.

    python benchmarks/online_learning.py [--scenario documents|speeds|arxiv] [--train-requests N] [--seeds N] [--json]

Scenarios are those of `baselines.py`. Training uses seed 7 and the defaults of `ppo_modular` (`--flag NAME=VALUE`
changes one); every scheduler then gets the same requests for each of the held-out seeds, from 300 on. The table shows
the change against the prior, least_tokens, paired by seed: mean and standard deviation over seeds.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import baselines

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.record.outcome import Outcome

PREFIX = "p_p_o_global_scheduler_modular_config_"
PRIOR = "least_tokens"
TRAINING_SEED = 7
FIRST_HELD_OUT_SEED = 300
COMPARED = (PRIOR, "round_robin", "least_outstanding", "shortest_delay", "size_split", "ppo_modular")


class Experiment:
    """One scenario: training, and evaluation on held-out seeds."""

    def __init__(self, scenario: baselines.Scenario, directory: Path, policy_flags: dict[str, Any]) -> None:
        self._scenario = scenario
        self._directory = directory
        self._policy_flags = {f"{PREFIX}{name}": value for name, value in policy_flags.items()}

    def run(self, scheduler: str, num_requests: int, seed: int, **own: Any) -> Outcome:
        """A simulation of the scenario with its own requests for the seed."""
        flags = dict(self._scenario.flags)
        if scheduler == "ppo_modular":
            flags |= self._policy_flags | {f"{PREFIX}{name}": value for name, value in own.items()}
        lengths = self._directory / f"lengths_{seed}_{num_requests}.csv"
        if not lengths.exists():
            baselines.write_lengths(lengths, self._scenario, num_requests, seed)
        scenario = replace(self._scenario, flags=flags)
        return baselines.run(scheduler, scenario, lengths, num_requests, seed, self._directory)

    def train(self, num_requests: int) -> tuple[Path, Outcome]:
        """The checkpoint of a policy that has learned from one simulation."""
        saved = self._directory / "checkpoints"
        outcome = self.run(
            "ppo_modular", num_requests, TRAINING_SEED, save_checkpoint=str(saved), checkpoint_interval=0
        )
        return saved, outcome

    def evaluate(self, saved: Path, num_requests: int, num_seeds: int) -> dict[str, list[dict[str, float]]]:
        """scheduler -> metrics for each held-out seed."""
        results: dict[str, list[dict[str, float]]] = {scheduler: [] for scheduler in COMPARED}
        for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + num_seeds):
            for scheduler in COMPARED:
                outcome = self.run(scheduler, num_requests, seed, load_checkpoint=str(saved), inference_only=True)
                results[scheduler].append({name: metric(outcome) for name, metric in baselines.METRICS.items()})
                print(f"seed {seed}: {scheduler} done", file=sys.stderr)
        return results


def changes(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """scheduler -> metric -> (mean, standard deviation) of the relative change against the prior."""
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for scheduler in COMPARED[1:]:
        table[scheduler] = {}
        for metric in baselines.METRICS:
            pairs = zip(results[scheduler], results[PRIOR], strict=True)
            relative = [ours[metric] / theirs[metric] - 1 for ours, theirs in pairs]
            spread = statistics.stdev(relative) if len(relative) > 1 else 0.0
            table[scheduler][metric] = (statistics.mean(relative), spread)
    return table


def main() -> int:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(baselines.SCENARIOS), default="documents")
    parser.add_argument("--train-requests", type=int, default=20000)
    parser.add_argument("--requests", type=int, default=3000, help="requests of each held-out simulation")
    parser.add_argument("--seeds", type=int, default=4, help="number of held-out seeds")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="a flag of ppo_modular")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    for name in ("train_requests", "requests", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(options, name)}")
    policy_flags = {}
    for text in options.flag:
        name, equals, value = text.partition("=")
        if not equals:
            parser.error(f"--flag must be NAME=VALUE, got {text!r}")
        policy_flags[name] = json.loads(value) if value[:1] in "0123456789.-tf" else value
    _autoload.install()
    with tempfile.TemporaryDirectory() as directory:
        experiment = Experiment(baselines.SCENARIOS[options.scenario], Path(directory), policy_flags)
        saved, training = experiment.train(options.train_requests)
        results = experiment.evaluate(saved, options.requests, options.seeds)
    table = changes(results)
    if options.json:
        print(json.dumps({"training_s": training.wall_s, "runs": results, "change_against_least_tokens": table}))
        return 0
    print(f"trained on {options.train_requests} requests in {training.wall_s:.0f} s; change against {PRIOR}:\n")
    print("| scheduler | TTFT mean | TTFT P99 | E2E mean | E2E P99 |\n|---|---|---|---|---|")
    for scheduler, row in table.items():
        cells = [f"{mean:+.1%} ± {spread:.1%}" for mean, spread in row.values()]
        print(f"| {scheduler} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
