"""What every router of ours has. The constants of the heuristics stand in their table, `routing/heuristics.py`."""

from dataclasses import dataclass
from typing import Any, Tuple

from .flag import flag, flag_name, require


@dataclass
class VisibilityFlags:
    """What the router gets to see of the replicas."""

    report_delay_s: float = flag(
        0.0,
        "Age of what replicas report when it reaches the router, in seconds; what the router itself sent is known at "
        "once. Raise it to study routers that scrape metrics, lower it for those that are told at once.",
        low=0,
        high=3600,
    )
    drained: str = flag(
        "",
        "Replicas that take no new requests for a while: REPLICA:FROM_S:TO_S, separated by commas; 1:60:120 is replica "
        "1 from second 60 to 120.",
    )


@dataclass(frozen=True)
class Drain:
    """A replica that takes no new requests from one moment to another."""

    replica: int
    from_s: float
    to_s: float


def drains_of(flags: VisibilityFlags, num_replicas: int) -> Tuple[Drain, ...]:
    """The drains that the flag names; ValueError naming it."""
    try:
        return parse_drains(flags.drained, num_replicas)
    except ValueError as error:
        raise ValueError(f"{flag_name(type(flags), 'drained')}={flags.drained!r}: {error}") from None


def parse_drains(text: str, num_replicas: int) -> Tuple[Drain, ...]:
    """`1:60:120` is replica 1 from second 60 to 120; several are separated by commas. ValueError if it is not so."""
    drains = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        pieces = part.split(":")
        try:
            replica, from_s, to_s = int(pieces[0]), float(pieces[1]), float(pieces[2])
        except (ValueError, IndexError):
            raise ValueError(f"expected REPLICA:FROM_S:TO_S, got {part!r}") from None
        if len(pieces) != 3 or not 0 <= from_s < to_s:
            raise ValueError(f"expected REPLICA:FROM_S:TO_S with 0 <= FROM_S < TO_S, got {part!r}")
        if not 0 <= replica < num_replicas:
            raise ValueError(f"the replica must be in 0 ... {num_replicas - 1}, got {part!r}")
        drains.append(Drain(replica, from_s, to_s))
    return tuple(drains)


def format_drains(drains: Tuple[Drain, ...]) -> str:
    """The text that `parse_drains` reads."""
    return ",".join(f"{drain.replica}:{drain.from_s!r}:{drain.to_s!r}" for drain in drains)


@dataclass
class TieBreakingFlags(VisibilityFlags):
    """What every heuristic scheduler has: a seed for fair, reproducible tie-breaking."""

    seed: int = flag(42, "Seed of every random choice that the scheduler makes.", low=0, high=1_000_000_000)


def check_router(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags do not fit the cluster."""
    drains_of(flags, num_replicas)
    num_long = getattr(flags, "num_long_replicas", 0)  # of `size_split`
    right = f"smaller than the number of replicas ({num_replicas})"
    require(flags, num_long < num_replicas, "num_long_replicas", right)
