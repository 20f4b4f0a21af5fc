"""The compiled functions that `VectorTwin` calls. Cluster `c` has the rows from `c * num_replicas` on.

Each works through the clusters from `progress[0]` on, so that it can be called again where it had to stop.
"""

import math
from typing import Any

from vidur_ppo_plugin.routing.feature_kernel import observe

from .compiling import entry, helper
from .events import RATE_WINDOW_S, advance_row, submit_to_cells
from .forks import increase_of_row
from .layout import DONE, FINISHED, FINISHED_DECODE_TOKENS
from .looking import look


@entry
def observe_all(
    rules: Any,
    times: Any,
    state: Any,
    progress: Any,
    workload: Any,
    position: Any,
    speed_factors: Any,
    initial_decode_tokens: float,
    features: Any,
    scales: Any,
    tail_preferences: Any,
    seen: Any,
) -> Any:
    """Bring every cluster to its next request and write what the policy sees; those without one are left out.

    `workload`: arrival, prompt and output of [cluster, request], and the number of requests of each cluster;
    `features`: `FeatureTable.kernel_constants`; `seen`: the arrays of `VectorTwin` that are written.
    """
    arrived_s, prompts, _, num_requests = workload
    trend_rows, level_scales, slot_scales, ema_weight = features
    average, last, values, waiting, arrivals, expected, replicas, requests = seen
    while progress[0] < len(position):
        c = progress[0]
        k = position[c]
        if k < num_requests[c]:
            outcome = _look_at_cluster(
                rules, times, state, c, arrived_s[c, k], speed_factors, initial_decode_tokens, values, waiting, expected
            )
            if outcome != DONE:
                return outcome
            since_s = 0.0 if k == 0 else arrived_s[c, k] - arrived_s[c, k - 1]
            rate_per_s = 0.0 if k == 0 else (arrivals[c, 1] + 1.0 / RATE_WINDOW_S) * math.exp(-since_s / RATE_WINDOW_S)
            arrivals[c, 0], arrivals[c, 1] = since_s, rate_per_s
            figures = (
                prompts[c, k] / scales[0],
                since_s / scales[1],
                rate_per_s / scales[2],
                expected[c] / scales[0],
            )
            replicas[c], requests[c] = observe(
                values[:, c],
                waiting[:, c],
                average[c],
                last[c],
                k == 0,
                trend_rows,
                level_scales,
                slot_scales,
                ema_weight,
                prompts[c, k],
                figures,
                tail_preferences[c],
            )
        progress[0] += 1
    return DONE


@helper
def _look_at_cluster(
    rules: Any,
    times: Any,
    state: Any,
    c: int,
    now_s: float,
    speed_factors: Any,
    initial_decode_tokens: float,
    values: Any,
    waiting: Any,
    expected: Any,
) -> Any:
    finished, decode_tokens = 0, 0
    for replica in range(len(speed_factors)):
        row = c * len(speed_factors) + replica
        outcome = advance_row(rules, times, state, row, now_s)
        if outcome != DONE:
            return outcome
        i = state.cells[row]
        look(rules, i, state.floats[row], now_s, speed_factors[replica], values[:, c], waiting[:, c], replica)
        finished += i[FINISHED]
        decode_tokens += i[FINISHED_DECODE_TOKENS]
    expected[c] = decode_tokens / finished if finished > 0 else initial_decode_tokens
    return DONE


@entry
def act_all(
    rules: Any, times: Any, state: Any, progress: Any, workload: Any, position: Any, num_replicas: int, actions: Any
) -> Any:
    """Hand the next request of every cluster to the replica that was chosen for it."""
    arrived_s, prompts, outputs, num_requests = workload
    while progress[0] < len(position):
        c = progress[0]
        k = position[c]
        if k < num_requests[c]:
            row = c * num_replicas + actions[c]
            i, f = state.cells[row], state.floats[row]
            outcome = submit_to_cells(rules, i, f, k, arrived_s[c, k], prompts[c, k], outputs[c, k])
            if outcome != DONE:
                return outcome
            position[c] += 1
        progress[0] += 1
    return DONE


@entry
def increase_all(
    rules: Any,
    times: Any,
    state: Any,
    progress: Any,
    workload: Any,
    position: Any,
    scratch: Any,
    powers: Any,
    horizon_s: float,
    result: Any,
) -> Any:
    """`forks.increase` for the next request of every cluster; 0 for those without one."""
    arrived_s, prompts, outputs, num_requests = workload
    num_replicas = result.shape[1]
    while progress[0] < len(position):
        c = progress[0]
        k = position[c]
        if k < num_requests[c]:
            now_s, until_s = arrived_s[c, k], arrived_s[c, k] + horizon_s
            for replica in range(num_replicas):
                row, into = c * num_replicas + replica, result[c, replica : replica + 1]
                outcome = increase_of_row(
                    rules, times, state, scratch, row, now_s, prompts[c, k], outputs[c, k], powers[c], until_s, into
                )
                if outcome != DONE:
                    return outcome
        else:
            result[c, :] = 0.0
        progress[0] += 1
    return DONE
