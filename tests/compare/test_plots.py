"""What the plots draw (closed forms), and the PNGs themselves: complete, deterministic, without overlaps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from sample_results import ROUTERS, SCENARIOS, sample_results

from vidur_ppo_plugin.compare import plots, series
from vidur_ppo_plugin.compare.display import Entry, entries_of
from vidur_ppo_plugin.compare.results import Cell, Results
from vidur_ppo_plugin.compare.statistics import compare_cells
from vidur_ppo_plugin.compare.style import diverging_colour, replica_colours, scheduler_styles

# --- Series ---


def requests_of(rows: list[tuple[float, float, float, float, int]], warm_up: int = 0) -> pd.DataFrame:
    """Requests as (arrived, scheduled, first token, completed, replica)."""
    table = pd.DataFrame(
        rows, columns=["arrived_at_s", "scheduled_at_s", "first_token_at_s", "completed_at_s", "replica"]
    )
    return table.assign(is_warm_up=np.arange(len(rows)) < warm_up)


def test_queue_lengths_by_hand() -> None:
    # Replica 0: one request waits from 0 to 2; replica 1: from 1 to 4, beyond the last arrival at 4 nothing counts.
    requests = requests_of([(0, 2, 3, 4, 0), (1, 4, 5, 6, 1), (4, 4, 5, 9, 0)])
    found = series.waiting(requests, 3, bins=4)
    assert found.time_s.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert found.values.tolist() == [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert series.in_flight(requests, 2, bins=2).values.tolist() == [[1, 1], [0.5, 1]]


def test_shares_of_groups_of_equal_size() -> None:
    requests = requests_of([(t, t, t, t, replica) for t, replica in enumerate([0, 0, 1, 1, 0, 1, 1, 1])])
    found = series.action_shares(requests, 2, bins=2)
    assert found.values.tolist() == [[0.5, 0.25], [0.5, 0.75]]
    assert found.time_s.tolist() == [1.5, 5.5]


def test_warm_up_does_not_count_and_what_never_ends_is_infinite() -> None:
    requests = requests_of([(0, 0, 9, 99, 0), (1, 1, 2, 4, 0), (2, 2, float("nan"), float("nan"), 0)], warm_up=1)
    assert series.end_to_end_s(requests).tolist() == [3, np.inf]
    assert series.first_token_s(requests).tolist() == [1, np.inf]
    at = series.quantiles(series.end_to_end_s(requests))
    assert at[series.QUANTILE_LEVELS <= 0.5].tolist() == [3] * int((series.QUANTILE_LEVELS <= 0.5).sum())
    assert np.isinf(at[series.QUANTILE_LEVELS > 0.5]).all()


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50), st.integers(0, 2)), min_size=2, max_size=40),
    st.integers(1, 20),
)
def test_area_under_the_queues_is_the_time_waited(rows: list[tuple[float, float, int]], bins: int) -> None:
    """Queue length times time, summed over bins and replicas, is the time waited up to the last arrival."""
    requests = requests_of([(at, at + waited, at + waited, at + waited, replica) for at, waited, replica in rows])
    first, last = requests["arrived_at_s"].min(), requests["arrived_at_s"].max()
    if last - first < 1e-3:
        return
    found = series.waiting(requests, 3, bins)
    waited_s = (requests["scheduled_at_s"].clip(upper=last) - requests["arrived_at_s"]).sum()
    assert found.values.sum() * (last - first) / bins == pytest.approx(waited_s, abs=1e-6)


def test_quantiles_of_no_request_are_an_error() -> None:
    with pytest.raises(ValueError, match="no request is left"):
        series.quantiles(np.array([]))


# --- Style ---


def test_schedulers_are_told_apart_and_the_reference_stands_out() -> None:
    metadata = {"reference": "s3", "schedulers": {f"s{i}": {} for i in range(24)}}
    styles = scheduler_styles(metadata)
    assert len({(style.colour, style.dash) for style in styles.values()}) == 24
    assert [label for label, style in styles.items() if style.is_reference] == ["s3"]


@pytest.mark.parametrize("num_replicas", [1, 4, 7, 16, 64])
def test_replicas_have_distinct_colours(num_replicas: int) -> None:
    assert len(set(replica_colours(num_replicas))) == num_replicas


def test_diverging_colours_point_the_right_way() -> None:
    def blue_minus_red(colour: str) -> int:
        return int(colour[5:7], 16) - int(colour[1:3], 16)

    better, slightly, worse = (blue_minus_red(diverging_colour(change)) for change in (0.6, 0.02, -0.6))
    assert better > slightly > 0 > worse
    assert diverging_colour(0.6) == diverging_colour(6.0)


# --- Figures ---


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every scenario of the sample and all of its schedulers."""
    directory = tmp_path_factory.mktemp("plots") / "results"
    return sample_results(directory, scenarios=list(SCENARIOS), schedulers=list(ROUTERS), seeds=[1], num_requests=40)


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes intersect, and texts that leave the figure."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    unseen = set(_unseen(figure))
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in unseen]
    boxes = [(text.get_text(), text.get_rotation(), text.get_window_extent(renderer)) for text in texts]
    found = [
        (first, second)
        for i, (first, first_angle, a) in enumerate(boxes)
        for second, second_angle, b in boxes[i + 1 :]
        # The boxes of slanted labels overlap where the letters do not.
        if not (first_angle % 90 and second_angle % 90) and a.overlaps(b) and min(a.width, b.width) > 0
    ]
    width, height = figure.canvas.get_width_height()
    return found + [
        (text, "the edge")
        for text, _, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]


def _unseen(figure: Figure) -> Iterator[Text]:
    """Texts that matplotlib has but does not draw: of hidden axes, and ticks beyond the limits."""
    for axes in figure.axes:
        if not axes.get_visible():
            yield from axes.findobj(Text)
        for axis, coordinate in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            for label in axis.get_ticklabels(which="both"):
                if not low <= label.get_position()[coordinate] <= high:
                    yield label


def drawn(results: Results, num_scenarios: int, num_schedulers: int) -> list[Figure]:
    metadata = dict(results.metadata)
    metadata["scenarios"] = dict(list(metadata["scenarios"].items())[:num_scenarios])
    metadata["schedulers"] = dict(list(metadata["schedulers"].items())[:num_schedulers])
    cells = results.cells[results.cells["scheduler"].isin(metadata["schedulers"])]
    entries = entries_of(compare_cells(cells, metadata["reference"]))
    figures = [plots.change_heat_map(entries, metadata, metric) for metric in ("e2e_mean", "ttft_p99")]
    of_scenario = cells[cells["scenario"] == list(metadata["scenarios"])[-1]]
    for draw in (plots.distributions, plots.queue_lengths, plots.action_shares):
        figures.append(draw(results, of_scenario))
    return figures


@pytest.mark.parametrize(("num_scenarios", "num_schedulers"), [(1, 2), (1, 3), (3, 6), (14, 12)])
def test_no_text_overlaps_another(large: Results, num_scenarios: int, num_schedulers: int) -> None:
    for figure in drawn(large, num_scenarios, num_schedulers):
        assert overlapping_texts(figure) == []


def test_heat_map_shows_the_changes(large: Results) -> None:
    entries = entries_of(compare_cells(large.cells, "round_robin"))
    figure = plots.change_heat_map(entries, large.metadata, "e2e_p99")
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert len(shown) == 14 * 11
    change = entries["mixed_long", "random", "e2e_p99"].change
    assert shown[0] == f"{change * 100:+.{0 if abs(change) >= 1 else 1}f}".replace("-", "\N{MINUS SIGN}")


def test_distribution_has_a_curve_for_each_scheduler_at_its_quantiles(tmp_path: Path) -> None:
    failing = [Cell("light", "size_split", 1)]
    results = sample_results(tmp_path / "r", scenarios=["light"], seeds=[1, 2], num_requests=40, failing=failing)
    figure = plots.distributions(results, results.cells)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == set(results.metadata["schedulers"])
    both = pd.concat([results.requests("light", "oracle", seed) for seed in (1, 2)])
    for label, requests in (("oracle", both), ("size_split", results.requests("light", "size_split", 2))):
        expected = series.quantiles(series.end_to_end_s(requests))
        assert np.array_equal(np.asarray(lines[label].get_xdata()), expected)


def test_heat_map_colours_only_what_was_found_to_differ() -> None:
    metadata = {"reference": "rr", "scenarios": {"s": {}}, "schedulers": {}}
    verdicts = {"better": -0.3, "worse": 0.3, "no difference": 0.3, "not tested": -0.3}
    metadata["schedulers"] = {label: {"deployable": True} for label in ("rr", *verdicts)}
    entries = {
        ("s", verdict, "e2e_mean"): Entry(1.0, change, change - 0.1, change + 0.1, verdict)
        for verdict, change in verdicts.items()
    }
    figure = plots.change_heat_map(entries, metadata, "e2e_mean")
    better, worse, same, untested = (tuple(cell.get_facecolor()[0]) for cell in figure.axes[0].collections)
    assert better == to_rgba(diverging_colour(0.3)) and worse == to_rgba(diverging_colour(-0.3))
    assert same == untested != better


def test_all_plots_are_written_the_same_each_time(tmp_path: Path) -> None:
    results = sample_results(tmp_path / "results", scenarios=["light"], seeds=[1, 2], num_requests=40)
    first = plots.write_plots(results, tmp_path / "first")
    second = plots.write_plots(results, tmp_path / "second")
    assert [path.name for path in first] == [
        *(f"change_{metric}.png" for metric in plots.HEAT_MAP_METRICS),
        *("cdf_light.png", "queues_light.png", "shares_light.png"),
    ]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        pixels = imread(one)
        assert pixels.shape[1] >= 5 * plots.DPI  # five inches at least
        assert (pixels[..., :3].min(axis=2) < 0.5).mean() > 0.005  # something is drawn
