"""The report without a browser: words, data, escaping, and how the file is written."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from sample_results import sample_results

from vidur_ppo_plugin.compare.display import Entry, entries_of
from vidur_ppo_plugin.compare.metrics import METRICS
from vidur_ppo_plugin.compare.report import embeddable, render, write_report
from vidur_ppo_plugin.compare.report_data import typographic_numbers
from vidur_ppo_plugin.compare.results import Cell, Results, ResultsError
from vidur_ppo_plugin.compare.statistics import compare_cells
from vidur_ppo_plugin.compare.summary import headline, standing_of, trade_offs

METADATA = {
    "reference": "rr",
    "seeds": [1, 2],
    "scenarios": {"one": {}, "two": {}},
    "schedulers": {
        "rr": {"deployable": True},
        "good": {"deployable": True},
        "mixed": {"deployable": True},
        "same": {"deployable": True},
        "bound": {"deployable": False},
    },
}


def entries(**changes: tuple[float, ...]) -> dict[tuple[str, str, str], Entry]:
    """Of each scheduler the changes of mean and P99 in scenario one, then in two; beyond 5 % they are certain."""
    found = {}
    for scheduler, figures in {"rr": (0.0,) * 4, **changes}.items():
        for i, change in enumerate(figures):
            verdict = "better" if change < -0.05 else "worse" if change > 0.05 else "no difference"
            verdict = "reference" if scheduler == "rr" else verdict
            key = (("one", "two")[i // 2], scheduler, ("e2e_mean", "e2e_p99")[i % 2])
            found[key] = Entry(1 + change, change, change - 0.05, change + 0.05, verdict)
    # What is not given has not changed.
    for scenario, scheduler, _ in list(found):
        for metric in METRICS:
            found.setdefault((scenario, scheduler, metric), Entry(1.0, 0.0, -0.1, 0.1, "no difference"))
    return found


def test_headline_names_wins_losses_and_no_difference() -> None:
    found = entries(
        good=(-0.3, -0.2, -0.01, -0.01),
        mixed=(-0.4, 0.9, 0.1, 0),
        same=(0.01, 0, 0, 0),
        bound=(-0.5, -0.5, -0.5, -0.5),
    )
    assert headline(METADATA, found, num_finished=20) == [
        "4 schedulers against rr, in 2 scenarios, with 2 seeds each.",
        "Better than rr somewhere and worse nowhere, in mean and P99 end-to-end latency: good.",
        "Better in some and worse in others, in mean and P99 end-to-end latency: mixed.",
        "No difference from rr anywhere, in mean and P99 end-to-end latency: same.",
        "Lowest E2E mean of those that can be deployed, of 2 scenarios: good in 1 and mixed in 1.",
        "Lowest E2E P99 of those that can be deployed, of 2 scenarios: good in 2.",
    ]


def test_headline_says_what_is_missing() -> None:
    found = entries(good=(-0.3, -0.2, 0, 0))
    assert headline(METADATA, found, num_finished=18)[-1] == "Incomplete: 2 of 20 runs failed or are missing."


def test_a_mean_bought_with_the_tail_is_named() -> None:
    found = entries(good=(-0.3, -0.2, 0, 0), mixed=(-0.4, 0.9, 0.1, 0))
    assert trade_offs(METADATA, found) == ["mixed in one: E2E mean -40.0%, but E2E P99 +90.0%."]


def test_standing_counts_and_ranges() -> None:
    found = entries(good=(-0.3, -0.2, -0.1, 0))
    standing = standing_of(METADATA, found, "good", "e2e_mean")
    assert standing.sentence() == "better in 2 of 2 scenarios (-10.0% in two to -30.0% in one)"
    assert (
        standing_of(METADATA, found, "good", "e2e_p99").sentence()
        == "better in 1 of 2 scenarios (-20.0% in one), no difference in 1"
    )
    assert standing_of(METADATA, found, "same", "e2e_p99").sentence() == "not measured"


def test_one_seed_claims_nothing(tmp_path: Path) -> None:
    results = sample_results(tmp_path / "results", seeds=[1], num_requests=60)
    sentences = headline(results.metadata, entries_of(compare_cells(results.cells, "round_robin")), len(results.cells))
    assert "One seed has no spread: no difference below has been tested." in sentences
    assert not any(sentence.startswith(("Better", "Worse", "No difference")) for sentence in sentences)
    page = render(results)
    assert "not tested" in page and 'class="better"' not in page and 'class="worse"' not in page


def test_numbers_get_a_minus_sign_and_names_keep_their_hyphen() -> None:
    assert typographic_numbers("a-1 in b: -3.0% [-4, +1]") == "a-1 in b: −3.0% [−4, +1]"  # noqa: RUF001


def test_same_results_same_bytes(tmp_path: Path) -> None:
    results = sample_results(tmp_path / "results", num_requests=60)
    write_report(results, tmp_path / "first.html")
    write_report(Results(tmp_path / "results"), tmp_path / "second.html")
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    results = sample_results(tmp_path / "results", num_requests=60)
    path = tmp_path / "page" / "report.html"
    path.parent.mkdir()
    path.write_text("the old one")
    next((tmp_path / "results").rglob("*.parquet")).write_bytes(b"not parquet")
    with pytest.raises(ResultsError, match="cannot be read"):
        write_report(results, path)
    assert path.read_text() == "the old one"
    assert list(path.parent.iterdir()) == [path]


def test_embedded_json_cannot_end_its_element() -> None:
    hostile = {"</script><script>alert(1)</script>": ["<!--", "&amp;", "\u2028"]}
    text = embeddable(hostile)
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == hostile


def test_every_name_and_message_is_escaped(tmp_path: Path) -> None:
    failing = Cell("mixed_long", "size_split", 2)
    results = sample_results(tmp_path / "results", num_requests=60, failing=[failing])
    hostile = '"><img src=x onerror=alert(1)>'
    results.metadata["schedulers"]["oracle"]["note"] = hostile
    results.metadata["scenarios"]["light"]["why"] = hostile
    results.metadata["revision"] = hostile
    page = render(results)
    assert "<img" not in page
    assert page.count("<script") == 2
    assert "&lt;script&gt;alert(&#34;&amp;&#34;)" in page


def test_a_scenario_without_its_reference_says_so(tmp_path: Path) -> None:
    failing = [Cell("light", "round_robin", seed) for seed in (1, 2)]
    results = sample_results(tmp_path / "results", seeds=[1, 2], num_requests=60, failing=failing)
    page = render(results)
    assert "No comparison: round_robin has no finished run here." in page
    assert "Incomplete: 2 of 16 runs failed or are missing." in page


def test_nothing_finished_is_a_page_too(tmp_path: Path) -> None:
    failing = [
        Cell(scenario, scheduler, 1) for scenario in ("mixed_long", "light") for scheduler in ("round_robin", "oracle")
    ]
    results = sample_results(tmp_path / "r", schedulers=["round_robin", "oracle"], seeds=[1], failing=failing)
    assert "Incomplete: 4 of 4 runs failed or are missing." in render(results)


def test_definitions_of_all_metrics_are_on_the_page(tmp_path: Path) -> None:
    page = render(sample_results(tmp_path / "results", num_requests=60))
    text = re.sub(r"<[^>]+>", "", page)
    for metric in METRICS.values():
        assert metric.definition.replace("&", "&amp;") in text


def test_entries_know_which_intervals_exclude_zero() -> None:
    better = Entry(1.0, -0.2, -0.3, -0.1, "better")
    assert better.excludes_zero
    assert not dataclasses.replace(better, high=0.1).excludes_zero
    assert not dataclasses.replace(better, low=float("nan"), high=float("nan")).excludes_zero
    assert not dataclasses.replace(better, verdict="reference").excludes_zero
