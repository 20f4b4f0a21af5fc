"""The flags: plain dataclasses, one per scheduler or predictor, each field with its help text and its range.

`sim/config_types.py` binds them to Vidur, which turns a field `seed` of `LeastTokensGlobalSchedulerConfig`
into `--least_tokens_global_scheduler_config_seed`. Vidur's flag parser knows few types: bool, int, float, str,
Optional of those, List[int], List[float], Dict[str, float]. `X | None`, Literal, Tuple, a field without a
default, a percent sign in a help text, or `from __future__ import annotations` here would break the command
line of every Vidur run, ours or not (a test checks every field).

Vidur instantiates every config class of every run, so nothing here validates by itself: `validate` is called
when the scheduler or predictor is built.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, List, Optional


def flag(
    default: Any,
    help_text: str,
    *,
    low: Optional[float] = None,
    high: Optional[float] = None,
    above: Optional[float] = None,
    choices: Optional[List[str]] = None,
) -> Any:
    """A dataclass field with a help text and a range: `low` and `high` are included, `above` is not."""
    metadata = {"help": help_text, "low": low, "high": high, "above": above, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_name(config_class: type, field_name: str) -> str:
    """The command-line flag that Vidur makes of a field of a config class."""
    snake_case = "".join(f"_{c.lower()}" if c.isupper() else c for c in config_class.__name__).lstrip("_")
    return f"--{snake_case}_{field_name}"


def validate(config: Any) -> None:
    """Raise ValueError naming the flag, its value and its range if a value is out of its range."""
    for item in fields(config):
        if "low" not in item.metadata:
            continue  # a field of Vidur's own base class
        value = getattr(config, item.name)
        for single in value if isinstance(value, list) else [value]:
            problem = _range_problem(single, item.metadata)
            if problem:
                raise ValueError(f"{flag_name(type(config), item.name)} must be {problem}, got {single!r}")


def _range_problem(value: Any, metadata: Any) -> Optional[str]:
    """What the value should have been, or None if it is in range."""
    low, high, above, choices = (metadata[key] for key in ("low", "high", "above", "choices"))
    if choices is not None:
        return None if value in choices else f"one of {', '.join(choices)}"
    if low is None and high is None and above is None:
        return None
    parts = []
    if low is not None:
        parts.append(f">= {low:g}")
    if above is not None:
        parts.append(f"> {above:g}")
    if high is not None:
        parts.append(f"<= {high:g}")
    in_range = (
        isinstance(value, (int, float))
        and math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )
    return None if in_range else " and ".join(parts)


SEED_HELP = "Seed of the random choice among equally good replicas."


@dataclass
class TieBreakingFlags:
    """What every heuristic scheduler has: a seed for fair, reproducible tie-breaking."""

    seed: int = flag(42, SEED_HELP, low=0)


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
        "Raise it for long outputs.",
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


@dataclass
class PPOModularFlags(TieBreakingFlags):
    """Flags of `ppo_modular` (learning is not part of this version: it acts as its untrained policy)."""

    prior: str = flag(
        "least_tokens",
        "The heuristic that the policy is a residual of. An untrained policy is exactly this heuristic.",
        choices=["least_tokens", "least_outstanding", "least_kv", "shortest_delay"],
    )


@dataclass
class RooflineFlags:
    """Flags of the roofline predictor beyond those of Vidur's base class."""

    replica_speed_factors: List[float] = flag(
        [1.0],
        "Speed of each replica relative to its device: 0.5 takes twice as long. One value per replica, or a "
        "pattern whose length divides the number of replicas and is repeated.",
        above=0,
    )


def check_scheduler(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags are out of range or do not fit the cluster."""
    validate(flags)
    num_long = getattr(flags, "num_long_replicas", None)
    if num_long is not None and num_long >= num_replicas:
        raise ValueError(
            f"{flag_name(type(flags), 'num_long_replicas')} must be smaller than the number of replicas "
            f"({num_replicas}), got {num_long}"
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
