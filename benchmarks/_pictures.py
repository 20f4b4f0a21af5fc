"""The pictures of `tables.py`: gains as a heat map, and mean against tail."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from _requirements import PRIOR, Changes, Entry, is_sure
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vidur_ppo_plugin.compare.display import TITLES
from vidur_ppo_plugin.compare.schedulers import TUNED
from vidur_ppo_plugin.compare.style import diverging_colour

MEAN, TAIL = "e2e_mean", "e2e_p99"
#: Metric -> change, of one scheduler.
Point = Mapping[str, Entry]

_TEXT, _MUTED, _PLAIN = "#1c1f23", "#5f6670", "#f1f2f4"
_POLICY, _SPLIT, _LINE = "#0072b2", "#d55e00", "#9aa0a6"
# Beyond this nobody would use a scheduler: it would only squeeze the others in the picture.
_MOST_SHOWN = 0.25
_MARKERS = ("x", "+", "v", "s", "d", "^", "*", "<", ">", "p", "h", "P")


def draw_gains(gains: Mapping[str, Changes], metrics: Sequence[str], title: str, note: str, path: Path) -> None:
    """A panel for each metric, a row for each scheduler of `gains`, a column for each scenario."""
    scenarios = list(dict.fromkeys(scenario for changes in gains.values() for scenario in changes))
    width, height = max(6.6, 1.9 + 0.72 * len(scenarios)), len(metrics) * (0.55 + 0.27 * len(gains)) + 1.0
    figure = _figure(width, height)
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_panel(axes, gains, metric, scenarios)
        axes.set_title(TITLES[metric], loc="left", fontsize=9, color=_TEXT)
    panels[-1].set_xticks(range(len(scenarios)), scenarios, rotation=30, ha="right", rotation_mode="anchor")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(note, fontsize=7, color=_MUTED, x=0.01, ha="left")
    _save(figure, path)


def _draw_panel(axes: Axes, gains: Mapping[str, Changes], metric: str, scenarios: list[str]) -> None:
    for y, changes in enumerate(gains.values()):
        for x, scenario in enumerate(scenarios):
            if scenario not in changes:
                continue
            entry = changes[scenario][metric]
            colour = diverging_colour(-entry["change"]) if is_sure(entry) else _PLAIN
            axes.fill_between([x - 0.48, x + 0.48], y - 0.46, y + 0.46, color=colour, linewidth=0)
            percent = round(100 * entry["change"])
            text = f"{percent:+d}".replace("-", "\N{MINUS SIGN}") if percent else "0"
            weight, colour = ("bold", _TEXT) if is_sure(entry) else ("normal", _MUTED)
            axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight=weight, color=colour)
    axes.set(xlim=(-0.5, len(scenarios) - 0.5), ylim=(len(gains) - 0.5, -0.5))
    axes.set_yticks(range(len(gains)), list(gains))
    axes.tick_params(length=0, labelsize=8, colors=_TEXT)
    axes.spines[:].set_visible(False)


def draw_trade_off(
    scenario: str,
    policies: Mapping[str, Point],
    heuristics: Mapping[str, Point],
    splits: Mapping[str, Point],
    path: Path,
) -> None:
    """Change of the mean to the right, of the tail upwards: the policy's curve, every `size_split`, everybody else."""
    figure = _figure(6.4, 4.4)
    axes = figure.subplots()
    shown = [point for point in splits.values() if _is_shown(point)]
    axes.scatter(*_columns(shown), s=12, color=_SPLIT, alpha=0.6, label=f"{TUNED}, every setting")
    best = sorted(front(splits).values(), key=lambda point: point[MEAN]["change"])
    axes.plot(*_columns([point for point in best if _is_shown(point)]), color=_SPLIT, linewidth=1, alpha=0.6)
    named = [(label, point) for label, point in heuristics.items() if _is_shown(point)]
    for marker, (label, point) in zip(itertools.cycle(_MARKERS), named, strict=False):
        axes.scatter(*_columns([point]), s=26, color=_TEXT, marker=marker, label=label, alpha=0.8)
    axes.plot(*_columns(list(policies.values())), color=_POLICY, marker="o", markersize=5, label="policy")
    for index, (label, point) in enumerate(policies.items()):
        above = index % 2  # neighbours on the curve would cover each other's names
        x, y = (values[0] for values in _columns([point]))
        offset, side = ((-4, 7), "right") if above else ((4, -11), "left")
        axes.annotate(label, (x, y), fontsize=7, color=_POLICY, xytext=offset, ha=side, textcoords="offset points")
    axes.axhline(0, color=_LINE, linewidth=0.6)
    axes.axvline(0, color=_LINE, linewidth=0.6)
    axes.set_xlabel(f"mean latency, change against {PRIOR} (%)")
    axes.set_ylabel("P99 of latency, change (%)")
    axes.set_title(f"{scenario}: lower left is better", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(color="#e3e6ea", linewidth=0.6)
    _save(figure, path)


def front(points: Mapping[str, Point]) -> dict[str, Point]:
    """Those of which no other has both a lower mean and a lower tail."""
    return {
        label: point
        for label, point in points.items()
        if not any(has_both_lower(other, point) for other in points.values())
    }


def has_both_lower(one: Point, other: Point) -> bool:
    """Whether the first has a lower mean and a lower tail."""
    return all(one[metric]["change"] < other[metric]["change"] for metric in (MEAN, TAIL))


def _is_shown(point: Point) -> bool:
    return all(point[metric]["change"] < _MOST_SHOWN for metric in (MEAN, TAIL))


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    first, second = ([100 * point[metric]["change"] for point in points] for metric in (MEAN, TAIL))
    return first, second


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
