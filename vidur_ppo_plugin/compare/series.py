"""What the plots draw, computed from the requests of a run: quantiles, queues per replica and shares over time."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The levels at which a distribution is kept: denser towards the tail, which is what a router is judged by.
QUANTILE_LEVELS: Array = np.concatenate(
    [
        np.linspace(0.0, 0.9, 60, endpoint=False),
        np.linspace(0.9, 0.99, 27, endpoint=False),
        np.linspace(0.99, 0.999, 19),
    ]
)
QUEUE_BINS = 150
SHARE_BINS = 40


@dataclass(frozen=True)
class ReplicaSeries:
    """One value per replica and time: `values[replica, i]` belongs to `time_s[i]`."""

    time_s: Array
    values: Array


def end_to_end_s(requests: pd.DataFrame) -> Array:
    """Latency of each request after warm-up; a request that never finished has an infinite one."""
    return _elapsed_s(requests, "completed_at_s")


def first_token_s(requests: pd.DataFrame) -> Array:
    """Time to first token of each request after warm-up; infinite if there was none."""
    return _elapsed_s(requests, "first_token_at_s")


def quantiles(values: Array) -> Array:
    """The values at QUANTILE_LEVELS: each one that occurred, so that infinite ones do no harm to their neighbours."""
    if not len(values):
        raise ValueError("no request is left after warm-up: there is no distribution to draw")
    return np.asarray(np.quantile(values, QUANTILE_LEVELS, method="inverted_cdf"), dtype=np.float64)


def waiting(requests: pd.DataFrame, num_replicas: int, bins: int = QUEUE_BINS) -> ReplicaSeries:
    """Queue lengths: requests sent to a replica that it has not begun yet, averaged over each time bin."""
    return _present(requests, num_replicas, "scheduled_at_s", bins)


def in_flight(requests: pd.DataFrame, num_replicas: int, bins: int = QUEUE_BINS) -> ReplicaSeries:
    """Requests sent to a replica and not finished, averaged over each time bin."""
    return _present(requests, num_replicas, "completed_at_s", bins)


def action_shares(requests: pd.DataFrame, num_replicas: int, bins: int = SHARE_BINS) -> ReplicaSeries:
    """Which fraction of requests each replica got, over groups of equally many successive requests.

    Groups of equal size, not of equal time: a lull would otherwise leave bins without any request.
    """
    ordered = requests.sort_values("arrived_at_s", kind="stable")
    groups = np.array_split(np.arange(len(ordered)), min(bins, len(ordered)))
    arrived_at_s = ordered["arrived_at_s"].to_numpy(dtype=np.float64)
    replica = ordered["replica"].to_numpy(dtype=np.int64)
    shares = [np.bincount(replica[group], minlength=num_replicas) / len(group) for group in groups]
    return ReplicaSeries(np.array([arrived_at_s[group].mean() for group in groups]), np.array(shares).T)


def _elapsed_s(requests: pd.DataFrame, until: str) -> Array:
    kept = requests[~requests["is_warm_up"].astype(bool)]
    return np.asarray((kept[until] - kept["arrived_at_s"]).fillna(np.inf), dtype=np.float64)


def _present(requests: pd.DataFrame, num_replicas: int, until: str, bins: int) -> ReplicaSeries:
    """The time average, per bin up to the last arrival, of how many requests are between arrival and `until`."""
    arrived_at_s = requests["arrived_at_s"].to_numpy(dtype=np.float64)
    until_s = requests[until].fillna(np.inf).to_numpy(dtype=np.float64)
    replica = requests["replica"].to_numpy(dtype=np.int64)
    # The drain is left out: paired runs have the last arrival in common, and so the time axis.
    edges_s = np.linspace(arrived_at_s.min(), max(arrived_at_s.max(), arrived_at_s.min() + 1e-9), bins + 1)
    # The area under the count up to an edge is the time since arrival minus the time since `until`, summed.
    areas = [
        _since(edges_s, arrived_at_s[replica == i]) - _since(edges_s, until_s[replica == i])
        for i in range(num_replicas)
    ]
    values = np.diff(np.array(areas), axis=1) / np.diff(edges_s)
    return ReplicaSeries((edges_s[1:] + edges_s[:-1]) / 2, values.clip(min=0.0))


def _since(edges_s: Array, instants_s: Array) -> Array:
    """Sum of the times that have passed at each edge since every instant before it."""
    instants_s = np.sort(instants_s)
    counts = np.searchsorted(instants_s, edges_s)
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(instants_s), instants_s, 0.0))])
    return np.asarray(counts * edges_s - sums[counts], dtype=np.float64)
