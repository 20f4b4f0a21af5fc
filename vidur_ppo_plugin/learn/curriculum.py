"""The curriculum: stages of load and of penalties, from easy to real, written as one compact flag."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

EXAMPLE = "load=0.5,decisions=2000;load=0.8,penalty=0.5,latency_mean_below=6.0;load=1.0"
_KEYS = "load, penalty, decisions, updates, <metric>_below or <metric>_above"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, and what ends it: so many decisions, or a metric that has reached its target, whichever is first."""

    #: Multiplier of the arrival rate.
    load: float = 1.0
    #: Multiplier of the reward's penalties.
    penalty: float = 1.0
    #: Decisions after which it ends; 0: not by decisions.
    decisions: int = 0
    #: Name of the metric that ends it; "": none.
    metric: str = ""
    target: float = 0.0
    lower_is_better: bool = True
    #: Updates in a row for which the metric must be better than its target.
    updates: int = 3

    def __post_init__(self) -> None:
        """Refuse values out of range, naming them."""
        if not 0.0 < self.load < math.inf:
            raise ValueError(f"load must be finite and > 0, got {self.load!r}")
        if not 0.0 <= self.penalty < math.inf:
            raise ValueError(f"penalty must be finite and >= 0, got {self.penalty!r}")
        if self.decisions < 0:
            raise ValueError(f"decisions must be >= 1, or 0 for no limit, got {self.decisions!r}")
        if self.updates < 1:
            raise ValueError(f"updates must be >= 1, got {self.updates!r}")
        if not math.isfinite(self.target):
            raise ValueError(f"the target of {self.metric} must be finite, got {self.target!r}")

    @property
    def has_end(self) -> bool:
        """Whether the stage ends by itself."""
        return self.decisions > 0 or self.metric != ""

    def __str__(self) -> str:
        """The stage as it is written in the flag."""
        parts = [f"load={self.load}", f"penalty={self.penalty}"]
        parts += [f"decisions={self.decisions}"] if self.decisions else []
        if self.metric:
            parts += [f"{self.metric}_{'below' if self.lower_is_better else 'above'}={self.target}"]
            parts += [f"updates={self.updates}"]
        return ",".join(parts)


def parse_stages(text: str, *, flag: str = "curriculum") -> list[Stage]:
    """Stages from a flag such as `EXAMPLE`; an empty text is one stage at full load.

    Stages are separated by semicolons; each has load, penalty (both 1 unless given) and what ends it: decisions,
    or `<metric>_below` / `<metric>_above` for `updates` updates in a row (3 unless given).
    """
    try:
        stages = [_parse_stage(part) for part in text.split(";")] if text.strip() else [Stage()]
        _check_ends(stages)
    except ValueError as error:
        raise ValueError(f"{flag}={text!r}: {error}; right would be, for example, {EXAMPLE!r}") from None
    return stages


def _parse_stage(text: str) -> Stage:
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item.strip()!r} is not of the form key=value")
        metric, _, direction = key.rpartition("_")
        if metric and direction in ("below", "above"):
            added = {"metric": metric, "target": _number(key, value), "lower_is_better": direction == "below"}
        elif key in ("decisions", "updates"):
            added = {key: _whole_number(key, value)}
        elif key in ("load", "penalty"):
            added = {key: _number(key, value)}
        else:
            raise ValueError(f"{key!r} is unknown, a stage knows {_KEYS}")
        if values.keys() & added.keys():
            raise ValueError(
                f"{key!r} is given twice in {text.strip()!r}; a stage has one value of each and one metric"
            )
        values.update(added)
    if "updates" in values and "metric" not in values:
        raise ValueError(f"updates in {text.strip()!r} needs a metric to watch, such as latency_mean_below=6.0")
    return Stage(**values)


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{key} must be a number, got {value!r}") from None


def _whole_number(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{key} must be a whole number >= 1, got {value!r}")
    return int(value)


def _check_ends(stages: Sequence[Stage]) -> None:
    if not stages:
        raise ValueError("stages must hold at least one stage, got none")
    for number, stage in enumerate(stages[:-1], start=1):
        if not stage.has_end:
            raise ValueError(f"stage {number} ({stage}) never ends: give it decisions or a metric's target")
    if stages[-1].has_end:
        raise ValueError(f"the last stage ({stages[-1]}) must not end: nothing comes after it")


class Curriculum:
    """Goes through the stages as decisions are made and metrics reach their targets; logs every switch."""

    def __init__(self, *, stages: Sequence[Stage]) -> None:
        _check_ends(stages)
        self._stages = tuple(stages)
        self._index = 0
        self._decisions_in_stage = 0
        self._reached_in_a_row = 0

    @classmethod
    def parse(cls, text: str, *, flag: str = "curriculum") -> "Curriculum":
        """The curriculum that the text of a flag describes; see `parse_stages`."""
        return cls(stages=parse_stages(text, flag=flag))

    @property
    def stage(self) -> int:
        """Index of the stage, from 0."""
        return self._index

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._stages)

    @property
    def load(self) -> float:
        """Multiplier of the arrival rate now."""
        return self._stages[self._index].load

    @property
    def penalty_scale(self) -> float:
        """Multiplier of the reward's penalties now."""
        return self._stages[self._index].penalty

    @property
    def max_load(self) -> float:
        """The largest load of any stage."""
        return max(stage.load for stage in self._stages)

    @property
    def metric_names(self) -> list[str]:
        """The metrics that `on_update` must be given at some stage: check them before a long run."""
        return sorted({stage.metric for stage in self._stages} - {""})

    def on_decision(self) -> bool:
        """A decision was made. Whether a new stage begins."""
        self._decisions_in_stage += 1
        stage = self._stages[self._index]
        if 0 < stage.decisions <= self._decisions_in_stage:
            self._switch(f"{self._decisions_in_stage} decisions")
            return True
        return False

    def on_update(self, metrics: Mapping[str, float]) -> bool:
        """An update was made, with these metrics (NaN: not known yet). Whether a new stage begins."""
        stage = self._stages[self._index]
        if not stage.metric:
            return False
        if stage.metric not in metrics:
            raise ValueError(f"the curriculum waits for {stage.metric!r}, which is none of: {', '.join(metrics)}")
        value = metrics[stage.metric]
        is_reached = value < stage.target if stage.lower_is_better else value > stage.target
        self._reached_in_a_row = self._reached_in_a_row + 1 if is_reached else 0
        if self._reached_in_a_row < stage.updates:
            return False
        self._switch(f"{stage.metric} {value:g}, better than {stage.target:g} for {stage.updates} updates")
        return True

    def _switch(self, reason: str) -> None:
        self._index += 1
        self._decisions_in_stage = self._reached_in_a_row = 0
        message = "curriculum: stage %d of %d begins (%s) after %s"
        logger.info(message, self._index + 1, len(self._stages), self._stages[self._index], reason)

    def state_dict(self) -> dict[str, Any]:
        """The current stage, the progress in it, and the stages of the curriculum."""
        return {
            "stages": [str(stage) for stage in self._stages],
            "index": self._index,
            "decisions_in_stage": self._decisions_in_stage,
            "reached_in_a_row": self._reached_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the stages must be the same."""
        own = [str(stage) for stage in self._stages]
        if state["stages"] != own:
            saved = ";".join(state["stages"])
            raise ValueError(f"curriculum must be the saved one, {saved!r}, to continue it; got {';'.join(own)!r}")
        self._index = state["index"]
        self._decisions_in_stage = state["decisions_in_stage"]
        self._reached_in_a_row = state["reached_in_a_row"]
