"""Distributions of token counts, and how they are written: `lognormal(245, 1.0, 10, 4000)`, `uniform(8000, 24000)`.

`lognormal(median, sigma, low, high)` is cut off at low and high (whatever lies beyond counts as the bound),
`uniform(low, high)` includes both, `fixed(tokens)` is always the same.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

#: Longest request that a workload may contain; beyond, somebody has mistyped a number.
MOST_TOKENS = 10_000_000


@dataclass(frozen=True)
class Lognormal:
    """Rounded lognormal token counts, cut off at both ends."""

    median: float
    sigma: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range("lognormal", self.low, self.high)
        if not 0 < self.median <= MOST_TOKENS:
            raise ValueError(f"lognormal: the median must be > 0 and <= {MOST_TOKENS}, got {self.median:g}")
        if not 0 <= self.sigma <= 10:
            raise ValueError(f"lognormal: sigma must be >= 0 and <= 10, got {self.sigma:g}")

    def draw(self, rng: np.random.Generator, size: int) -> IntArray:
        """Independent token counts."""
        values = rng.lognormal(math.log(self.median), self.sigma, size)
        return np.clip(np.rint(values), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Uniform:
    """Token counts between two bounds, both included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range("uniform", self.low, self.high)

    def draw(self, rng: np.random.Generator, size: int) -> IntArray:
        """Independent token counts."""
        return rng.integers(int(self.low), int(self.high), size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class Fixed:
    """Always the same token count."""

    tokens: float

    def __post_init__(self) -> None:
        _check_range("fixed", self.tokens, self.tokens)

    def draw(self, rng: np.random.Generator, size: int) -> IntArray:
        """`size` times the fixed token count."""
        return np.full(size, int(self.tokens), dtype=np.int64)


Distribution = Lognormal | Uniform | Fixed

_KINDS: dict[str, tuple[type[Lognormal] | type[Uniform] | type[Fixed], str]] = {
    "lognormal": (Lognormal, "median, sigma, low, high"),
    "uniform": (Uniform, "low, high"),
    "fixed": (Fixed, "tokens"),
}
_CALL = re.compile(r"\s*([a-z_]+)\s*\(([^()]*)\)\s*")


def parse_distribution(text: str) -> Distribution:
    """The distribution that a text describes; ValueError says what is wrong with it."""
    match = _CALL.fullmatch(text)
    forms = " or ".join(f"{name}({parameters})" for name, (_, parameters) in _KINDS.items())
    if match is None or match[1] not in _KINDS:
        raise ValueError(f"expected {forms}, got {text.strip()!r}")
    kind, parameters = _KINDS[match[1]]
    parts = [part.strip() for part in match[2].split(",")] if match[2].strip() else []
    if len(parts) != parameters.count(",") + 1:
        raise ValueError(f"{match[1]} takes ({parameters}), got {text.strip()!r}")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise ValueError(f"{match[1]} takes numbers ({parameters}), got {text.strip()!r}") from None
    return kind(*numbers)


def _check_range(kind: str, low: float, high: float) -> None:
    if not (1 <= low <= high <= MOST_TOKENS and low == int(low) and high == int(high)):
        raise ValueError(
            f"{kind}: bounds must be whole numbers, 1 <= low <= high <= {MOST_TOKENS}, got {low:g} and {high:g}"
        )
