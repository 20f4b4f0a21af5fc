"""Privileged information, for training credit only: the true output lengths of requests in flight.

Nothing here may feed a decision. It tells, after a decision was made, what each replica would have cost.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from vidur_ppo_plugin.hardware import Roofline
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.marginal_delay import ClusterWork, DrainCost


def drain_cost(roofline: Roofline, chunk_size: int) -> DrainCost:
    """The linear cost model of `marginal_delay`, from the roofline."""
    slopes = DelayModel.from_roofline(roofline, chunk_size)
    stage_ms = roofline.stage_time_ms([1], [0], is_last_stage=True)
    return DrainCost(
        prefill_s_per_token=slopes.prefill_s_per_token,
        iteration_s=stage_ms * roofline.num_pipeline_stages * 1e-3,
        iteration_s_per_request=slopes.iteration_s_per_request,
        iteration_s_per_context_token=slopes.iteration_s_per_context_token,
        prefill_chunk_tokens=chunk_size,
    )


def cluster_work(replicas: Iterable[Iterable[Any]], now_s: float) -> ClusterWork:
    """What is left to do on each of several replicas, given their requests in the order of arrival there."""
    rows: list[float] = []
    counts: list[int] = []
    for requests in replicas:
        before = len(rows)
        for request in requests:
            done = request._num_processed_tokens
            if request._is_prefill_complete:
                left = request._num_prefill_tokens + request._num_decode_tokens - done
                rows += (0, left, done, now_s - request._arrived_at)
            else:  # the end of prefill yields the first token
                left = request._num_decode_tokens - 1
                rows += (request._num_prefill_tokens - done, left, done, now_s - request._arrived_at)
        counts.append((len(rows) - before) // 4)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T.copy()
    return ClusterWork(
        prefill_tokens=columns[0],
        decode_tokens=columns[1],
        context_tokens=columns[2],
        ages_s=columns[3],
        counts=np.array(counts, dtype=np.intp),
    )
