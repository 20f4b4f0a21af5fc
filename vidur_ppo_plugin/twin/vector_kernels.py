"""The compiled functions that `VectorTwin` calls. Cluster `c` has the rows from `c * num_replicas` on.

Each can be called again where it had to stop: what was done is not done again, since `observed.is_current` tells which
clusters have been brought to their next request.
"""

from typing import Any, NamedTuple

import numpy as np

from vidur_ppo_plugin.routing.averages import RATE_WINDOW_S, decayed_rate, mean_output
from vidur_ppo_plugin.routing.features import observe

from .compiled import entry, helper
from .events import advance_row, submit_to_cells
from .forks import increase_of_row
from .layout import DONE, FINISHED, FINISHED_DECODE_TOKENS, Float32Array, FloatArray, IntArray
from .snapshot_column import write_column
from .visibility import NUM_ROWS, View, view_of

# Replicas whose features are wanted.
_ALL = np.empty(0, np.intp)


class Workload(NamedTuple):
    """Requests, each array [clusters, requests], and the progress in them."""

    #: Seconds; then tokens of prompt and output, and the replica of each request (where it has been placed).
    arrived_s: FloatArray
    prompts: IntArray
    outputs: IntArray
    placed: IntArray
    #: [clusters]: how many requests there are, and the index of the next one.
    num_requests: IntArray
    position: IntArray


class ObservationState(NamedTuple):
    """What is observed at the next request of each cluster (first axis), and the constants it is computed with."""

    speed_factors: FloatArray
    initial_decode_tokens: float
    #: `FeatureTable.kernel_constants`: inverse scales of levels and slots, weight of the newest.
    level_scales: FloatArray
    slot_scales: FloatArray
    ema_weight: float
    #: Scales of tokens, seconds and rates.
    scales: FloatArray
    #: What the operator of each cluster asks for.
    tail_preferences: FloatArray
    #: Not called "view": numba takes that for the method of arrays.
    visible: View
    #: 1 if the cluster has been brought to its next request.
    is_current: IntArray
    #: [clusters, trends, replicas]: moving averages, and the last values.
    average: FloatArray
    last: FloatArray
    #: [clusters, figures, replicas]: rows of a snapshot, then those of waiting requests; the truth, and what is shown.
    truth: FloatArray
    shown: FloatArray
    #: Seconds since the arrival before, arrivals per second.
    arrivals: FloatArray
    #: Mean output of finished requests: the truth, and what is known.
    expected: FloatArray
    expected_shown: FloatArray
    replicas: Float32Array
    requests: Float32Array


@entry
def observe_all(rules: Any, times: Any, state: Any, workload: Any, observed: Any) -> Any:
    """Bring every cluster to its next request and write what is seen; those without one are left out."""
    for c in range(len(workload.position)):
        outcome = observe_cluster(rules, times, state, workload, observed, c)
        if outcome != DONE:
            return outcome
    return DONE


@helper
def observe_cluster(rules: Any, times: Any, state: Any, workload: Any, observed: Any, c: int) -> Any:
    """Bring one cluster to its next request and write what is seen; nothing if it has none."""
    k = workload.position[c]
    if observed.is_current[c] or k >= workload.num_requests[c]:
        return DONE
    arrived_s, prompts = workload.arrived_s[c], workload.prompts[c]
    truth = observed.truth[c]
    outcome = _read_cluster(rules, times, state, observed, c, arrived_s[k], truth)
    if outcome != DONE:
        return outcome
    shown = truth
    observed.expected_shown[c] = observed.expected[c]
    if observed.visible.delay_s > 0.0:
        shown = observed.shown[c]
        observed.expected_shown[c] = view_of(
            observed.visible, c, k, arrived_s, prompts, workload.placed[c], truth, observed.expected[c], shown
        )
    since_s, rate_per_s = 0.0, 0.0
    if k > 0:
        since_s = arrived_s[k] - arrived_s[k - 1]
        rate_per_s = decayed_rate(observed.arrivals[c, 1] + 1.0 / RATE_WINDOW_S, arrived_s[k - 1], arrived_s[k])
    observed.arrivals[c, 0], observed.arrivals[c, 1] = since_s, rate_per_s
    figures = (
        prompts[k] / observed.scales[0],
        since_s / observed.scales[1],
        rate_per_s / observed.scales[2],
        observed.expected_shown[c] / observed.scales[0],
    )
    observed.replicas[c], observed.requests[c] = observe(
        shown[:NUM_ROWS],
        shown[NUM_ROWS:],
        observed.average[c],
        observed.last[c],
        k == 0,
        observed.level_scales,
        observed.slot_scales,
        observed.ema_weight,
        prompts[k],
        figures,
        observed.tail_preferences[c],
        _ALL,
    )
    observed.is_current[c] = 1
    return DONE


@helper
def _read_cluster(rules: Any, times: Any, state: Any, observed: Any, c: int, now_s: float, truth: Any) -> Any:
    finished, decode_tokens = 0, 0
    num_replicas = len(observed.speed_factors)
    values, waiting = truth[:NUM_ROWS], truth[NUM_ROWS:]
    for replica in range(num_replicas):
        row = c * num_replicas + replica
        outcome = advance_row(rules, times, state, row, now_s)
        if outcome != DONE:
            return outcome
        i = state.cells[row]
        write_column(rules, i, state.floats[row], now_s, observed.speed_factors[replica], values, waiting, replica)
        finished += i[FINISHED]
        decode_tokens += i[FINISHED_DECODE_TOKENS]
    observed.expected[c] = mean_output(finished, decode_tokens, observed.initial_decode_tokens)
    return DONE


@entry
def act_all(rules: Any, times: Any, state: Any, workload: Any, observed: Any, actions: Any) -> Any:
    """Hand the next request of every cluster to the replica that was chosen for it; all must have been observed."""
    for c in range(len(workload.position)):
        if observed.is_current[c]:
            outcome = act_in_cluster(rules, state, workload, observed, c, actions[c])
            if outcome != DONE:
                return outcome
    return DONE


@helper
def act_in_cluster(rules: Any, state: Any, workload: Any, observed: Any, c: int, action: int) -> Any:
    """Hand the next request of one cluster to a replica; the cluster must have been observed."""
    k = workload.position[c]
    row = c * len(observed.speed_factors) + action
    outcome = submit_to_cells(
        rules,
        state.cells[row],
        state.floats[row],
        k,
        workload.arrived_s[c, k],
        workload.prompts[c, k],
        workload.outputs[c, k],
    )
    if outcome == DONE:
        workload.placed[c, k] = action
        workload.position[c] += 1
        observed.is_current[c] = 0
    return outcome


@entry
def increase_all(
    rules: Any, times: Any, state: Any, workload: Any, scratch: Any, power: float, horizon_s: float, result: Any
) -> Any:
    """`forks.increase` for the next request of every cluster; 0 for those without one."""
    for c in range(len(workload.position)):
        if workload.position[c] >= workload.num_requests[c]:
            result[c, :] = 0.0
            continue
        outcome = increase_in_cluster(rules, times, state, workload, scratch, c, power, horizon_s, result[c])
        if outcome != DONE:
            return outcome
    return DONE


@helper
def increase_in_cluster(
    rules: Any, times: Any, state: Any, workload: Any, scratch: Any, c: int, power: float, horizon_s: float, result: Any
) -> Any:
    """`forks.increase` for the next request of one cluster, which must have one."""
    k, num_replicas = workload.position[c], len(result)
    now_s, prompt, output = workload.arrived_s[c, k], workload.prompts[c, k], workload.outputs[c, k]
    for replica in range(num_replicas):
        row, into = c * num_replicas + replica, result[replica : replica + 1]
        outcome = increase_of_row(
            rules, times, state, scratch, row, now_s, prompt, output, power, now_s + horizon_s, into
        )
        if outcome != DONE:
            return outcome
    return DONE
