"""The comparison as tables in the terminal, whatever its width, and as plain text where it is no terminal."""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .display import MAIN, TITLES, Entries, Entry, best_of, entries_of, interval, number, percent, slo_text, unit_of
from .results import Results
from .statistics import BETTER, CONFIDENCE, REFERENCE, SAME, UNTESTED, WORSE, compare_cells

_STYLES = {BETTER: "green", WORSE: "red", SAME: "dim", UNTESTED: "dim"}
_OVERVIEW = ("e2e_mean", "e2e_p99")
_MARK = "*"
_PADDING = 3  # of each column: the blanks at both sides and the line
_WIDEST_NAME = 26  # names of schedulers and scenarios beyond it are folded

# A column: its heading, and the text of each row.
Column = tuple[Text, Sequence[Text]]


def print_tables(results: Results, console: Console | None = None, comparison: pd.DataFrame | None = None) -> None:
    """Print a table for each scenario, an overview of all, and what failed; to standard output unless told otherwise.

    `comparison` is what `compare_cells` says of the results, and is computed if it is not given.
    """
    console = console or _standard_output()
    metadata = results.metadata
    cells = results.cells
    if comparison is None:
        comparison = compare_cells(cells, metadata["reference"])
    entries = entries_of(comparison)
    num_seeds = {key: len(group) for key, group in cells.groupby(["scenario", "scheduler"], sort=False)}
    for scenario in metadata["scenarios"]:
        _print_scenario(console, scenario, metadata, entries, num_seeds)
    if len(metadata["scenarios"]) > 1:
        _print_overview(console, metadata, entries)
    _print_legend(console, metadata)
    _print_failures(console, results.failures)


def _standard_output() -> Console:
    # Names and sentences come from the user's files: a letter that an ASCII terminal lacks must not end the command.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console()


def _print_scenario(
    console: Console, scenario: str, metadata: Mapping[str, Any], entries: Entries, num_seeds: Mapping[Any, int]
) -> None:
    details, schedulers = metadata["scenarios"][scenario], metadata["schedulers"]
    console.print(Text(f"\n{scenario}", style="bold"), Text(str(details["why"])))
    load = f"load {details['load']:.0%} of {details['capacity_qps']:.3g} requests/s, {details['num_replicas']} replicas"
    console.print(Text(f"{load}; SLO: {slo_text(details['slo'])}", style="dim"))
    shown = [label for label in schedulers if (scenario, label, MAIN[0]) in entries]
    if not shown:
        finished = sum(count for (name, _), count in num_seeds.items() if name == scenario)
        console.print(
            f"No comparison: the reference {metadata['reference']} has no finished run ({finished} others have)."
        )
        return
    names = [_label(label, schedulers[label], num_seeds[scenario, label], len(metadata["seeds"])) for label in shown]
    columns: list[Column] = []
    for metric in MAIN:
        best = best_of(entries, scenario, metric, schedulers)
        heading = Text(f"{TITLES[metric]}\n{unit_of(metric)}")
        columns.append((heading, [_cell(metric, entries[scenario, label, metric], label in best) for label in shown]))
    _print_columns(console, (Text("scheduler"), names), columns)


def _print_overview(console: Console, metadata: Mapping[str, Any], entries: Entries) -> None:
    reference = metadata["reference"]
    titles = " and ".join(TITLES[metric] for metric in _OVERVIEW)
    console.print(Text(f"\nOverview: change of {titles} against {reference}", style="bold"))
    names = [Text(name) for name in metadata["scenarios"]]
    columns: list[Column] = []
    for label, details in metadata["schedulers"].items():
        if label != reference:
            cells = [
                _overview_cell([entries.get((name, label, m)) for m in _OVERVIEW]) for name in metadata["scenarios"]
            ]
            columns.append((_label(label, details), cells))
    _print_columns(console, (Text("scenario"), names), columns)


def _print_legend(console: Console, metadata: Mapping[str, Any]) -> None:
    seeds = len(metadata["seeds"])
    lines = [
        f"Means over {seeds} seed{'s' * (seeds != 1)}; changes against {metadata['reference']}, paired by seed, "
        f"with {CONFIDENCE:.0%} bootstrap intervals.",
        f"{_MARK} the interval excludes zero; no difference: it does not; bold: best of those that can be deployed.",
    ]
    if seeds == 1:
        lines.append("One seed has no spread: no difference here has been tested.")
    console.print(Text("\n" + "\n".join(lines), style="dim"))


def _print_failures(console: Console, failures: Sequence[Mapping[str, Any]]) -> None:
    if failures:
        console.print(Text(f"\n{len(failures)} failed:", style="bold red"))
    for failure in failures:
        reason = str(failure["error"]).strip().splitlines()[-1:]
        where = f"{failure['scenario']} / {failure['scheduler']} / seed {failure['seed']}"
        console.print(Text(f"  {where}: {''.join(reason)}"))


def _label(label: str, details: Mapping[str, Any], num_seeds: int = 0, planned: int = 0) -> Text:
    text = Text(label)
    if not details["deployable"]:
        text.append("\nnot deployable", style="italic dim")
    if num_seeds < planned:
        text.append(f"\n{num_seeds} of {planned} seeds", style="yellow")
    return text


def _cell(metric: str, entry: Entry, is_best: bool) -> Text:
    text = Text(number(metric, entry.value), style="bold" if is_best else "")
    return text.append("\n").append(_change(entry, with_interval=True))


def _overview_cell(found: Sequence[Entry | None]) -> Text:
    return Text("\n").join(Text("missing", style="dim") if entry is None else _change(entry) for entry in found)


def _change(entry: Entry, with_interval: bool = False) -> Text:
    if entry.verdict == REFERENCE:
        return Text(REFERENCE, style="dim")
    words = "no difference" if entry.verdict == SAME else percent(entry.change)
    if with_interval and interval(entry):
        words += f" {interval(entry)}"
    if entry.excludes_zero:
        words += f" {_MARK}"
    return Text(words, style=_STYLES.get(entry.verdict, ""))


def _print_columns(console: Console, first: Column, columns: Sequence[Column]) -> None:
    """One table, or several below each other, each with the first column, if the console is too narrow for one."""
    remaining = list(columns)
    while remaining:
        fitting = _fitting(first, remaining, console.width)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(first[0], overflow="fold", max_width=_WIDEST_NAME)
        for heading, cells in remaining[:fitting]:
            table.add_column(heading, justify="right", overflow="fold", max_width=_width(heading, cells))
        for row in zip(first[1], *(cells for _, cells in remaining[:fitting]), strict=True):
            table.add_row(*row)
        console.print()
        console.print(table)
        remaining = remaining[fitting:]


def _fitting(first: Column, columns: Sequence[Column], width: int) -> int:
    """How many of the columns stand beside the first one without being folded; at least one."""
    used = min(max(map(_widest_line, (first[0], *first[1]))), _WIDEST_NAME)
    fitting = 0
    for column in columns:
        used += _PADDING + _width(*column)
        if used > width:
            break
        fitting += 1
    return max(fitting, 1)


def _width(heading: Text, cells: Sequence[Text]) -> int:
    """Fewest characters that a column needs: numbers are never folded, the names above them are."""
    return max(min(_widest_line(heading), _WIDEST_NAME), *map(_widest_line, cells))


def _widest_line(text: Text) -> int:
    return max(len(line) for line in text.plain.split("\n"))
