"""The prior: a heuristic as logits, which the learned policy is a residual of."""

import math
from collections.abc import Callable

import numpy as np

from . import compiled, heuristics
from .delay_model import DelayModel
from .features import Float32Array
from .snapshot import ClusterSnapshot, FloatArray, RequestInfo

_KERNEL = "vidur_ppo_plugin.routing.prior_kernel"
# What makes a difference between two replicas, in the unit of the heuristic: a prior of weight 1 prefers the better of
# two that differ by this much with odds of e to 1.
_UNITS = {
    "none": 1.0,
    "least_outstanding": 1.0,  # a request
    "least_kv": 0.02,  # a fiftieth of the cache
    "least_tokens": 512.0,  # a chunk of prefill
    "shortest_delay": 0.05,  # what such a chunk takes
    "log_least_tokens": 512.0,
    "log_least_work": 512.0,
}
NAMES = tuple(_UNITS)
#: Grows with the logarithm of the cost: the same order, but a replica that is far behind keeps a chance, and so can be
#: learned about. With long prompts a cost in proportion makes all replicas but one impossible.
LOG_LEAST_TOKENS = "log_least_tokens"
#: The same of `heuristics.least_work`: replicas that have been slow lately count as fuller than they are.
LOG_LEAST_WORK = "log_least_work"


class Prior:
    """Costs of a heuristic, and the logits made of them."""

    def __init__(self, name: str, *, weight: float, delay_model: DelayModel) -> None:
        if name not in _UNITS:
            raise ValueError(f"prior must be one of {', '.join(NAMES)}, got {name!r}")
        self.name = name
        self._weight, self._unit = weight, _UNITS[name]
        self._delay_model = delay_model
        self._cost: Callable[[ClusterSnapshot, RequestInfo], FloatArray] = {
            "none": lambda snapshot, request: np.zeros(snapshot.num_replicas),
            "least_outstanding": lambda snapshot, request: heuristics.least_outstanding(snapshot),
            "least_kv": lambda snapshot, request: heuristics.least_kv(snapshot),
            "least_tokens": lambda snapshot, request: snapshot.token_load,
            LOG_LEAST_TOKENS: lambda snapshot, request: snapshot.token_load,
            LOG_LEAST_WORK: lambda snapshot, request: heuristics.least_work(snapshot),
            "shortest_delay": lambda snapshot, request: heuristics.shortest_delay(
                snapshot, request, delay_model=self._delay_model
            ),
        }[name]

    @property
    def kernel_constants(self) -> tuple[int, float, float, float, float, float]:
        """What `prior_kernel.prior_logits` goes by: which heuristic, weight, unit, and the costs of the delay model."""
        model = self._delay_model
        costs = model.prefill_s_per_token, model.iteration_s_per_request, model.iteration_s_per_context_token
        numbers = (self._weight, self._unit, *costs)
        return NAMES.index(self.name), *(float(number) for number in numbers)  # type: ignore[return-value]

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        """The heuristic's cost of each replica; zeros for the prior `none`."""
        return self._cost(snapshot, request)

    def logits(self, cost: FloatArray) -> Float32Array:
        """Zero for the best replica, negative for the others; the order is the heuristic's."""
        logits = np.minimum.reduce(cost) - cost
        if self.name in (LOG_LEAST_TOKENS, LOG_LEAST_WORK):
            log_logits = compiled.load(_KERNEL, "log_logits")
            if log_logits is not None:
                found = np.empty(len(logits), np.float32)
                log_logits(logits, float(self._weight), float(self._unit), found)
                return found
            # One by one, as the kernel does: numpy's own logarithm may differ in the last bit.
            behind = [-self._weight * math.log1p(-value / self._unit) for value in logits.tolist()]
            return np.array(behind, np.float32)
        logits *= self._weight / self._unit
        return logits.astype(np.float32)  # type: ignore[no-any-return]
