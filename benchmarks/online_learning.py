"""Learning inside a Vidur simulation: on from a policy, or from nothing; judged on requests that it has not seen.

    python benchmarks/online_learning.py [--checkpoint pretrained] [--tail T] [--workloads speeds,documents,code]
        [--train-requests 8000] [--training-seed 8] [--points 4] [--seeds 16] [--requests 8000] [--beside A,B]
        [--flag NAME=VALUE] [--jobs N] [--json] [--quick]
    python benchmarks/online_learning.py --checkpoint nothing --workloads mixed_long --train-requests 20000 --points 1 \
        --seeds 4 --requests 3000 --beside round_robin,least_outstanding,shortest_delay,size_split

For each workload `ppo_modular` learns with its usual flags (`--flag` changes one) while the requests of one seed are
served; the weights that serve are kept at several points on the way and at the end. Every one of them then routes the
requests of held-out seeds greedily, in the twin, which is exact. A workload is a scenario, or one of three that no
scenario has: `speeds` (unequal ones, which the router is not told), `documents` (three times as many), `code`.

With a checkpoint, it starts from that, with a learning rate of 3e-4, and changes are against the checkpoint: they
should end below 0 and never be above +2 % on the way. With `--checkpoint nothing` they are against least_tokens, its
prior. They are paired by seed, with 95 % intervals. `--beside` adds rows for other schedulers (size_split with its
defaults: one replica for prompts above 4,096 tokens). The last column is what learning itself cost: mean latency of the
learning run against that of whatever it is compared with on the same requests.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _comparison import open_results, run_cells
from _reporting import new_parser, parse_options, positive, report
from _requirements import METRICS, PRIOR, changes_of, text_of

from vidur_ppo_plugin import _autoload, checkpoint
from vidur_ppo_plugin.compare.display import TITLES
from vidur_ppo_plugin.compare.engines import cell_flags, quietly, run_cell
from vidur_ppo_plugin.compare.schedulers import LEARNED, SchedulerError, SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.compare.seeds import COMPARISON
from vidur_ppo_plugin.envs.settings import changed
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.scenario import Scenario, ScenarioError, find_scenario

NOTHING = "nothing"
START = "start"
# The guard and the learning rate were chosen with the training seed 7 and on the first eight seeds of comparisons and
# eight from the hundredth on.
SEEDS = COMPARISON[120:]
#: Flags of `ppo_modular` where it learns on from a checkpoint.
FLAGS = {"lr": 3e-4}
CHAT = "lognormal(417, 1.086, 10, 4000) / lognormal(139, 0.973, 5, 2000)"


def shifts() -> dict[str, Scenario]:
    """Workloads and clusters that no scenario has."""
    mixed_long = find_scenario("mixed_long")
    documents = f"0.9: {CHAT}; 0.1: uniform(8000, 24000) / lognormal(139, 0.973, 5, 2000)"
    code = "0.9: lognormal(1500, 1.0, 50, 7000) / lognormal(12, 0.9, 2, 400); 0.1: uniform(5000, 7500) / fixed(8)"
    return {
        # Speeds that the router is not told.
        "speeds": changed(mixed_long, replica_speeds=[1.5, 1.0, 0.75, 0.5]),
        # Three times as many documents.
        "documents": _with(mixed_long, lengths=documents, capacity_qps=12.3),
        # Completion of code: long prompts, hardly any output.
        "code": _with(find_scenario("mixed"), lengths=code, capacity_qps=17.1),
    }


def _with(scenario: Scenario, *, lengths: str, capacity_qps: float) -> Scenario:
    """Other lengths; their capacity was found by `compare.capacity.find_capacity`, as those of the scenarios."""
    assert scenario.capacity is not None
    capacity = dataclasses.replace(scenario.capacity, qps=capacity_qps)
    return scenario.at(lengths=lengths, capacity=capacity)


class Learned(NamedTuple):
    """What came of a simulation in which a policy learned."""

    #: Decisions -> the file with the weights that served then.
    files: dict[int, Path]
    num_updates: int
    num_completed: int
    mean_latency_s: float


def learn(scenario: Scenario, options: argparse.Namespace, points: Sequence[int], directory: Path) -> Learned:
    """Learn in Vidur on the requests of the training seed."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
    from vidur_ppo_plugin.sim.launch import run

    weights: dict[int, dict[str, Any]] = {}
    schedulers: list[Any] = []

    def watch(simulator: Any, config: Any) -> None:
        scheduler = simulator.scheduler
        schedulers.append(scheduler)
        schedule = scheduler.schedule

        def watched() -> Any:
            placements = schedule()
            for point in points[:-1]:
                if point not in weights and scheduler.agent.num_decisions >= point:
                    weights[point] = scheduler.router.serving_weights()
            return placements

        scheduler.schedule = watched

    saved = directory / "saved"
    flags = {**options.flags, "save_checkpoint": str(saved)}
    if options.checkpoint != NOTHING:
        flags |= {"load_checkpoint": options.checkpoint, "tail_preference": options.tail}
    spec = SchedulerSpec("online", LEARNED, options=flags)
    with quietly(to_arguments(cell_flags(scenario, spec, options.training_seed), known_flags())) as arguments:
        outcome = run(arguments, watch)
    (scheduler,) = schedulers
    weights[points[-1]] = scheduler.router.serving_weights()  # a guard has had its last word
    metadata = checkpoint.verify(saved if options.checkpoint == NOTHING else options.checkpoint)
    files = {point: directory / f"{point}.ckpt" for point in points}
    for point, file in files.items():
        checkpoint.write(file, {"network": weights[point]}, metadata=metadata)
    num_completed = sum(request.completed_at_s is not None for request in outcome.requests)
    return Learned(files, scheduler.agent.ppo.num_updates, num_completed, outcome.e2e_s.mean)


def study(workload: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Changes of each metric at every point and by other schedulers, and what learning cost."""
    step = options.train_requests / options.points
    points = [round(step * (index + 1)) for index in range(options.points)]
    scenario = (shifts().get(workload) or find_scenario(workload)).at(num_requests=options.train_requests)
    learned = learn(scenario, options, points, directory)
    is_new = options.checkpoint == NOTHING
    tail = "" if is_new else f"@{options.tail:g}"
    start = PRIOR if is_new else f"{START}={LEARNED}:{options.checkpoint}{tail}"
    ours = [f"{point}={LEARNED}:{file}{tail}" for point, file in learned.files.items()]
    specs = [spec for spec in parse_schedulers([start, *ours, *options.beside])]
    reference, beside = specs[0], [spec.label for spec in specs[1 + len(ours) :]]
    begun = run_cell(scenario, reference, options.training_seed, engine="twin").requests
    begun_s = float((begun["completed_at_s"] - begun["arrived_at_s"]).mean())
    held_out = scenario.at(num_requests=options.requests)
    setup, results = open_results(
        directory / "results", [held_out], specs, SEEDS[: options.seeds], reference=reference.label
    )
    run_cells(setup, results, lambda _: True, options.jobs)
    cells = results.cells
    return {
        "workload": workload,
        "against": reference.label,
        "points": {point: changes_of(cells, str(point), reference.label)[held_out.name] for point in points},
        "beside": {name: changes_of(cells, name, reference.label)[held_out.name] for name in beside},
        "updates": learned.num_updates,
        "completed": learned.num_completed,
        "cost_of_learning": learned.mean_latency_s / begun_s - 1,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All workloads."""
    _autoload.install()
    results = []
    for workload in options.workloads.split(","):
        with tempfile.TemporaryDirectory() as directory:
            results.append(study(workload, options, Path(directory)))
        print(f"{workload} done", file=sys.stderr)
    told = {name: vars(options)[name] for name in ("checkpoint", "tail", "training_seed", "seeds")}
    return {**told, "workloads": results}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """A row for every point and every other scheduler."""
    start = PRIOR if result["checkpoint"] == NOTHING else f"{result['checkpoint']} at {result['tail']:g}"
    yield f"change against {start}, {result['seeds']} held-out seeds\n"
    yield f"| workload | after | {' | '.join(TITLES[metric] for metric in METRICS)} | cost of learning |"
    yield "|---" * (len(METRICS) + 3) + "|"
    for study in result["workloads"]:
        last = list(study["points"])[-1]
        for name, entries in {**study["points"], **study["beside"]}.items():
            cost = f"{study['cost_of_learning']:+.1%}" if name == last else ""
            cells = " | ".join(text_of(entries[metric]) for metric in METRICS)
            yield f"| {study['workload']} | {name} | {cells} | {cost} |"


def parse_flags(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of a command line, values as in JSON where they look like it."""
    flags = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            parser.error(f"--flag must be NAME=VALUE, got {text!r}")
        flags[name] = json.loads(value) if value[:1] in "0123456789.-tf" else value
    return flags


def main() -> int:
    """Learn, evaluate, print."""
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", default="pretrained", help=f"where it starts; {NOTHING}: a new network")
    parser.add_argument("--tail", type=float, default=BALANCED, help="tail_preference of a checkpoint")
    parser.add_argument("--workloads", default=",".join(shifts()))
    parser.add_argument("--train-requests", type=positive, default=8000)
    parser.add_argument("--training-seed", type=int, default=8, help="of the requests that are learned from")
    parser.add_argument("--points", type=positive, default=4, help="when weights are kept, the end included")
    parser.add_argument("--seeds", type=positive, default=16)
    parser.add_argument("--requests", type=positive, default=8000, help="of each held-out run")
    parser.add_argument("--beside", default="", help="other schedulers to compare with the start, comma-separated")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="a flag of ppo_modular")
    parser.add_argument("--jobs", type=positive, default=1)
    quick = {"workloads": "mixed_long", "train_requests": 300, "points": 2, "seeds": 1, "requests": 100}
    options = parse_options(parser, quick=quick)
    options.flags = ({} if options.checkpoint == NOTHING else FLAGS) | parse_flags(parser, options.flag)
    options.beside = options.beside.split(",") if options.beside else []
    try:
        return report(options, lambda: measure(options), lines_of)
    except (SchedulerError, ScenarioError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
