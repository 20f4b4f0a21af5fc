"""Requests drawn from distributions: lengths and arrivals together."""

from .arrivals import arrival_times
from .lengths import LengthSampler
from .requests import Requests


def draw_requests(lengths: LengthSampler, seed: int, num_requests: int, *, qps: float, cv: float = 1.0) -> Requests:
    """The first requests of a seed: a longer run begins with the same, another rate stretches the same gaps."""
    prompts, outputs = lengths.draw(seed, num_requests)
    return Requests(arrival_times(seed, num_requests, qps=qps, cv=cv), prompts, outputs)
