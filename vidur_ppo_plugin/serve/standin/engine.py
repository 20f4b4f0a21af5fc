"""One replica of the twin in real time: requests come when they come, tokens are there when the twin has made them."""

import asyncio
import time

import numpy as np

from vidur_ppo_plugin.hardware.reference import BATCH_SIZE_CAP, BLOCK_SIZE, CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.twin import layout
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.twin import Twin

#: KV blocks of Llama-3-8B on 80 GB: those of the scenarios.
KV_BLOCKS = 30_208
# How often the twin is brought to the present while there is work. A decode iteration takes some ten milliseconds.
_TICK_S = 0.003


class Sequence:
    """A request inside the engine; whoever serves it waits for `changed`."""

    def __init__(self, prompt_tokens: int, output_tokens: int, arrived_at_s: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrived_at_s = arrived_at_s
        self.num_made = 0
        self.is_aborted = False
        self.first_token_at_s: float | None = None
        self.changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether all tokens are there."""
        return self.num_made >= self.output_tokens


class Engine:
    """A replica; times are seconds of the twin, which run `time_scale` times as fast as ours."""

    def __init__(
        self,
        *,
        speed: float = 1.0,
        time_scale: float = 1.0,
        kv_blocks: int = KV_BLOCKS,
        max_model_len: int = 32_768,
        max_num_seqs: int = BATCH_SIZE_CAP,
        device: str = "a100",
    ) -> None:
        self.kv_blocks = kv_blocks
        self.max_model_len = max_model_len
        self._time_scale = time_scale
        self._twin = Twin(
            TwinConfig(
                roofline=reference_roofline(device),
                replica_scheduler="sarathi",
                speed_factors=[speed],
                block_size=BLOCK_SIZE,
                num_blocks=kv_blocks,
                watermark_blocks=kv_blocks // 100,
                batch_size_cap=max_num_seqs,
                max_batch_tokens=CHUNK_SIZE,
                max_request_tokens=max_model_len,
                max_full_requests=max(1, kv_blocks * BLOCK_SIZE // max_model_len),
            )
        )
        self._warm_up()
        # Requests count from 1: cells that were never used read 0.
        self._twin.reset(first_index=1)
        self._sequences: dict[int, Sequence] = {}
        self._begun_s = time.monotonic()
        self._has_work = asyncio.Event()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0

    def _warm_up(self) -> None:
        """Compile before the first request."""
        self._twin.submit(0, 0.0, 10, 2)
        self._twin.drain()
        self._twin.completions()
        self._twin.reset()

    @property
    def now_s(self) -> float:
        """The present in the twin's time, in seconds."""
        return (time.monotonic() - self._begun_s) * self._time_scale

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return int(self._twin.state.cells[0, layout.ADMITTED])

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV blocks."""
        return int(self._twin.state.cells[0, layout.OUTSTANDING]) - self.num_running

    @property
    def kv_used_fraction(self) -> float:
        """Share of the KV cache in use."""
        return float(self._twin.state.cells[0, layout.KV_USED]) / self.kv_blocks

    def submit(self, prompt_tokens: int, output_tokens: int) -> tuple[int, Sequence]:
        """Take a request that arrives now; its number and its progress."""
        now_s = max(self.now_s, self._twin.now_s)
        number = self._twin.submit(0, now_s, prompt_tokens, output_tokens)
        sequence = self._sequences[number] = Sequence(prompt_tokens, output_tokens, now_s)
        self.num_prompt_tokens += prompt_tokens
        self._has_work.set()
        return number, sequence

    def abort(self, number: int) -> None:
        """End a request that nobody waits for any more: with the running iteration, or with its prefill."""
        sequence = self._sequences.pop(number, None)
        if sequence is None or sequence.is_finished:
            return
        sequence.is_aborted = True
        place = self._places().get(number)
        if place is not None:
            cells = self._twin.state.cells[0]
            soonest = max(cells[place + layout.PROCESSED], cells[place + layout.PREFILL]) + 1
            cells[place + layout.TOTAL] = min(cells[place + layout.TOTAL], soonest)

    def _places(self) -> dict[int, int]:
        """Where the cells of each request are; those of requests that are gone are there too, under their numbers."""
        first = self._twin.rules.requests
        ids = self._twin.state.cells[0, first + layout.ID :: layout.REQUEST_CELLS]
        return {int(number): first + layout.REQUEST_CELLS * k for k, number in enumerate(ids) if number}

    async def run(self) -> None:
        """Keep up with the time, for ever."""
        while True:
            if self._twin.num_in_flight == 0:
                self._has_work.clear()
                await self._has_work.wait()
            self.step()
            await asyncio.sleep(_TICK_S)

    def step(self) -> None:
        """Bring the twin to the present and hand out what it has made."""
        now_s = max(self.now_s, self._twin.now_s)
        self._twin.advance(now_s)
        completions = self._twin.completions()
        for number, first_s, restarts in zip(
            completions.index.tolist(),
            completions.first_token_at_s.tolist(),
            completions.num_restarts.tolist(),
            strict=True,
        ):
            self.num_preemptions += restarts
            sequence = self._sequences.pop(number, None)
            if sequence is not None:
                sequence.first_token_at_s = first_s
                self._hand_out(sequence, sequence.output_tokens)
        if self._sequences:
            self._hand_out_progress()

    def _hand_out_progress(self) -> None:
        cells, first = self._twin.state.cells[0], self._twin.rules.requests
        step = layout.REQUEST_CELLS
        ids, prompts = cells[first + layout.ID :: step], cells[first + layout.PROMPT :: step]
        made = cells[first + layout.PROCESSED :: step] - prompts
        for index in np.flatnonzero((made > 0) & (ids > 0)).tolist():
            sequence = self._sequences.get(int(ids[index]))
            if sequence is not None:
                if sequence.first_token_at_s is None:
                    place = first + step * index
                    sequence.first_token_at_s = float(self._twin.state.floats[0, place + layout.FIRST_TOKEN])
                self._hand_out(sequence, min(int(made[index]), sequence.output_tokens - 1))

    def _hand_out(self, sequence: Sequence, num_made: int) -> None:
        # After a preemption the twin counts from the start again; what was sent stays sent.
        if num_made > sequence.num_made:
            self.num_generated_tokens += num_made - sequence.num_made
            sequence.num_made = num_made
            sequence.changed.set()
