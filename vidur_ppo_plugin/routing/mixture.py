"""Teachers by name and weight, as a flag gives them: `least_tokens:0.7,round_robin:0.3`."""

import difflib
import math

from vidur_ppo_plugin.flags import WarmStartFlags, flag_name

from .heuristics import TEACHERS


def parse_mixture(text: str) -> dict[str, float]:
    """Teachers and their shares, which add up to 1; a teacher without a weight has weight 1. ValueError if wrong."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, colon, number = (piece.strip() for piece in part.partition(":"))
        if name not in TEACHERS:
            close = difflib.get_close_matches(name, TEACHERS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"unknown teacher {name!r}{hint}: choose from {', '.join(TEACHERS)}")
        if name in weights:
            raise ValueError(f"teacher {name!r} is named twice")
        try:
            weights[name] = float(number) if colon else 1.0
        except ValueError:
            raise ValueError(f"the weight of {name} must be a number, got {number!r}") from None
        if not (math.isfinite(weights[name]) and weights[name] > 0):
            raise ValueError(f"the weight of {name} must be finite and > 0, got {number!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def teacher_shares(flags: WarmStartFlags) -> dict[str, float]:
    """Who demonstrates, with shares that add up to 1; none if nobody does. ValueError naming the flag."""
    try:
        return parse_mixture(flags.demonstrate_with) if flags.demonstrate_with else {}
    except ValueError as error:
        name = flag_name(type(flags), "demonstrate_with")
        raise ValueError(f"{name}={flags.demonstrate_with!r}: {error}") from None
