"""The roofline predictor."""

from dataclasses import dataclass
from typing import Any, List

from .flag import flag, flag_name, validate


@dataclass
class RooflineFlags:
    """Flags of the roofline predictor beyond those of Vidur's base class."""

    replica_speed_factors: List[float] = flag(
        [1.0],
        "Speed of each replica relative to its device: 0.5 takes twice as long. One value per replica, or a "
        "pattern whose length divides the number of replicas and is repeated.",
        above=0,
    )


def speed_factors(flags: Any, num_replicas: int) -> List[float]:
    """The speed of each replica; 1.0 for predictors that know no speeds. ValueError if they do not fit."""
    pattern = getattr(flags, "replica_speed_factors", None)
    if pattern is None:
        return [1.0] * num_replicas
    validate(flags)
    if not pattern or num_replicas % len(pattern):
        raise ValueError(
            f"{flag_name(type(flags), 'replica_speed_factors')} must have one value per replica "
            f"({num_replicas}) or a pattern whose length divides that, got {len(pattern)} values: {pattern}"
        )
    return list(pattern) * (num_replicas // len(pattern))
