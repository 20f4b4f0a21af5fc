"""Lengths of requests: mixtures of classes of requests, each with its distribution of prompt and output tokens.

Written as a text, which is the same in a scenario file and as a flag of Vidur:

    0.97: lognormal(245, 1.0, 10, 4000) / lognormal(148, 0.6, 5, 2000); 0.03: uniform(8000, 24000) / fixed(100)

Classes are separated by `;`, a weight by `:`, prompt and output by `/`; a single class needs no weight. A class may
also be `trace(FILE.csv)`: pairs of lengths drawn from the rows of a file.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vidur_ppo_plugin.flags import LengthFlags, LognormalLengthFlags, MixtureLengthFlags, check_workload, flag_name

from .distributions import Distribution, IntArray, parse_distribution
from .requests import Requests
from .trace import read_lengths

# Requests are drawn in blocks of this size, whether one asks for them singly or by the million: that is what makes
# the requests of a seed the same in both cases, and the first requests of a long workload those of a short one.
BLOCK = 4096
# Keeps the stream of lengths apart from that of arrivals, for the same seed.
_STREAM = 1

_TRACE = re.compile(r"\s*trace\((.+)\)\s*")


@dataclass(frozen=True)
class LengthClass:
    """One class of requests."""

    prompt: Distribution
    output: Distribution

    def draw(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of `size` requests."""
        return self.prompt.draw(rng, size), self.output.draw(rng, size)


@dataclass(frozen=True)
class EmpiricalClass:
    """Pairs of lengths drawn from a file, with replacement."""

    requests: Requests

    def draw(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of `size` requests."""
        rows = rng.integers(0, len(self.requests), size)
        return self.requests.prompt_tokens[rows], self.requests.decode_tokens[rows]


class LengthSampler:
    """Draws prompt and output lengths of a mixture of classes."""

    def __init__(
        self, classes: list[LengthClass | EmpiricalClass], weights: list[float], *, max_tokens: int | None = None
    ) -> None:
        """Outputs, and if need be prompts, are cut so that a request has at most `max_tokens` in all."""
        if not classes or len(classes) != len(weights):
            raise ValueError(f"a mixture needs one weight for each class, got {len(weights)} for {len(classes)}")
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"the weights of a mixture must be finite and > 0, got {weights}")
        if max_tokens is not None and max_tokens < 2:
            raise ValueError(f"max_tokens must be >= 2 (a prompt and an output token), got {max_tokens}")
        self._classes = classes
        self._edges = np.cumsum(weights)[:-1] / sum(weights)
        self._max_tokens = max_tokens

    def blocks(self, seed: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Prompt and output tokens, BLOCK requests at a time, without end."""
        rng = np.random.default_rng([seed, _STREAM])
        while True:
            yield self._block(rng)

    def draw(self, seed: int, num_requests: int) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of the first `num_requests` requests of a seed."""
        num_blocks = -(-num_requests // BLOCK)
        blocks = [block for block, _ in zip(self.blocks(seed), range(num_blocks), strict=False)]
        prompts = np.concatenate([np.zeros(0, np.int64), *(prompt for prompt, _ in blocks)])
        outputs = np.concatenate([np.zeros(0, np.int64), *(output for _, output in blocks)])
        return prompts[:num_requests], outputs[:num_requests]

    def _block(self, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        chosen = np.searchsorted(self._edges, rng.random(BLOCK), side="right")
        prompts, outputs = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
        for index, one_class in enumerate(self._classes):
            members = chosen == index
            prompts[members], outputs[members] = one_class.draw(rng, int(members.sum()))
        if self._max_tokens is not None:
            np.minimum(prompts, self._max_tokens - 1, out=prompts)
            np.minimum(outputs, self._max_tokens - prompts, out=outputs)
        return prompts, outputs


def parse_lengths(text: str, *, max_tokens: int | None = None) -> LengthSampler:
    """The sampler that a text describes; ValueError names the part that is wrong."""
    parts = [part for part in text.split(";") if part.strip()]
    if not parts:
        raise ValueError("expected at least one class of requests, `PROMPT / OUTPUT`, got nothing")
    classes, weights = [], []
    for part in parts:
        weight, colon, description = part.partition(":")
        if not colon:
            if len(parts) > 1:
                raise ValueError(f"each of several classes needs a weight, `WEIGHT: PROMPT / OUTPUT`, got {part!r}")
            weight, description = "1", part
        try:
            weights.append(float(weight))
        except ValueError:
            raise ValueError(f"the weight of a class must be a number, got {weight.strip()!r}") from None
        classes.append(_parse_class(description))
    return LengthSampler(classes, weights, max_tokens=max_tokens)


def length_sampler(flags: LengthFlags) -> LengthSampler:
    """The sampler of a length generator's flags; ValueError names the flag."""
    check_workload(flags)
    if isinstance(flags, MixtureLengthFlags):
        name, text = "components", flags.components
    else:
        assert isinstance(flags, LognormalLengthFlags)
        name = "prompt_min"
        text = (
            f"lognormal({flags.prompt_median!r}, {flags.prompt_sigma!r}, {flags.prompt_min}, {flags.prompt_max}) / "
            f"lognormal({flags.output_median!r}, {flags.output_sigma!r}, {flags.output_min}, {flags.output_max})"
        )
    try:
        return parse_lengths(text, max_tokens=flags.max_tokens)
    except ValueError as error:
        raise ValueError(f"{flag_name(type(flags), name)}={text!r}: {error}") from None


def _parse_class(text: str) -> LengthClass | EmpiricalClass:
    trace = _TRACE.fullmatch(text)
    if trace is not None:
        return EmpiricalClass(read_lengths(Path(trace[1].strip())))
    prompt, slash, output = text.partition("/")
    if not slash:
        raise ValueError(f"a class is `PROMPT / OUTPUT` or trace(FILE.csv), got {text.strip()!r}")
    return LengthClass(parse_distribution(prompt), parse_distribution(output))
