"""The requests of a run as arrays: what every scheduler of a comparison gets for a seed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """Requests in order of arrival."""

    arrived_at_s: FloatArray
    prompt_tokens: IntArray
    decode_tokens: IntArray

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def rate_qps(self) -> float:
        """Mean arrival rate."""
        return (len(self) - 1) / float(self.arrived_at_s[-1] - self.arrived_at_s[0])

    def window(
        self, first: int, num_requests: int, *, time_scale: float = 1.0, max_tokens: int | None = None
    ) -> "Requests":
        """Some requests in a row: the first arrives at time 0, gaps are stretched, lengths cut to `max_tokens`."""
        if first < 0 or num_requests < 1 or first + num_requests > len(self):
            raise ValueError(f"there are no requests {first} to {first + num_requests - 1} in a trace of {len(self)}")
        part = slice(first, first + num_requests)
        prompts, decodes = self.prompt_tokens[part], self.decode_tokens[part]
        if max_tokens is not None:
            prompts = np.minimum(prompts, max_tokens - 1)
            decodes = np.minimum(decodes, max_tokens - prompts)
        return Requests((self.arrived_at_s[part] - self.arrived_at_s[first]) * time_scale, prompts, decodes)
