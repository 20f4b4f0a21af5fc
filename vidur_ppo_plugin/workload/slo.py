"""What counts as good service."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .requests import FloatArray


@dataclass(frozen=True)
class SLO:
    """What a request is entitled to: a first token in time, and a steady stream after it."""

    ttft_base_s: float = 1.0
    ttft_per_prompt_token_s: float = 0.001
    tbt_s: float = 0.1

    def is_met(self, prompt_tokens: FloatArray, ttft_s: FloatArray, tbt_s: FloatArray) -> NDArray[np.bool_]:
        """Whether each request kept both limits; one output token has no time between tokens (NaN)."""
        in_time = ttft_s <= self.ttft_base_s + self.ttft_per_prompt_token_s * prompt_tokens
        return in_time & ~(tbt_s > self.tbt_s)
