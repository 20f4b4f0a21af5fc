"""What a comparison says, in sentences made from its data: wins, losses, and where there is no difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .display import TITLES, Entries, Entry, best_of, percent
from .statistics import BETTER, DIFFERENT, SAME, UNTESTED, WORSE

#: What the headline is about: the mean and the tail.
HEADLINE = ("e2e_mean", "e2e_p99")
# What a better mean may have been paid with.
_PRICES = ("e2e_p99", "ttft_mean", "ttft_p99", "e2e_mean_long", "e2e_p99_long", "goodput_rps")

_VERDICTS = {
    BETTER: "better in",
    WORSE: "worse in",
    SAME: "no difference in",
    DIFFERENT: "different in",
    UNTESTED: "not tested in",
}


@dataclass(frozen=True)
class Standing:
    """How a scheduler did against the reference in one metric: the scenarios by verdict, with their changes."""

    metric: str
    changes: Mapping[str, Mapping[str, float]]

    def count(self, verdict: str) -> int:
        """In how many scenarios the verdict was given."""
        return len(self.changes.get(verdict, {}))

    @property
    def total(self) -> int:
        """In how many scenarios the two could be compared."""
        return sum(map(len, self.changes.values()))

    def sentence(self) -> str:
        """In words: "better in 2 of 3 scenarios (-8.9% in light to -30.0% in mixed_long), no difference in 1"."""
        if not self.total:
            return "not measured"
        parts: list[str] = []
        for verdict, text in _VERDICTS.items():
            if not self.count(verdict):
                continue
            of_all = "" if parts else f" of {_plural(self.total, 'scenario')}"
            shown = "" if verdict == SAME else f" ({self._range(verdict)})"
            parts.append(f"{text} {self.count(verdict)}{of_all}{shown}")
        return ", ".join(parts)

    def _range(self, verdict: str) -> str:
        found = sorted(self.changes[verdict].items(), key=lambda item: (abs(item[1]), item[0]))
        ends = [f"{percent(change)} in {scenario}" for scenario, change in (found[0], found[-1])]
        return ends[0] if len(found) == 1 else " to ".join(ends)


def standing_of(metadata: Mapping[str, Any], entries: Entries, scheduler: str, metric: str) -> Standing:
    """The verdicts on a scheduler in one metric, over all scenarios in which it was compared."""
    changes: dict[str, dict[str, float]] = {}
    for scenario in metadata["scenarios"]:
        entry = entries.get((scenario, scheduler, metric))
        if entry is not None and entry.change == entry.change:
            changes.setdefault(entry.verdict, {})[scenario] = entry.change
    return Standing(metric, changes)


def headline(metadata: Mapping[str, Any], entries: Entries, num_finished: int) -> list[str]:
    """The sentences at the top: what was compared, who is never worse, who is worse somewhere, who is no different."""
    reference = metadata["reference"]
    others = [label for label in metadata["schedulers"] if label != reference]
    num_scenarios, num_seeds = len(metadata["scenarios"]), len(metadata["seeds"])
    sentences = [
        f"{_plural(len(others), 'scheduler')} against {reference}, in {_plural(num_scenarios, 'scenario')}, "
        f"with {_plural(num_seeds, 'seed')} each."
    ]
    if num_seeds == 1:
        sentences.append("One seed has no spread: no difference below has been tested.")
    else:
        deployable = [label for label in others if metadata["schedulers"][label]["deployable"]]
        sentences += _groups(metadata, entries, deployable)
    sentences += _winners(metadata, entries)
    planned = num_scenarios * num_seeds * len(metadata["schedulers"])
    if num_finished < planned:
        sentences.append(f"Incomplete: {planned - num_finished} of {planned} runs failed or are missing.")
    return sentences


def trade_offs(metadata: Mapping[str, Any], entries: Entries) -> list[str]:
    """Where a better mean latency was paid for with something else that got worse."""
    sentences = []
    for scheduler in metadata["schedulers"]:
        for scenario in metadata["scenarios"]:
            gain = entries.get((scenario, scheduler, HEADLINE[0]))
            if gain is None or gain.verdict != BETTER:
                continue
            paid = [f"{TITLES[m]} {percent(e.change)}" for m, e in _worse(entries, scenario, scheduler)]
            if paid:
                gained = f"{TITLES[HEADLINE[0]]} {percent(gain.change)}"
                sentences.append(f"{scheduler} in {scenario}: {gained}, but {_listed(paid)}.")
    return sentences


def _groups(metadata: Mapping[str, Any], entries: Entries, deployable: Sequence[str]) -> list[str]:
    """Deployable schedulers by what can be said of their mean and tail latency in all scenarios."""
    never_worse: list[str] = []
    mixed: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for label in deployable:
        standings = [standing_of(metadata, entries, label, metric) for metric in HEADLINE]
        wins, losses = (sum(standing.count(verdict) for standing in standings) for verdict in (BETTER, WORSE))
        if not any(standing.total for standing in standings):
            continue
        group = (mixed if losses else never_worse) if wins else (worse if losses else same)
        group.append(label)
    what = "mean and P99 end-to-end latency"
    groups = [
        (never_worse, f"Better than {metadata['reference']} somewhere and worse nowhere, in {what}: {{}}."),
        (mixed, f"Better in some and worse in others, in {what}: {{}}."),
        (worse, f"Worse somewhere and better nowhere, in {what}: {{}}."),
        (same, f"No difference from {metadata['reference']} anywhere, in {what}: {{}}."),
    ]
    return [text.format(_listed(labels)) for labels, text in groups if labels]


def _winners(metadata: Mapping[str, Any], entries: Entries) -> list[str]:
    """Who has the lowest value in how many scenarios; a fact about means over seeds, not a test."""
    sentences = []
    for metric in HEADLINE:
        wins: dict[str, int] = {}
        for scenario in metadata["scenarios"]:
            for label in best_of(entries, scenario, metric, metadata["schedulers"]):
                wins[label] = wins.get(label, 0) + 1
        order = list(metadata["schedulers"])
        ranked = sorted(wins, key=lambda label: (-wins[label], order.index(label)))
        if ranked:
            shown = _listed([f"{label} in {wins[label]}" for label in ranked])
            total = _plural(len(metadata["scenarios"]), "scenario")
            sentences.append(f"Lowest {TITLES[metric]} of those that can be deployed, of {total}: {shown}.")
    return sentences


def _worse(entries: Entries, scenario: str, scheduler: str) -> list[tuple[str, Entry]]:
    found = [(metric, entries[scenario, scheduler, metric]) for metric in _PRICES]
    return [(metric, entry) for metric, entry in found if entry.verdict == WORSE]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
