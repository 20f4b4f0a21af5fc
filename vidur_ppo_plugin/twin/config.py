"""Configuration of a twin: its cluster, replica scheduler and limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vidur_ppo_plugin.hardware import Roofline
from vidur_ppo_plugin.routing.delay_model import DelayModel

from .layout import FIXED_CHUNK, MAX_STAGES, ORCA, SARATHI, SCHEDULERS, Rules, placed
from .tables import BatchTimes


@dataclass(frozen=True, kw_only=True)
class TwinConfig:
    """A cluster of equal replicas that differ in speed only; `sim.twin_config.twin_config` makes it of Vidur's config.

    `max_batch_tokens`: the chunk size of sarathi and mnemosyne_fcfs_fixed_chunk, vllm's max_tokens_in_batch; orca has
    no such limit, its usual one is meant. `max_request_tokens`: the longest request, prompt and output, that the
    workload may have.
    """

    roofline: Roofline
    replica_scheduler: str
    speed_factors: Sequence[float]
    block_size: int
    num_blocks: int
    watermark_blocks: int
    batch_size_cap: int
    max_batch_tokens: int
    max_request_tokens: int
    #: Batch size that the memory of a replica allows if all requests are as long as the longest; orca goes by it.
    max_full_requests: int

    def __post_init__(self) -> None:
        """Refuse what the twin does not cover, by name."""
        if self.replica_scheduler not in SCHEDULERS:
            raise ValueError(
                f"replica_scheduler must be one of {', '.join(SCHEDULERS)} for the twin, got {self.replica_scheduler!r}"
            )
        stages = self.roofline.num_pipeline_stages
        if stages > MAX_STAGES:
            raise ValueError(f"num_pipeline_stages must be <= {MAX_STAGES} for the twin, got {stages}")
        if self.batch_size_cap < stages:
            raise ValueError(f"batch_size_cap must be >= num_pipeline_stages ({stages}), got {self.batch_size_cap}")
        for name in ("block_size", "num_blocks", "max_batch_tokens", "max_request_tokens", "max_full_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.speed_factors or min(self.speed_factors) <= 0:
            raise ValueError(f"speed_factors must be > 0, one for each replica, got {list(self.speed_factors)}")
        if self.rules.scheduler == ORCA and self.rules.reserved_blocks < 1:
            raise ValueError(
                f"max_request_tokens must be >= block_size ({self.block_size}) for orca, got {self.max_request_tokens}"
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.speed_factors)

    @cached_property
    def rules(self) -> Rules:
        """The numbers that the kernels go by."""
        scheduler = SCHEDULERS.index(self.replica_scheduler)
        stages = self.roofline.num_pipeline_stages
        batch_size = self.batch_size_cap // stages
        if scheduler == ORCA:
            batch_size = min(self.max_full_requests, self.batch_size_cap)
        rules = Rules(
            scheduler=scheduler,
            num_stages=stages,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            watermark_blocks=self.watermark_blocks,
            max_admitted=self.batch_size_cap,
            max_batch_size=batch_size,
            max_batch_tokens=self.max_batch_tokens,
            reserved_blocks=self.max_request_tokens // self.block_size,
            max_prompt_tokens=min(self.max_request_tokens, self.num_blocks * self.block_size),
            layers_per_stage=self.roofline.layers_per_stage,
            decode_launch_ms=self.roofline.decode_attention_ms(1, 0),
        )
        return placed(rules)

    @cached_property
    def times(self) -> BatchTimes:
        """The tables of batch times, which all twins of this config share and fill."""
        times = BatchTimes(self.roofline, self.speed_factors)
        # Chunked prefill bounds the batches. Those of the others grow with the prompts: there, as need arises.
        is_chunked = self.rules.scheduler in (SARATHI, FIXED_CHUNK)
        times.fill(self.batch_size_cap + (self.max_batch_tokens if is_chunked else 0))
        return times

    @cached_property
    def prefill_s_per_token(self) -> float:
        """What a prompt token costs on a replica of speed 1, in batches of the usual size."""
        return DelayModel.from_roofline(self.roofline, self.max_batch_tokens).prefill_s_per_token
