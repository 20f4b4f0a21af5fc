"""What a router sees of many clusters where reports are old or replicas drained: `routing.visibility`, on arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vidur_ppo_plugin.routing.averages import updated_typical_prompt
from vidur_ppo_plugin.routing.snapshot import ROW, ROWS
from vidur_ppo_plugin.routing.visibility import Drain
from vidur_ppo_plugin.workload.requests import Requests

from .compiled import helper
from .layout import FloatArray, IntArray

_OUTSTANDING, _PREFILL = ROW["outstanding_requests"], ROW["prefill_tokens"]
_TYPICAL = ROW["typical_prompt_tokens"]
NUM_ROWS = len(ROWS)


class View(NamedTuple):
    """What each cluster's router sees late or not at all: age of reports, those on their way, who is drained when."""

    delay_s: float
    #: [clusters, ring, figures, replicas]: what was true at decision k is at k modulo the length of the ring.
    reports: FloatArray
    #: [clusters, ring]: the mean output that was known then.
    expected: FloatArray
    #: The decision whose report was seen last.
    seen: IntArray
    #: [clusters, drains, 3]: replica, from when to when.
    drains: FloatArray


def new_view(
    requests: Sequence[Requests],
    num_replicas: int,
    num_slots: int,
    *,
    delay_s: float,
    drains: Sequence[Sequence[Drain]] | None,
) -> View:
    """The view of clusters with these requests; `num_slots`: rows of figures that are shown of waiting requests."""
    size, ring = len(requests), _ring_size(requests, delay_s) if delay_s else 0
    most = max((len(part) for part in drains), default=0) if drains else 0
    columns = np.zeros((size, most, 3))  # a drain from 0 to 0 s is none
    for cluster, part in enumerate(drains or ()):
        for number, drain in enumerate(part):
            columns[cluster, number] = drain.replica, drain.from_s, drain.to_s
    return View(
        float(delay_s),
        np.zeros((size, ring, NUM_ROWS + num_slots, num_replicas)),
        np.zeros((size, ring)),
        np.zeros(size, np.int64),
        columns,
    )


def _ring_size(requests: Sequence[Requests], delay_s: float) -> int:
    """Most reports that are on their way at a decision, and the one that is seen."""
    longest = 1
    for part in requests:
        if len(part):
            newest = np.searchsorted(part.arrived_at_s, part.arrived_at_s - delay_s, side="right") - 1
            longest = max(longest, int((np.arange(len(part)) - np.maximum(newest, 0)).max()) + 1)
    return longest


@helper
def view_of(
    view: Any, c: int, k: int, arrived_s: Any, prompts: Any, placed: Any, figures: Any, expected: float, shown: Any
) -> Any:
    """Write into `shown` what the router sees at decision k where the truth is `figures`; the mean output it knows."""
    ring = view.reports.shape[1]
    view.reports[c, k % ring] = figures
    view.expected[c, k % ring] = expected
    if k == 0:
        view.seen[c] = 0
    now_s, report = arrived_s[k], view.seen[c]
    while report < k and arrived_s[report + 1] <= now_s - view.delay_s:
        report += 1
    view.seen[c] = report
    shown[:] = view.reports[c, report % ring]
    for sent in range(report, k):
        shown[_OUTSTANDING, placed[sent]] += 1.0
        shown[_PREFILL, placed[sent]] += prompts[sent]
        shown[_TYPICAL, placed[sent]] = updated_typical_prompt(shown[_TYPICAL, placed[sent]], prompts[sent])
    return view.expected[c, report % ring]


@helper
def mask_drained(view: Any, c: int, now_s: float, value: float, logits: Any) -> None:
    """Give a value to the logits of replicas that take no new requests, unless that is all of them."""
    num_replicas = len(logits)
    num_closed = 0
    for replica in range(num_replicas):
        num_closed += _is_closed(view.drains[c], now_s, replica)
    if num_closed == num_replicas:
        return
    for replica in range(num_replicas):
        if _is_closed(view.drains[c], now_s, replica):
            logits[replica] = value


@helper
def _is_closed(drains: Any, now_s: float, replica: int) -> Any:
    for number in range(len(drains)):
        if drains[number, 0] == replica and drains[number, 1] <= now_s < drains[number, 2]:
            return True
    return False
