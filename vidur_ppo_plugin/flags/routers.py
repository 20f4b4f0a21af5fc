"""What every router of ours has, and the constants of the heuristics."""

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


@dataclass
class LeastTokensFlags(TieBreakingFlags):
    """Weights of the `least_tokens` score."""

    context_weight: float = flag(
        0.05,
        "Score of a token in context (KV cache), in prompt tokens. Raise it if long contexts slow decoding down "
        "more than prompts do, lower it if prefill dominates.",
        low=0,
    )
    request_weight: float = flag(
        20.0,
        "Score of a request in flight, in prompt tokens. Raise it to spread requests more evenly, lower it to "
        "let the token counts decide.",
        low=0,
    )


@dataclass
class ShortestDelayFlags(TieBreakingFlags):
    """What `shortest_delay` assumes before it has seen requests finish."""

    initial_decode_tokens: float = flag(
        128.0,
        "Expected output length until the first requests have finished; then their running mean takes over. "
        "Raise it for long outputs, lower it for short ones.",
        low=1,
    )


@dataclass
class SizeSplitFlags(LeastTokensFlags):
    """Where `size_split` draws the line, and how many replicas serve the long side."""

    threshold_tokens: int = flag(
        4096,
        "Prompts longer than this go to the replicas set aside for long prompts. Raise it if those replicas are "
        "overloaded, lower it if short prompts still wait behind long ones.",
        low=1,
    )
    num_long_replicas: int = flag(
        1,
        "How many replicas (the last ones) are set aside for long prompts: at least 1 and fewer than there are "
        "replicas. Raise it if long prompts wait too long, lower it if short ones do.",
        low=1,
    )


def check_router(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags do not fit the cluster."""
    drains_of(flags, num_replicas)
    if isinstance(flags, SizeSplitFlags):
        is_right = flags.num_long_replicas < num_replicas
        require(flags, is_right, "num_long_replicas", f"smaller than the number of replicas ({num_replicas})")
