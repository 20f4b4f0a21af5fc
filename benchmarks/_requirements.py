"""What is asked of a policy, and the changes in a results directory of `vidur-ppo compare` by which it is judged.

"beats Vidur": in every scenario mean latency and mean and P99 of the time to first token are lower than those of
random, round_robin and lor beyond noise, or at a load of at most 50 % within 0.5 %. "never worse": in every scenario
the upper ends of the 95 % intervals against least_tokens are below +1 % for means and +3 % for P99s.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from vidur_ppo_plugin.compare.schedulers import LEARNED
from vidur_ppo_plugin.compare.statistics import paired_change

#: The metrics that requirements are about.
METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99")
#: Vidur's own schedulers, and those of METRICS in which a policy has to be better than each of them.
VIDURS = ("random", "round_robin", "lor")
BEATS = ("e2e_mean", "ttft_mean", "ttft_p99")
#: What a policy must never be worse than, and the largest upper end of the 95 % interval that counts as that.
PRIOR = "least_tokens"
MOST_WORSE = {"e2e_mean": 0.01, "ttft_mean": 0.01, "e2e_p99": 0.03, "ttft_p99": 0.03}
# Where a cluster is hardly loaded nobody waits for anybody: there a change that small is a tie, and enough.
_TIE = 0.005
_LIGHT_LOAD = 0.5

#: A change, the ends of its interval (`low`, `high`), and the number of `seeds` that it rests on.
Entry = Mapping[str, float]
#: Scenario -> metric -> its change.
Changes = dict[str, dict[str, Entry]]


def change(ours: Iterable[float], theirs: Iterable[float]) -> Entry:
    """Relative change of a mean over seeds and its 95 % interval, paired by seed."""
    first, second = (np.array(list(values), dtype=np.float64) for values in (ours, theirs))
    return {**dict(zip(("change", "low", "high"), paired_change(first, second), strict=True)), "seeds": len(first)}


def changes_of(cells: pd.DataFrame, scheduler: str, reference: str, metrics: Iterable[str] = METRICS) -> Changes:
    """What a scheduler changes against another, in the scenarios in which both have finished a seed."""
    found: Changes = {}
    for scenario, of_scenario in cells.groupby("scenario", sort=False):
        ours, theirs = (
            of_scenario[of_scenario["scheduler"] == name].set_index("seed") for name in (scheduler, reference)
        )
        seeds = ours.index.intersection(theirs.index)
        if len(seeds):
            found[str(scenario)] = {name: change(ours.loc[seeds, name], theirs.loc[seeds, name]) for name in metrics}
    return found


def is_sure(entry: Entry) -> bool:
    """Whether the interval of a change is known and does not contain zero."""
    return entry["low"] > 0 or entry["high"] < 0


def beats(entry: Entry, load: float) -> bool:
    """Whether a change is an improvement beyond noise, or at light load a tie."""
    return entry["high"] < 0 or (load <= _LIGHT_LOAD and abs(entry["change"]) <= _TIE)


def is_not_inferior(metric: str, entry: Entry) -> bool:
    """Whether a change against PRIOR excludes that the policy is worse."""
    return entry["high"] < MOST_WORSE[metric]


def holds(reference: str, by_metric: Mapping[str, Entry], load: float) -> bool:
    """Whether what is asked of a policy against this reference is shown in a scenario."""
    if reference == PRIOR:
        return all(is_not_inferior(metric, by_metric[metric]) for metric in METRICS)
    return all(beats(by_metric[metric], load) for metric in BEATS)


def policies_of(schedulers: Mapping[str, Any]) -> list[str]:
    """The labels of the learned policies among the schedulers of a comparison."""
    return [label for label, facts in schedulers.items() if facts["kind"] == LEARNED]


def text_of(entry: Entry) -> str:
    """A change for people, with its interval where there is one."""
    if math.isnan(entry["low"]):
        return f"{entry['change']:+.1%}"
    return f"{entry['change']:+.1%} [{100 * entry['low']:+.1f}, {100 * entry['high']:+.1f}]"
