"""The prior: a heuristic as logits, which the learned policy is a residual of."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compilable, compiled
from .delay_model import DelayModel
from .heuristics import HEURISTICS, KIND, Cost, costs_of
from .snapshot import ClusterSnapshot, FloatArray, RequestInfo

Float32Array = NDArray[np.float32]
#: No heuristic: all replicas are alike.
NONE = "none"
# Where the logits grow with the logarithm of the cost: the same order, but a replica that is far behind keeps a chance,
# and so can be learned about. With long prompts a cost in proportion makes all replicas but one impossible.
_LOG = "log_"
_LINEAR_UNITS = {name: entry.prior_unit for name, entry in HEURISTICS.items() if entry.prior_unit is not None}
_LOG_UNITS = {_LOG + name: entry.log_prior_unit for name, entry in HEURISTICS.items() if entry.log_prior_unit}
_UNITS = {NONE: 1.0, **_LINEAR_UNITS, **_LOG_UNITS}
NAMES = tuple(_UNITS)
_NO_KIND = -1


class PriorRules(NamedTuple):
    """Parameters of `prior_logits`: a heuristic, its constants, and how its costs become logits."""

    kind: int
    is_logarithmic: bool
    weight: float
    unit: float
    constants: tuple[float, ...]


@compilable
def linear_logit(gain: Any, weight: float, unit: float) -> Any:
    """A logit in proportion to the gain, which is what the best replica costs less (so no logit is above 0)."""
    return gain * (weight / unit)


@compilable
def log_logits(gains: Any, weight: float, unit: float) -> Any:
    """Logits from the logarithm of the gains; `gains` are those of `linear_logit`."""
    logits = np.empty(len(gains), np.float32)
    for i in range(len(gains)):
        logits[i] = -weight * math.log1p(-gains[i] / unit)
    return logits


_log_logits_compiled = compiled(log_logits)


@compilable
def prior_logits(values: Any, facts: Any, rules: Any) -> Any:
    """The prior's logits from a snapshot's figures, for compiled code; `facts` are those that costs take."""
    gains = costs_of(rules.kind, values, facts, rules.constants)
    lowest = gains.min()
    for i in range(len(gains)):
        gains[i] = lowest - gains[i]
    if rules.is_logarithmic:
        return log_logits(gains, rules.weight, rules.unit)
    logits = np.empty(len(gains), np.float32)
    for i in range(len(gains)):
        logits[i] = linear_logit(gains[i], rules.weight, rules.unit)
    return logits


class Prior:
    """Costs of a heuristic, and the logits made of them."""

    def __init__(self, name: str, *, weight: float, delay_model: DelayModel) -> None:
        if name not in _UNITS:
            raise ValueError(f"prior must be one of {', '.join(NAMES)}, got {name!r}")
        self.name = name
        self._weight, self._unit = float(weight), _UNITS[name]
        self._is_logarithmic = name in _LOG_UNITS
        self._heuristic = HEURISTICS.get(name.removeprefix(_LOG) if self._is_logarithmic else name)
        self._delay_model = delay_model
        self._cost: Cost = _nothing if self._heuristic is None else self._heuristic.bind(delay_model)

    @property
    def rules(self) -> PriorRules:
        """The rules that compiled code takes."""
        kind = _NO_KIND if self._heuristic is None else KIND[self._heuristic.name]
        heuristic = self._heuristic or HEURISTICS["least_outstanding"]
        constants = heuristic.constants(self._delay_model)
        return PriorRules(kind, self._is_logarithmic, self._weight, self._unit, constants)

    def cost(self, snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
        """The heuristic's cost of each replica; zeros for the prior `none`."""
        return self._cost(snapshot, request)

    def logits(self, cost: FloatArray) -> Float32Array:
        """Logits of costs [..., replicas]: zero for the best replica, negative for the others, in the same order."""
        is_one_decision = cost.ndim == 1  # half as long as with an axis, and it is made for every request
        gains = (np.minimum.reduce(cost) if is_one_decision else cost.min(axis=-1, keepdims=True)) - cost
        logits: Float32Array
        if not self._is_logarithmic:
            logits = linear_logit(gains, self._weight, self._unit).astype(np.float32)
        elif is_one_decision:
            logits = _log_logits_compiled(gains, self._weight, self._unit)
        else:
            logits = _log_logits_compiled(gains.reshape(-1), self._weight, self._unit).reshape(gains.shape)
        return logits


def _nothing(snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
    return np.zeros(snapshot.num_replicas)
