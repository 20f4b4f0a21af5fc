"""The workloads that we add to Vidur: lengths, arrivals, replay of a trace."""

from dataclasses import dataclass
from typing import Any

from .flag import flag, flag_name, require, validate

_SEED_HELP = "Seed of the requests; not touched by --seed."
_MOST = 1_000_000_000


@dataclass
class LengthFlags:
    """What both length generators have."""

    seed: int = flag(42, _SEED_HELP, low=0, high=_MOST)
    max_tokens: int = flag(
        32768,
        "Longest request, prompt and output together: outputs, and if need be prompts, are cut to it. Set it to the "
        "context length of the model.",
        low=2,
        high=10_000_000,
    )


@dataclass
class LognormalLengthFlags(LengthFlags):
    """Lognormal prompts and outputs; the defaults are those of chat (LMSYS-Chat-1M as in the Vidur paper, table 1)."""

    prompt_median: float = flag(417.0, "Median prompt, in tokens.", above=0, high=10_000_000)
    prompt_sigma: float = flag(
        1.09, "Standard deviation of the logarithm of prompts. Raise it for longer tails.", low=0, high=10
    )
    prompt_min: int = flag(10, "Shortest prompt: shorter ones count as this.", low=1, high=10_000_000)
    prompt_max: int = flag(4000, "Longest prompt: longer ones count as this.", low=1, high=10_000_000)
    output_median: float = flag(139.0, "Median output, in tokens.", above=0, high=10_000_000)
    output_sigma: float = flag(
        0.97, "Standard deviation of the logarithm of outputs. Raise it for longer tails.", low=0, high=10
    )
    output_min: int = flag(5, "Shortest output: shorter ones count as this.", low=1, high=10_000_000)
    output_max: int = flag(2000, "Longest output: longer ones count as this.", low=1, high=10_000_000)


@dataclass
class MixtureLengthFlags(LengthFlags):
    """A mixture of classes of requests."""

    components: str = flag(
        "0.97: lognormal(417, 1.09, 10, 4000) / lognormal(139, 0.97, 5, 2000); "
        "0.03: uniform(8000, 24000) / lognormal(139, 0.97, 5, 2000)",
        "Classes, each `WEIGHT: PROMPT / OUTPUT`, separated by `;`. PROMPT and OUTPUT are lognormal(median, sigma, "
        "low, high), uniform(low, high) or fixed(tokens). `WEIGHT: trace(FILE.csv)` draws pairs from a file.",
    )


@dataclass
class RenewalFlags:
    """Independent gamma-distributed gaps between arrivals, without the cap of Vidur's `poisson`."""

    seed: int = flag(42, _SEED_HELP, low=0, high=_MOST)
    qps: float = flag(10.0, "Arrivals per second.", above=0, high=1_000_000)
    cv: float = flag(
        1.0, "Coefficient of variation of the gaps: 1 is a Poisson process. Raise it for bursts.", above=0, high=100
    )


@dataclass
class ReplayFlags:
    """A window of a trace file (CSV with arrival times, prompt and output tokens)."""

    trace_file: str = flag("", "The trace: a CSV file with the columns of Vidur's or Azure's traces.")
    first_request: int = flag(0, "First request of the window, counted from 0; it arrives at time 0.", low=0)
    num_requests: int = flag(1000, "Requests in the window.", low=1)
    time_scale_factor: float = flag(
        1.0, "Gaps between arrivals are multiplied by this. Lower it for more load.", above=0, high=1_000_000
    )
    max_tokens: int = flag(
        32768, "Longest request, prompt and output together: outputs, and if need be prompts, are cut to it.", low=2
    )


def check_workload(flags: Any, num_replicas: int = 0) -> None:
    """ValueError naming the flag if flags of a workload are out of range or do not fit each other."""
    validate(flags)
    if isinstance(flags, LognormalLengthFlags):
        for side in ("prompt", "output"):
            low, high = getattr(flags, f"{side}_min"), getattr(flags, f"{side}_max")
            require(flags, low <= high, f"{side}_min", f"at most {side}_max ({high})")
    if isinstance(flags, ReplayFlags) and not flags.trace_file:
        raise ValueError(f"{flag_name(type(flags), 'trace_file')} must name a CSV file, got nothing")
