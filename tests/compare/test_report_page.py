"""The report as a reader has it: opened in a headless Chromium."""

import importlib
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pytest
from sample_results import sample_results

from vidur_ppo_plugin.compare import series
from vidur_ppo_plugin.compare.display import GROUPS, Entry, entries_of, interval, number, percent
from vidur_ppo_plugin.compare.report import write_report
from vidur_ppo_plugin.compare.report_data import typographic
from vidur_ppo_plugin.compare.results import Cell, Results
from vidur_ppo_plugin.compare.statistics import compare_cells

#: Set where a missing browser must be a failure.
REQUIRED = "VIDUR_PPO_REQUIRE_CHROMIUM"
if os.environ.get(REQUIRED):
    playwright = importlib.import_module("playwright.sync_api")
else:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[test]'")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCHEDULERS = ("round_robin", "random", "least_tokens", "size_split", "oracle")


@dataclass
class Opened:
    """A page, and what it did that it should not."""

    page: "playwright.Page"
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        """The text of each element."""
        return [text.strip() for text in self.page.locator(selector).all_text_contents()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("report") / "results"
    found = sample_results(
        directory,
        scenarios=["mixed_long", "light"],
        schedulers=SCHEDULERS,
        failing=[Cell("mixed_long", "random", 2)],
    )
    write_report(found, directory / "report.html")
    return found


@pytest.fixture(scope="module")
def entries(results: Results) -> dict[tuple[str, str, str], Entry]:
    return entries_of(compare_cells(results.cells, "round_robin"))


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = f"no Chromium ({', '.join(NAMES)}): apt-get install chromium"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{reason} ({REQUIRED} is set)")
        pytest.skip(reason)
    with playwright.sync_playwright() as driver:
        # The sandbox does not work for root, nor in most containers; the page is our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: "playwright.Browser", results: Results, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The report in a new page; a parameter gives the options of the page."""
    options = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", "reduced_motion": "reduce"}
    page = browser.new_page(**{**options, **getattr(request, "param", {})})
    page.set_default_timeout(10_000)
    found = Opened(page)
    page.on("request", lambda sent: found.requests.append(sent.url))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("console", lambda message: found.complaints.append(message.text))
    page.goto((results.directory / "report.html").as_uri())
    yield found
    page.close()


def draw_everything(page: "playwright.Page") -> None:
    for chart in page.locator("[data-chart]").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg.chart").first.wait_for()


def test_renders_without_complaint_or_request(opened: Opened, results: Results) -> None:
    draw_everything(opened.page)
    assert opened.complaints == []
    assert opened.requests == [(results.directory / "report.html").as_uri()]
    # Per scenario: two distributions and the classes, and a panel for queues and for shares of each scheduler.
    assert opened.page.locator("svg.chart").count() == 2 * (3 + 2 * len(SCHEDULERS))
    assert opened.page.locator("svg.chart path.line").count() == 2 * (2 * len(SCHEDULERS) + 4 * len(SCHEDULERS))
    shapes = opened.page.locator("svg.chart [d]").evaluate_all("all => all.map(one => one.getAttribute('d'))")
    assert not any("NaN" in shape or "undefined" in shape for shape in shapes)


def test_tables_show_the_data(opened: Opened, entries: dict[tuple[str, str, str], Entry]) -> None:
    seen = opened.page.locator(".metrics tbody td").evaluate_all(
        """cells => cells.map(cell => [cell.closest("section").dataset.scenario, cell.parentElement.dataset.s,
            cell.dataset.m, cell.dataset.v, cell.querySelector("b").textContent, cell.textContent])"""
    )
    assert len(seen) == len(entries)
    for scenario, index, metric, value, shown, text in seen:
        entry = entries[scenario, SCHEDULERS[int(index)], metric]
        assert float(value or "nan") == pytest.approx(entry.value, rel=0, abs=0, nan_ok=True)
        assert shown == typographic(number(metric, entry.value))
        if entry.verdict != "reference":
            assert entry.verdict in text
            assert typographic(interval(entry)) in text
        if entry.verdict in ("better", "worse"):
            assert typographic(percent(entry.change)) in text


def test_rows_carry_the_name_of_their_scheduler(opened: Opened) -> None:
    names = opened.texts("#s0 .metrics tbody th")
    assert [re.split("reference|not deployable|4 of 5", name)[0] for name in names] == list(SCHEDULERS)
    assert names[0].endswith("reference") and names[-1].endswith("not deployable")
    assert names[1].endswith("4 of 5 seeds")


@pytest.mark.parametrize("metric", ["e2e_mean", "ttft_p99", "goodput_rps", "load_spread"])
def test_heat_map_shows_the_data(opened: Opened, entries: dict[tuple[str, str, str], Entry], metric: str) -> None:
    opened.page.select_option("#heat-metric", metric)
    expected, tones = [], []
    for scheduler in SCHEDULERS[1:]:
        for scenario in ("mixed_long", "light"):
            entry = entries[scenario, scheduler, metric]
            expected.append(typographic(percent(entry.change)))
            tones.append({"better": "1", "worse": "-1", "no difference": "0"}.get(entry.verdict, ""))
    assert opened.texts(".heat tbody td") == expected
    assert opened.page.locator(".heat tbody td").evaluate_all("all => all.map(one => one.dataset.tone)") == tones


def test_sorting_by_mouse_and_keyboard(opened: Opened, entries: dict[tuple[str, str, str], Entry]) -> None:
    values = {name: entries["mixed_long", name, "e2e_p99"].value for name in SCHEDULERS}
    heading = opened.page.locator("#s0 th[data-m=e2e_p99]")

    def order() -> list[str]:
        indices = opened.page.locator("#s0 .metrics tbody tr").evaluate_all("rows => rows.map(row => row.dataset.s)")
        return [SCHEDULERS[int(index)] for index in indices]

    heading.locator("button").click()
    assert order() == sorted(SCHEDULERS, key=values.__getitem__)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").focus()
    opened.page.keyboard.press("Enter")
    assert order() == sorted(SCHEDULERS, key=values.__getitem__, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    opened.page.locator("#s0 .metrics thead th button").first.click()
    assert order() == sorted(SCHEDULERS)
    assert heading.get_attribute("aria-sort") == "none"


def test_groups_of_metrics(opened: Opened) -> None:
    for group, metrics in GROUPS.items():
        opened.page.locator("#s1 .segments span", has_text=re.compile(f"^{group}$")).click()
        visible = opened.page.locator("#s1 .metrics thead th[data-m]:visible")
        assert visible.evaluate_all("all => all.map(one => one.dataset.m)") == list(metrics)


def test_theme_follows_the_system_until_toggled(opened: Opened) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(background)
    opened.page.emulate_media(color_scheme="dark")
    dark = opened.page.evaluate(background)
    assert light != dark
    assert opened.page.locator("#theme").text_content() == "Light"
    opened.page.locator("#theme").click()
    assert opened.page.evaluate(background) == light
    opened.page.reload()
    assert opened.page.evaluate(background) == light
    opened.page.locator("#theme").click()
    assert opened.page.evaluate(background) == dark
    opened.page.emulate_media(color_scheme="light")
    assert opened.page.evaluate(background) == dark
    assert opened.complaints == []


@pytest.mark.parametrize("opened", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_text_has_enough_contrast(opened: Opened) -> None:
    """WCAG 2.1, 1.4.3: 4.5 to 1 for text, on the darkest and on the palest cell of the heat map too."""
    pairs = [(ink, ground) for ink in ("--ink", "--muted", "--better", "--worse") for ground in ("--bg", "--surface")]
    pairs += [("--muted", "--same-fill"), *(("--ink", fill) for fill in ("--better-fill", "--worse-fill"))]
    for ink, ground in pairs:
        first, second = (_luminance(opened.page, name) for name in (ink, ground))
        assert (max(first, second) + 0.05) / (min(first, second) + 0.05) >= 4.5, (ink, ground)


def test_hiding_a_scheduler_hides_it_everywhere(opened: Opened) -> None:
    opened.page.locator("[data-toggle='3']").uncheck()
    draw_everything(opened.page)
    assert opened.page.locator("tr[data-s='3']:visible").count() == 0
    assert opened.page.locator("tr[data-s='2']:visible").count() > 0
    assert opened.page.locator("#s0 [data-series=e2e] path.line").count() == len(SCHEDULERS) - 1
    assert "size_split" not in opened.texts("#s0 [data-chart=queues] figcaption")
    opened.page.locator("[data-toggle='3']").check()
    draw_everything(opened.page)
    assert opened.page.locator("#s0 [data-series=e2e] path.line").count() == len(SCHEDULERS)


def test_quantiles_are_read_with_the_keyboard(opened: Opened, results: Results) -> None:
    draw_everything(opened.page)
    opened.page.locator("#s0 [data-series=ttft] svg.chart").focus()
    opened.page.keyboard.press("End")
    tip = opened.page.locator("#s0 [data-series=ttft] .tip")
    assert tip.locator("strong").text_content() == "P99.9"
    seeds = results.cells.query("scenario == 'mixed_long' and scheduler == 'size_split'")["seed"]
    requests = pd.concat([results.requests("mixed_long", "size_split", seed) for seed in seeds])
    expected = np.quantile(series.first_token_s(requests), 0.999, method="inverted_cdf")
    row = tip.locator("div", has_text="size_split")
    shown = float(str(row.locator("span").last.text_content()).removesuffix(" s"))
    assert math.isclose(shown, expected, rel_tol=0.005)
    opened.page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("opened", [{"viewport": {"width": 340, "height": 700}}], indirect=True)
def test_a_narrow_window_does_not_scroll_sideways(opened: Opened) -> None:
    draw_everything(opened.page)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 340
    assert opened.complaints == []


def test_messages_are_shown_as_they_are(opened: Opened) -> None:
    assert 'AssertionError: <script>alert("&")</script>' in opened.texts("#failures pre")[0]
    assert "cannot do much <good>." in opened.texts("#s1 .why")[0]
    assert opened.page.locator("script").count() == 2


def _luminance(page: "playwright.Page", variable: str) -> float:
    """Relative luminance (WCAG 2.1) of a CSS variable as the page shows it."""
    text = page.evaluate(
        """name => {
            const probe = document.createElement("i");
            probe.style.color = `var(${name})`;
            document.body.append(probe);
            return getComputedStyle(probe).color;
        }""",
        variable,
    )
    channels = [int(channel) / 255 for channel in re.findall(r"\d+", text)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
