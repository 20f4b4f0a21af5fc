"""The tables of the terminal: what they say, and that they say it at any width."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from sample_results import sample_results

from vidur_ppo_plugin.compare.display import (
    GROUPS,
    MAIN,
    TITLES,
    Entry,
    best_of,
    entries_of,
    interval,
    number,
    percent,
    slo_text,
)
from vidur_ppo_plugin.compare.metrics import METRICS
from vidur_ppo_plugin.compare.results import Cell, Results
from vidur_ppo_plugin.compare.statistics import compare_cells
from vidur_ppo_plugin.compare.table import print_tables

SCHEDULERS = ("round_robin", "least_tokens", "size_split", "oracle")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("table") / "results"
    return sample_results(directory, schedulers=SCHEDULERS, failing=[Cell("light", "size_split", 3)])


def printed(results: Results, width: int, **options: bool) -> str:
    file = io.StringIO()
    print_tables(results, Console(file=file, width=width, **options))  # type: ignore[arg-type]
    return file.getvalue()


def test_every_metric_has_a_title_and_a_group() -> None:
    assert set(TITLES) == set(METRICS)
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(METRICS)
    assert len(set(TITLES.values())) == len(TITLES)


def test_values_changes_and_intervals_are_those_of_the_comparison(results: Results) -> None:
    text = printed(results, 250)
    entries = entries_of(compare_cells(results.cells, "round_robin"))
    sections = text.split("\nlight ")
    for scenario, section in (("mixed_long", sections[0]), ("light", sections[1].split("Overview")[0])):
        lines = section.splitlines()
        for scheduler in SCHEDULERS:
            first = next(i for i, line in enumerate(lines) if re.match(rf"{scheduler}\b", line))
            values, changes = lines[first], lines[first + 1]
            for metric in MAIN:
                entry = entries[scenario, scheduler, metric]
                assert number(metric, entry.value) in values
                if scheduler == "round_robin":
                    assert changes.count("reference") == len(MAIN)
                    continue
                said = "no difference" if entry.verdict == "no difference" else percent(entry.change)
                mark = " *" if entry.excludes_zero else ""
                assert f"{said} {interval(entry)}{mark}" in changes


def test_an_incomplete_cell_a_bound_and_a_failure_are_named(results: Results) -> None:
    text = printed(results, 120)
    assert "4 of 5 seeds" in text
    assert "not deployable" in text
    assert 'light / size_split / seed 3: AssertionError: <script>alert("&")</script>' in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 250])
def test_fits_any_width_without_losing_a_number(results: Results, width: int) -> None:
    text = printed(results, width)
    assert max(map(len, text.splitlines())) <= width
    if width < 60:  # too narrow for the name, a change and its interval
        return
    entries = entries_of(compare_cells(results.cells, "round_robin"))
    for scenario in ("mixed_long", "light"):
        for metric in MAIN:
            entry = entries[scenario, "size_split", metric]
            assert number(metric, entry.value) in text
            said = "no difference" if entry.verdict == "no difference" else percent(entry.change)
            assert f"{said} {interval(entry)}" in text


def test_overview_has_both_metrics_of_each_scenario(results: Results) -> None:
    overview = printed(results, 120).split("Overview")[1].split("Means over")[0]
    entries = entries_of(compare_cells(results.cells, "round_robin"))
    for scenario in ("mixed_long", "light"):
        for scheduler in SCHEDULERS[1:]:
            for metric in ("e2e_mean", "e2e_p99"):
                entry = entries[scenario, scheduler, metric]
                assert (f"{percent(entry.change)} *" if entry.excludes_zero else "no difference") in overview


def test_colours_only_on_a_terminal(results: Results) -> None:
    assert "\x1b[" not in printed(results, 120)
    assert "\x1b[32m" in printed(results, 120, force_terminal=True)


def test_one_seed_is_not_tested(tmp_path: Path) -> None:
    text = printed(sample_results(tmp_path / "results", seeds=[7], num_requests=60), 120)
    assert "One seed has no spread" in text
    # What is the same to the last bit is no difference with one seed, too.
    assert set(re.findall(r"\[.*?\]", text)) <= {"[0.0, 0.0]"}
    assert not re.search(r"% \*", text)


def test_a_scenario_without_its_reference_says_so(tmp_path: Path) -> None:
    failing = [Cell("light", "round_robin", 1)]
    text = printed(sample_results(tmp_path / "results", seeds=[1], num_requests=60, failing=failing), 120)
    assert "No comparison: the reference round_robin has no finished run (3 others have)." in text
    assert "missing" in text.split("Overview")[1]


def test_plain_ascii_output(results: Results) -> None:
    """A pipe of an ASCII locale, and a sentence that ASCII cannot spell."""
    code = (
        "import sys; from pathlib import Path; from vidur_ppo_plugin.compare.results import Results;"
        "from vidur_ppo_plugin.compare.table import print_tables; results = Results(Path(sys.argv[1]));"
        "results.metadata['scenarios']['light']['why'] = 'caf\\u00e9'; print_tables(results)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "90"}
    command = [sys.executable, "-c", code, str(results.directory)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "caf?" in done.stdout.decode("ascii")


def test_numbers_are_short_and_signed() -> None:
    assert [percent(change) for change in (-0.1234, 0.0004, 20.276, float("nan"))] == [
        "-12.3%",
        "0.0%",
        "+2028%",
        "n/a",
    ]
    assert interval(Entry(1.0, 0.1, -float("inf"), 2.5, "no difference")) == "[-inf, +250]"
    assert interval(Entry(1.0, 0.1, float("nan"), float("nan"), "not tested")) == ""
    assert [number("e2e_mean", value) for value in (0.1234, 1.234, 123.4, 12345.6)] == [
        "0.123",
        "1.23",
        "123.4",
        "12346",
    ]
    assert number("tbt_p99", 0.0209) == "20.90"
    assert number("slo_fraction", 0.987) == "98.7"
    assert number("normalised_latency_mean", 0.0414) == "41.40"


def test_slo_in_words() -> None:
    slo = {"ttft_base_s": 1.0, "ttft_per_prompt_token_s": 0.001, "tbt_s": 0.1}
    assert slo_text(slo) == "first token within 1 s + 1 ms per prompt token; 100 ms between tokens"
    slo["ttft_per_prompt_token_s"] = 0.0
    assert slo_text(slo) == "first token within 1 s; 100 ms between tokens"


def test_best_is_deployable_and_beats_somebody() -> None:
    schedulers = {"a": {"deployable": True}, "b": {"deployable": True}, "bound": {"deployable": False}}
    values = {"a": 2.0, "b": 1.0, "bound": 0.5}
    for metric, expected in (("e2e_mean", {"b"}), ("goodput_rps", {"a"}), ("load_spread", set())):
        entries = {("s", label, metric): Entry(value, 0, 0, 0, "better") for label, value in values.items()}
        assert best_of(entries, "s", metric, schedulers) == expected
    equal = {("s", label, "e2e_mean"): Entry(1.0, 0, 0, 0, "no difference") for label in values}
    assert best_of(equal, "s", "e2e_mean", schedulers) == set()
