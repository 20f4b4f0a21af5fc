"""Our workloads as Vidur knows them: thin classes around `workload`, which draws the same requests without Vidur."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vidur.entities import Request
from vidur.request_generator.base_request_generator import BaseRequestGenerator
from vidur.request_generator.base_request_interval_generator import BaseRequestIntervalGenerator
from vidur.request_generator.base_request_length_generator import BaseRequestLengthGenerator

from vidur_ppo_plugin.flags import check_workload, flag_name
from vidur_ppo_plugin.workload.arrivals import gaps
from vidur_ppo_plugin.workload.lengths import length_sampler
from vidur_ppo_plugin.workload.trace import read_trace


class SampledLengths(BaseRequestLengthGenerator):
    """`lognormal` and `mixture`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._next = self._one_by_one()

    def _one_by_one(self) -> Iterator[tuple[int, int]]:
        for prompts, outputs in length_sampler(self.config).blocks(self.config.seed):
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)

    def get_next_num_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request."""
        return next(self._next)


class RenewalIntervals(BaseRequestIntervalGenerator):
    """`renewal`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_workload(config)
        blocks = gaps(config.seed, qps=config.qps, cv=config.cv)
        self._next: Iterator[float] = (gap_s for block in blocks for gap_s in block.tolist())

    def get_next_inter_request_time(self) -> float:
        """Seconds until the next arrival."""
        return next(self._next)


class ReplayedRequests(BaseRequestGenerator):
    """`replay`."""

    def generate_requests(self) -> list[Any]:
        """The requests of the window, the first at time 0."""
        flags = self.config
        check_workload(flags)
        try:
            window = read_trace(Path(flags.trace_file)).window(
                flags.first_request,
                flags.num_requests,
                time_scale=flags.time_scale_factor,
                max_tokens=flags.max_tokens,
            )
        except ValueError as error:
            raise ValueError(f"{flag_name(type(flags), 'trace_file')}: {error}") from None
        columns = (window.arrived_at_s, window.prompt_tokens, window.decode_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Request(arrived_at, prompt_tokens, decode_tokens) for arrived_at, prompt_tokens, decode_tokens in rows]


GENERATORS: dict[str, Callable[[Any], Any]] = {
    "lognormal": SampledLengths,
    "mixture": SampledLengths,
    "renewal": RenewalIntervals,
    "replay": ReplayedRequests,
}
