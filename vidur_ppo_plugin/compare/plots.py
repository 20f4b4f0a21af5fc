"""The comparison as PNGs for papers: distributions, a heat map of changes, queues and shares per replica over time."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from . import series
from .display import TITLES, Entries, Entry, entries_of, percent
from .metrics import METRICS
from .results import Results, file_name
from .statistics import BETTER, CONFIDENCE, REFERENCE, WORSE, compare_cells
from .style import SchedulerStyle, diverging_colour, replica_colours, scheduler_styles

DPI = 200
HEAT_MAP_METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99", "goodput_rps")

_TEXT, _MUTED, _GRID = "#1c1f23", "#5f6670", "#e3e6ea"
_COLUMNS_OF_PANELS = 3
_PANEL_INCHES = (2.75, 1.65)
_CELL_INCHES = (0.72, 0.3)
_NARROWEST_INCHES = 5.0
_MOST_REPLICAS_IN_LEGEND = 8


def write_plots(results: Results, directory: Path, comparison: pd.DataFrame | None = None) -> list[Path]:
    """Write every plot of a comparison into `directory`; returns their paths.

    `comparison` is what `compare_cells` says of the results, and is computed if it is not given. Scenarios
    without a finished run have no plot.
    """
    metadata, cells = results.metadata, results.cells
    if comparison is None:
        comparison = compare_cells(cells, metadata["reference"])
    directory.mkdir(parents=True, exist_ok=True)
    entries = entries_of(comparison)
    paths = []
    for metric in HEAT_MAP_METRICS:
        paths.append(_save(change_heat_map(entries, metadata, metric), directory / f"change_{metric}.png"))
    for scenario in dict.fromkeys(cells["scenario"]):
        of_scenario = cells[cells["scenario"] == scenario]
        name = file_name(scenario)
        paths.append(_save(distributions(results, of_scenario), directory / f"cdf_{name}.png"))
        paths.append(_save(queue_lengths(results, of_scenario), directory / f"queues_{name}.png"))
        paths.append(_save(action_shares(results, of_scenario), directory / f"shares_{name}.png"))
    return paths


def distributions(results: Results, cells: pd.DataFrame) -> Figure:
    """CDFs of end-to-end latency and of time to first token, all seeds of a scenario together."""
    scenario = cells["scenario"].iloc[0]
    styles = scheduler_styles(results.metadata)
    shown = list(dict.fromkeys(cells["scheduler"]))
    legend_rows = math.ceil(len(shown) / 3)
    figure = _figure(7.2, 3.0 + 0.19 * legend_rows)
    end_to_end, first_token = figure.subplots(1, 2, sharey=True)
    for label in shown:
        seeds = cells.loc[cells["scheduler"] == label, "seed"]
        requests = pd.concat([results.requests(scenario, label, seed) for seed in seeds])
        for axes, values_s in ((end_to_end, series.end_to_end_s), (first_token, series.first_token_s)):
            at_s = series.quantiles(values_s(requests))
            axes.plot(at_s, series.QUANTILE_LEVELS, **_line(styles[label]), label=label)
    for axes, title in ((end_to_end, "End-to-end latency (s)"), (first_token, "Time to first token (s)")):
        axes.set_xlabel(title)
        axes.set_ylim(0, 1)
        _scale_log(axes)
        _decorate(axes)
    end_to_end.set_ylabel("Fraction of requests")
    figure.suptitle(f"{scenario}: distribution over requests", x=0.01, ha="left", fontsize=10, fontweight="bold")
    handles = [Line2D([], [], **_line(styles[label])) for label in shown]
    _legend(figure, handles, [_shown(label, results.metadata) for label in shown], columns=3)
    return figure


def change_heat_map(entries: Entries, metadata: Mapping[str, Any], metric: str) -> Figure:
    """The change of a metric against the reference by scheduler and scenario: blue better, orange worse."""
    scenarios = list(metadata["scenarios"])
    labels = [label for label in metadata["schedulers"] if label != metadata["reference"]]
    names = [_shown(label, metadata) for label in labels]
    names_inches = 0.4 + 0.075 * max(map(len, names), default=0)
    width = max(names_inches + _CELL_INCHES[0] * len(scenarios), _NARROWEST_INCHES)
    height = 0.9 + _CELL_INCHES[1] * max(len(labels), 1) + 0.045 * max(map(len, scenarios))
    figure = _figure(width, height)
    axes = figure.subplots()
    for row, label in enumerate(labels):
        for column, scenario in enumerate(scenarios):
            _heat_map_cell(axes, row, column, metric, entries.get((scenario, label, metric)))
    # Few scenarios leave the rest of the width empty instead of stretching their cells.
    columns = (width - names_inches) / _CELL_INCHES[0]
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(max(len(labels), 1) - 0.5, -0.5))
    axes.set_yticks(range(len(labels)), names)
    axes.set_xticks(range(len(scenarios)), scenarios, rotation=35, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0, labelsize=8, colors=_TEXT)
    axes.spines[:].set_visible(False)
    title = f"Change of {TITLES[metric]} against {metadata['reference']} (%)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    note = (
        f"blue: better, orange: worse (the {CONFIDENCE:.0%} interval excludes zero); grey: no difference, or not tested"
    )
    figure.supxlabel(note, fontsize=7, color=_MUTED, x=0.01, ha="left")
    return figure


def queue_lengths(results: Results, cells: pd.DataFrame) -> Figure:
    """Requests waiting at each replica over time, a panel a scheduler, for the first seed."""

    def draw(axes: Axes, shown: series.ReplicaSeries, colours: Sequence[str]) -> None:
        for values, colour in zip(shown.values, colours, strict=True):
            axes.plot(shown.time_s, values, color=colour, linewidth=0.8, drawstyle="steps-mid")
        # One scheduler may let a queue grow without bound: the others must stay readable beside it.
        axes.set_yscale("function", functions=(_root, np.square))

    figure = _panels(results, cells, "requests waiting", series.waiting, draw)
    highest = max(np.asarray(line.get_ydata()).max() for axes in figure.axes for line in axes.lines)
    figure.axes[0].set_ylim(0, max(highest, 1) * 1.05)
    figure.axes[0].set_yticks(_root_ticks(max(highest, 1)))
    figure.supylabel("requests waiting (root scale)", fontsize=8)
    return figure


def action_shares(results: Results, cells: pd.DataFrame) -> Figure:
    """The share of requests that each replica got over time, a panel a scheduler, for the first seed."""

    def draw(axes: Axes, shown: series.ReplicaSeries, colours: Sequence[str]) -> None:
        axes.stackplot(shown.time_s, shown.values, colors=colours, step="mid", linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_xlim(shown.time_s[0], shown.time_s[-1])

    figure = _panels(results, cells, "share of requests", series.action_shares, draw)
    figure.supylabel("share of requests", fontsize=8)
    return figure


def _panels(
    results: Results,
    cells: pd.DataFrame,
    title: str,
    compute: Callable[[pd.DataFrame, int], series.ReplicaSeries],
    draw: Callable[[Axes, series.ReplicaSeries, Sequence[str]], None],
) -> Figure:
    """A grid with a panel for each scheduler, all with the same axes."""
    scenario = cells["scenario"].iloc[0]
    num_replicas = results.metadata["scenarios"][scenario]["num_replicas"]
    seeds = {label: group["seed"].iloc[0] for label, group in cells.groupby("scheduler", sort=False)}
    columns = min(_COLUMNS_OF_PANELS, len(seeds))
    rows = math.ceil(len(seeds) / columns)
    figure = _figure(max(columns * _PANEL_INCHES[0], _NARROWEST_INCHES), rows * _PANEL_INCHES[1] + 0.9)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = replica_colours(num_replicas)
    for axes, (label, seed) in zip(grid.flat, seeds.items(), strict=False):
        draw(axes, compute(results.requests(scenario, label, seed), num_replicas), colours)
        axes.set_title(_shown(label, results.metadata), fontsize=8, loc="left", color=_TEXT)
        _decorate(axes)
    for index, axes in enumerate(grid.flat):
        axes.set_visible(index < len(seeds))
        # The lowest panel of each column carries the time axis, also where the last row is not full.
        if index + columns >= len(seeds):
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel("time (s)")
    shown_seeds = ", ".join(map(str, sorted(set(seeds.values()))))
    heading = f"{scenario}: {title} per replica (seed {shown_seeds})"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10, fontweight="bold")
    named = np.unique(np.linspace(0, num_replicas - 1, min(num_replicas, _MOST_REPLICAS_IN_LEGEND)).round().astype(int))
    handles = [Line2D([], [], color=colours[i], linewidth=4) for i in named]
    _legend(figure, handles, [f"replica {i}" for i in named], columns=2 * columns + 2)
    return figure


def _heat_map_cell(axes: Axes, row: int, column: int, metric: str, entry: Entry | None) -> None:
    change = math.nan if entry is None else entry.change
    is_plain = entry is None or entry.verdict not in (BETTER, WORSE)
    goodness = -change if METRICS[metric].lower_is_better else change
    colour = "#f1f2f4" if is_plain else diverging_colour(goodness)
    axes.fill_between([column - 0.48, column + 0.48], row - 0.47, row + 0.47, color=colour, linewidth=0)
    weight = "normal" if is_plain else "bold"
    text = "missing" if entry is None else percent(change).removesuffix("%").replace("-", "\N{MINUS SIGN}")
    axes.text(
        column, row, text, ha="center", va="center", fontsize=8, fontweight=weight, color=_MUTED if is_plain else _TEXT
    )


def _figure(width_inches: float, height_inches: float) -> Figure:
    figure = Figure(figsize=(width_inches, height_inches), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    # Without its version of matplotlib in it, a file depends on the results alone.
    figure.savefig(path, metadata={"Software": None})
    return path


def _line(style: SchedulerStyle) -> dict[str, Any]:
    return {"color": style.colour, "linestyle": style.dash, "linewidth": 1.9 if style.is_reference else 1.2}


def _root(values: Any) -> Any:
    return np.sqrt(np.maximum(values, 0))


def _root_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the highest value that do not crowd on a root scale."""
    ticks = [0.0]
    for power in range(math.ceil(math.log10(highest)) + 1):
        for tick in (float(digit * 10**power) for digit in (1, 2, 5)):
            if tick <= highest and math.sqrt(tick / highest) - math.sqrt(ticks[-1] / highest) > 0.15:
                ticks.append(tick)
    return ticks


def _scale_log(axes: Axes) -> None:
    """A logarithmic time axis with plain numbers, between the powers of ten too where there are few of them."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 200 else (1,), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _decorate(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7, colors=_TEXT, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)


def _legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str], columns: int) -> None:
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7, frameon=False, handlelength=2.6
    )


def _shown(label: str, metadata: Mapping[str, Any]) -> str:
    if label == metadata["reference"]:
        return f"{label} ({REFERENCE})"
    return label if metadata["schedulers"][label]["deployable"] else f"{label} (not deployable)"
