"""How a flag is declared: a dataclass field with a help text and a range; and how its value is refused."""

import math
from dataclasses import field, fields
from typing import Any, List, Optional


def flag(
    default: Any,
    help_text: str,
    *,
    low: Optional[float] = None,
    high: Optional[float] = None,
    above: Optional[float] = None,
    choices: Optional[List[str]] = None,
    **more: Any,
) -> Any:
    """A dataclass field with a help text and a range: `low` and `high` are included, `above` is not.

    `more`: what else the field's metadata holds, for whoever reads the group.
    """
    metadata = {"help": help_text, "low": low, "high": high, "above": above, "choices": choices, **more}
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
        if value is None:
            continue  # an optional flag that is not set
        for single in value if isinstance(value, list) else [value]:
            problem = range_problem(single, item.metadata)
            if problem:
                raise ValueError(f"{flag_name(type(config), item.name)} must be {problem}, got {single!r}")


def require(flags: Any, is_right: bool, name: str, right: str) -> None:
    """Raise ValueError naming the flag `name` and its value unless it is right beside the other flags."""
    if not is_right:
        raise ValueError(f"{flag_name(type(flags), name)} must be {right}, got {getattr(flags, name)!r}")


def require_value(is_right: bool, name: str, value: object, right: str) -> None:
    """Raise ValueError naming an argument that is no flag, its value and what would be right."""
    if not is_right:
        raise ValueError(f"{name} must be {right}, got {value!r}")


def range_problem(value: Any, metadata: Any) -> Optional[str]:
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
