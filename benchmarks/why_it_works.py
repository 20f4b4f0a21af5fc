"""What a policy does differently from least_tokens: the plots of docs/why_it_works.md.

    python benchmarks/why_it_works.py [--checkpoint pretrained] [--scenario mixed_long] [--tails 0,0.5,1]
        [--seeds 4] [--requests N] [--out docs/images] [--json] [--quick]

Each router places the same requests of held-out seeds in the twin, and is watched: where a prompt goes, and what was
going on at that replica and at the others. A prompt is long above the scenario's class boundary; a replica is busy with
documents if a long prompt that was sent there has not got its first token yet.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _reporting import new_parser, parse_options, positive, report
from _requirements import PRIOR
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.compare.engines import cell_flags, quietly
from vidur_ppo_plugin.compare.scheduler_router import build_scheduler_router
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.compare.seeds import COMPARISON
from vidur_ppo_plugin.flags import BALANCED
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.scenario import Scenario, find_scenario

Array = NDArray[np.float64]
COLOURS = ("#1c1f23", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
NUM_SIZES = 8


@dataclass(frozen=True)
class Watched:
    """Decisions of one router, a row for each request after the warm-up."""

    prompt_tokens: Array
    replica: Array
    latency_s: Array
    ttft_s: Array
    #: least_tokens' score of every replica at the decision, [requests, replicas].
    load: Array
    #: Whether a replica had a long prompt without its first token, [requests, replicas].
    has_long: NDArray[np.bool_]

    @property
    def load_rank(self) -> Array:
        """How many replicas had a lower load than the chosen one, as a share: 0 is least_tokens' own choice."""
        chosen = self.load[np.arange(len(self.load)), self.replica.astype(int)]
        rank: Array = (self.load < chosen[:, None]).sum(axis=1) / (self.load.shape[1] - 1)
        return rank

    @property
    def meets_long(self) -> NDArray[np.bool_]:
        """Whether the chosen replica was busy with a long prompt."""
        chosen: NDArray[np.bool_] = self.has_long[np.arange(len(self.load)), self.replica.astype(int)]
        return chosen


def watch(scenario: Scenario, spec: SchedulerSpec, seed: int) -> Watched:
    """Place the requests of a seed, and remember what was seen."""
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments
    from vidur_ppo_plugin.sim.launch import parse
    from vidur_ppo_plugin.sim.twin_config import twin_config
    from vidur_ppo_plugin.twin.cluster import play

    requests = scenario.requests(seed)
    with quietly(to_arguments(cell_flags(scenario, spec, seed), known_flags())) as arguments:
        config = parse(arguments)
    router, slots = build_scheduler_router(spec, config, seed=seed)
    loads: list[Array] = []

    def decide(snapshot: ClusterSnapshot, request: RequestInfo) -> int:
        loads.append(snapshot.token_load.copy())
        return router(snapshot, request)

    done = play(twin_config(config), requests, decide, num_waiting_slots=slots)
    is_long = requests.prompt_tokens > scenario.class_boundary_tokens
    # For every replica: the intervals in which a long prompt is there without its first token.
    has_long = np.zeros((len(requests), scenario.num_replicas), np.bool_)
    for replica in range(scenario.num_replicas):
        there = is_long & (done.replica == replica)
        begins, ends = np.sort(requests.arrived_at_s[there]), np.sort(done.first_token_at_s[there])
        now = requests.arrived_at_s
        # A request that arrives now has not begun before itself.
        has_long[:, replica] = np.searchsorted(begins, now, side="left") > np.searchsorted(ends, now, side="right")
    kept = slice(int(scenario.warm_up_fraction * len(requests)), None)
    return Watched(
        prompt_tokens=requests.prompt_tokens[kept].astype(float),
        replica=done.replica[kept].astype(float),
        latency_s=(done.completed_at_s - requests.arrived_at_s)[kept],
        ttft_s=(done.first_token_at_s - requests.arrived_at_s)[kept],
        load=np.array(loads)[kept],
        has_long=has_long[kept],
    )


def joined(parts: list[Watched]) -> Watched:
    """Several seeds as one."""
    return Watched(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def figures(watched: dict[str, Watched], scenario: Scenario) -> dict[str, dict[str, Any]]:
    """The numbers of the page, by router."""
    edges = size_edges(next(iter(watched.values())).prompt_tokens)
    result = {}
    for label, one in watched.items():
        is_long = one.prompt_tokens > scenario.class_boundary_tokens
        some_long = one.has_long.any(axis=1)
        some_free = ~one.has_long.all(axis=1)
        sizes = np.digitize(one.prompt_tokens, edges[1:-1])
        result[label] = {
            "requests": len(one.prompt_tokens),
            "mean_latency_s": {
                "short": float(one.latency_s[~is_long].mean()),
                "long": float(one.latency_s[is_long].mean()),
            },
            "p99_latency_s": {
                "short": float(np.percentile(one.latency_s[~is_long], 99)),
                "long": float(np.percentile(one.latency_s[is_long], 99)),
            },
            # Of short requests: how many go to a replica that is busy with a document.
            "short_that_meet_long": float(one.meets_long[~is_long].mean()),
            # Of documents that arrive while another is being prefilled and a replica without one is there.
            "long_that_join_long": float(one.meets_long[is_long & some_long & some_free].mean()),
            "replicas_with_long": float(one.has_long.sum(axis=1).mean()),
            "size_edges": edges.tolist(),
            "load_rank_by_size": [float(one.load_rank[sizes == size].mean()) for size in range(NUM_SIZES)],
            "prior_choice_by_size": [float((one.load_rank[sizes == size] == 0).mean()) for size in range(NUM_SIZES)],
            # [sizes, replicas by load]: to the emptiest, to the second emptiest, ...
            "rank_share_by_size": [_rank_shares(one, sizes == size) for size in range(NUM_SIZES)],
            "meets_long_by_size": [
                float(one.meets_long[(sizes == size) & some_long & some_free].mean()) for size in range(NUM_SIZES)
            ],
        }  # fmt: skip
    return result


def _rank_shares(one: Watched, mask: NDArray[np.bool_]) -> list[float]:
    """The share of some requests that went to the replica of each rank by load; equal loads share a rank evenly."""
    load, chosen = one.load[mask], one.replica[mask].astype(int)
    own = load[np.arange(len(load)), chosen][:, None]
    lower, equal = (load < own).sum(axis=1), (load == own).sum(axis=1)
    ranks = np.arange(load.shape[1])[None, :]
    shares = ((ranks >= lower[:, None]) & (ranks < (lower + equal)[:, None])) / equal[:, None]
    return [float(share) for share in shares.mean(axis=0)]


def size_edges(prompt_tokens: Array) -> Array:
    """Bounds of classes of prompts, evenly in the logarithm between the 2 % and the largest."""
    low, high = np.percentile(prompt_tokens, [2, 100])
    edges: Array = np.geomspace(low, high, NUM_SIZES + 1)
    return edges


def draw(result: dict[str, dict[str, Any]], watched: dict[str, Watched], scenario: Scenario, out: Path) -> list[Path]:
    """The plots."""
    out.mkdir(parents=True, exist_ok=True)
    by_size = (
        ("load_rank_by_size", "replicas with less load than the chosen one (share)"),
        ("prior_choice_by_size", f"share placed as {PRIOR} would"),
        ("meets_long_by_size", "share placed beside a document"),
    )
    figure, panels = _figure(1, 3, (10.5, 3.2))
    for axes, (key, title) in zip(panels, by_size, strict=True):
        for colour, (label, row) in zip(COLOURS, result.items(), strict=False):
            edges = np.array(row["size_edges"])
            axes.plot(np.sqrt(edges[1:] * edges[:-1]), row[key], color=colour, marker="o", markersize=3, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("prompt (tokens)")
        axes.set_title(title, loc="left", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.axvline(scenario.class_boundary_tokens, color="#9aa0a6", linewidth=0.6, linestyle=":")
    panels[0].legend(fontsize=7, frameon=False)
    paths = [_save(figure, out / f"why_placement_{scenario.name}.png")]
    figure, panels = _figure(1, 2, (7.2, 3.2))
    for axes, (is_long, title) in zip(panels, ((False, "short prompts"), (True, "long prompts")), strict=True):
        for colour, (label, one) in zip(COLOURS, watched.items(), strict=False):
            mask = (one.prompt_tokens > scenario.class_boundary_tokens) == is_long
            values = np.sort(one.latency_s[mask])
            axes.plot(values, np.arange(1, len(values) + 1) / len(values), color=colour, label=label, linewidth=1.2)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("end-to-end latency (s)")
        axes.set_title(title, loc="left", fontsize=8)
    panels[0].set_ylabel("fraction of requests")
    panels[0].legend(fontsize=7, frameon=False)
    paths.append(_save(figure, out / f"why_latency_{scenario.name}.png"))
    return [*paths, _bars(result, scenario, out), _choices(result, scenario, out)]


def _bars(result: dict[str, dict[str, Any]], scenario: Scenario, out: Path) -> Path:
    rows = (
        ("short_that_meet_long", "short requests that are sent\nto a replica with a document"),
        ("long_that_join_long", "documents that join another one\nthough a replica has none"),
    )
    figure, panels = _figure(1, 2, (7.2, 2.6))
    for axes, (key, title) in zip(panels, rows, strict=True):
        values = [100 * row[key] for row in result.values()]
        axes.barh(range(len(values)), values, color=COLOURS[: len(values)])
        axes.set_yticks(range(len(values)), list(result), fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("%")
        axes.set_title(title, loc="left", fontsize=8)
    return _save(figure, out / f"why_sharing_{scenario.name}.png")


def _choices(result: dict[str, dict[str, Any]], scenario: Scenario, out: Path) -> Path:
    """Where a prompt of some size goes: to the emptiest replica, the second emptiest, ..."""
    figure, panels = _figure(1, len(result), (2.6 * len(result) + 0.6, 3.0))
    for axes, (label, row) in zip(panels, result.items(), strict=True):
        shares = np.array(row["rank_share_by_size"])
        axes.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100, aspect="auto", origin="lower")
        for size, rank in np.ndindex(*shares.shape):
            share = shares[size, rank]
            colour = "w" if share > 0.6 else "k"
            axes.text(rank, size, f"{100 * share:.0f}", ha="center", va="center", fontsize=6, color=colour)
        edges = np.array(row["size_edges"])
        axes.set_yticks(range(NUM_SIZES), [f"{middle:.0f}" for middle in np.sqrt(edges[1:] * edges[:-1])])
        axes.set_xticks(range(shares.shape[1]), [str(rank + 1) for rank in range(shares.shape[1])])
        axes.set_xlabel("replica, by load (1: least)")
        axes.set_title(label, loc="left", fontsize=8)
        axes.grid(visible=False)
    panels[0].set_ylabel("prompt (tokens)")
    return _save(figure, out / f"why_choice_{scenario.name}.png")


def _figure(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=inches, dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns)
    for axes in panels:
        axes.grid(color="#e3e6ea", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=7)
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    return path


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Watch, draw; the numbers of the page."""
    _autoload.install()
    scenario = find_scenario(options.scenario)
    if options.requests:
        scenario = scenario.at(num_requests=options.requests)
    tails = [f"policy, tail {tail}=ppo_modular:{options.checkpoint}@{tail}" for tail in options.tails.split(",")]
    specs = parse_schedulers([PRIOR, *tails])
    seeds = COMPARISON[: options.seeds]
    watched = {spec.label: joined([watch(scenario, spec, seed) for seed in seeds]) for spec in specs}
    result = figures(watched, scenario)
    paths = [str(path) for path in draw(result, watched, scenario, options.out)]
    return {"checkpoint": options.checkpoint, "scenario": scenario.name, "routers": result, "pictures": paths}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The table of the page."""
    yield "| router | mean short / long (s) | P99 short / long (s) | short beside a document | documents that join |"
    yield "|---|---|---|---|---|"
    for label, row in result["routers"].items():
        mean, tail = row["mean_latency_s"], row["p99_latency_s"]
        yield (
            f"| {label} | {mean['short']:.2f} / {mean['long']:.2f} | {tail['short']:.2f} / {tail['long']:.2f} | "
            f"{row['short_that_meet_long']:.1%} | {row['long_that_join_long']:.1%} |"
        )
    yield "\n" + "\n".join(f"wrote {path}" for path in result["pictures"])


def main() -> int:
    """Watch, draw, print."""
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", default="pretrained")
    parser.add_argument("--scenario", default="mixed_long")
    parser.add_argument("--tails", default=f"0,{BALANCED},1", help="the usual one among them")
    parser.add_argument("--seeds", type=positive, default=4)
    parser.add_argument("--requests", type=positive, help="of each run; the scenario's own unless given")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parse_options(parser, quick={"tails": "0", "seeds": 1, "requests": 400})
    return report(options, lambda: measure(options), lines_of)


if __name__ == "__main__":
    sys.exit(main())
