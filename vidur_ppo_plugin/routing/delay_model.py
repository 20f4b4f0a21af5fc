"""Expected delay of a request on each replica: a linear model whose coefficients come from the roofline."""

from dataclasses import dataclass

from vidur_ppo_plugin.hardware import Roofline

# Where the roofline is linearised: a batch of this many decodes of this many tokens each. Decode iterations
# are memory-bound there, so the slope hardly depends on the choice.
_REFERENCE_REQUESTS = 32
_REFERENCE_CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class DelayModel:
    """What work costs in seconds on a replica of nominal speed.

    The time that a decode iteration takes in any case (reading the weights) is left out: all requests of the batch
    share it, so it says nothing about where the work should go. With it, a request would rather wait seconds for
    a fast replica than decode on a slow one; that made mean TTFT three times as long where speeds differ.
    """

    prefill_s_per_token: float
    iteration_s_per_request: float
    iteration_s_per_context_token: float

    @classmethod
    def from_roofline(cls, roofline: Roofline, chunk_size: int) -> "DelayModel":
        """Linearise the roofline for replicas that prefill in chunks of `chunk_size` tokens."""

        def iteration_s(num_requests: int, context_tokens: int) -> float:
            stage_ms = roofline.stage_time_ms([1] * num_requests, [context_tokens] * num_requests, is_last_stage=True)
            return stage_ms * roofline.num_pipeline_stages * 1e-3

        n, context = _REFERENCE_REQUESTS, _REFERENCE_CONTEXT_TOKENS
        per_request = (iteration_s(n, 0) - iteration_s(1, 0)) / (n - 1)
        per_token = (iteration_s(n, context) - iteration_s(n, 0)) / (n * context)
        # With several stages, chunks of different requests overlap: a stage's time is what a chunk costs others.
        prefill_s = roofline.prefill_time_s(chunk_size, chunk_size) / roofline.num_pipeline_stages
        return cls(
            prefill_s_per_token=prefill_s / chunk_size,
            iteration_s_per_request=max(0.0, per_request),
            iteration_s_per_context_token=per_token,
        )

    @property
    def constants(self) -> tuple[float, float, float]:
        """The constants that `heuristics.shortest_delay` takes."""
        return self.prefill_s_per_token, self.iteration_s_per_request, self.iteration_s_per_context_token
