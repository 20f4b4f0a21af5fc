"""Times of a batch on one replica: what Vidur's profiles measure, computed from shapes and data sheets."""

from collections.abc import Sequence
from typing import NamedTuple

from .attention import AttentionTimer, PrefillLine
from .devices import DeviceSpec
from .elementwise import ElementwiseTimer
from .gemm import BYTES_PER_VALUE, GemmTimer
from .model import ModelShape
from .networks import NetworkSpec


class LayerTimes(NamedTuple):
    """Milliseconds of each operation of one layer, attention and communication left out."""

    attn_norm_ms: float
    attn_pre_proj_ms: float
    attn_rope_ms: float
    attn_kv_cache_save_ms: float
    attn_post_proj_ms: float
    mlp_norm_ms: float
    mlp_up_proj_ms: float
    mlp_act_ms: float
    mlp_down_proj_ms: float
    add_ms: float

    @property
    def block_ms(self) -> float:
        """What Vidur counts: every operation but the KV-cache save, added from left to right."""
        return (
            self.attn_norm_ms
            + self.attn_pre_proj_ms
            + self.attn_rope_ms
            + self.attn_post_proj_ms
            + self.mlp_norm_ms
            + self.mlp_up_proj_ms
            + self.mlp_act_ms
            + self.mlp_down_proj_ms
            + self.add_ms
        )


class _PrefillLines(dict[int, PrefillLine]):
    """Lines by chunk length, computed when first asked for (a plain `[]` keeps the hot loop in C)."""

    def __init__(self, attention: AttentionTimer) -> None:
        super().__init__()
        self._attention = attention

    def __missing__(self, chunk_tokens: int) -> PrefillLine:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
        line = self[chunk_tokens] = self._attention.prefill_line(chunk_tokens)
        return line


class Roofline:
    """Execution times of one model, split over devices of one kind.

    What depends on shapes only is computed once for each number of tokens (of requests, length of a chunk)
    and remembered; a batch then costs one pass over its requests.

    Contract of the arithmetic, for twins that must agree to the last bit: plain IEEE doubles, in the order in
    which the formulas stand in the docstrings of `GemmTimer`, `ElementwiseTimer`, `AttentionTimer` and of the
    methods here; sums run from left to right; token counts are used as they are (Vidur rounds them up to a
    multiple of 8 before it looks them up: tiles of 64 tokens make that superfluous here).
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceSpec,
        network: NetworkSpec,
        *,
        tensor_parallel_size: int = 1,
        num_pipeline_stages: int = 1,
        all_reduce_overhead_ms: float = 0.0,
    ) -> None:
        """`all_reduce_overhead_ms`: time of the host that each all-reduce over several workers costs on top."""
        _check_divides("tensor_parallel_size", tensor_parallel_size, "num_q_heads", model.num_q_heads)
        _check_divides("num_pipeline_stages", num_pipeline_stages, "num_layers", model.num_layers)
        self.model = model
        self.device = device
        self.network = network
        self.tensor_parallel_size = tensor_parallel_size
        self.num_pipeline_stages = num_pipeline_stages
        self.all_reduce_overhead_ms = all_reduce_overhead_ms if tensor_parallel_size > 1 else 0.0
        self.layers_per_stage = model.num_layers // num_pipeline_stages
        # Shares of one tensor-parallel worker; KV heads are replicated when there are fewer than workers.
        self._num_q_heads = model.num_q_heads // tensor_parallel_size
        self._num_kv_heads = -(-model.num_kv_heads // tensor_parallel_size)
        # Where the split is uneven, the largest share decides.
        self._mlp_hidden_dim = -(-model.mlp_hidden_dim // tensor_parallel_size)
        self._gemm = GemmTimer(device)
        self._elementwise = ElementwiseTimer(device)
        self._attention = AttentionTimer(
            device, num_q_heads=self._num_q_heads, num_kv_heads=self._num_kv_heads, head_dim=model.head_dim
        )
        self._decode_launch_ms = self._attention.decode_launch_ms
        self._layer_times: dict[int, LayerTimes] = {}
        self._decode_ms_per_token: dict[int, float] = {}
        self._prefill_lines = _PrefillLines(self._attention)
        self._all_reduce_ms: dict[int, float] = {}
        self._send_recv_ms: dict[int, float] = {}
        # By chunk size: time of the first 0, 1, 2, ... full chunks of a prompt.
        self._full_chunks_ms: dict[int, list[float]] = {}

    def layer_times(self, num_tokens: int) -> LayerTimes:
        """Times of one layer for a batch of num_tokens (new tokens of all requests together)."""
        times = self._layer_times.get(num_tokens)
        if times is None:
            _check_at_least_one("num_tokens", num_tokens)
            times = self._layer_times[num_tokens] = self._compute_layer_times(num_tokens)
        return times

    def _compute_layer_times(self, tokens: int) -> LayerTimes:
        model, gemm, elementwise = self.model, self._gemm, self._elementwise
        hidden, head_dim = model.embedding_dim, model.head_dim
        q_dim, kv_dim = self._num_q_heads * head_dim, self._num_kv_heads * head_dim
        mlp_dim = self._mlp_hidden_dim
        up_dim = 2 * mlp_dim if model.use_gated_mlp else mlp_dim
        norm_ms = elementwise.norm_ms(tokens, hidden)
        return LayerTimes(
            attn_norm_ms=norm_ms,
            attn_pre_proj_ms=gemm.time_ms(tokens, hidden, q_dim + 2 * kv_dim),
            attn_rope_ms=elementwise.row_kernel_ms(tokens, 2 * (q_dim + kv_dim)),
            attn_kv_cache_save_ms=elementwise.row_kernel_ms(tokens, 4 * kv_dim),
            attn_post_proj_ms=gemm.time_ms(tokens, q_dim, hidden),
            mlp_norm_ms=norm_ms if model.post_attn_norm else 0.0,
            mlp_up_proj_ms=gemm.time_ms(tokens, hidden, up_dim),
            mlp_act_ms=elementwise.row_kernel_ms(tokens, up_dim + mlp_dim),
            mlp_down_proj_ms=gemm.time_ms(tokens, mlp_dim, hidden),
            add_ms=elementwise.add_ms(tokens, hidden),
        )

    def decode_ms_per_token(self, num_requests: int) -> float:
        """Slope of `decode_attention_ms` in the context, for a batch with num_requests decodes."""
        slope_ms = self._decode_ms_per_token.get(num_requests)
        if slope_ms is None:
            _check_at_least_one("num_requests", num_requests)
            slope_ms = self._attention.decode_ms_per_token(num_requests)
            self._decode_ms_per_token[num_requests] = slope_ms
        return slope_ms

    def prefill_line(self, chunk_tokens: int) -> PrefillLine:
        """Coefficients of `prefill_attention_ms` for chunks of chunk_tokens."""
        return self._prefill_lines[chunk_tokens]

    def decode_attention_ms(self, num_requests: int, context_tokens: int) -> float:
        """Decode attention of one layer: `launch + context_tokens * decode_ms_per_token(num_requests)`.

        context_tokens is the sum over the decoding requests of the tokens in their KV caches.
        """
        if num_requests == 0:
            return 0.0
        return self._decode_launch_ms + context_tokens * self.decode_ms_per_token(num_requests)

    def prefill_attention_ms(self, chunk_tokens: int, cached_tokens: int) -> float:
        """Prefill attention of one layer and one request: `base + slope * cached`, on the line that applies.

        chunk_tokens new prompt tokens attend causally to themselves and to cached_tokens earlier ones.
        """
        split_from, base_ms, slope_ms, split_base_ms, split_slope_ms = self._prefill_lines[chunk_tokens]
        if cached_tokens < split_from:
            return base_ms + slope_ms * cached_tokens
        return split_base_ms + split_slope_ms * cached_tokens

    def attention_ms(self, q_tokens: Sequence[int], cached_tokens: Sequence[int]) -> tuple[float, float]:
        """Attention of one layer for a whole batch: (prefill, decode).

        Entries with one new token are decodes, as in Vidur. Prefill chunks run one after the other, in the
        order of the batch; decodes run as one kernel.
        """
        num_decodes = q_tokens.count(1)
        lines = self._prefill_lines
        prefill_ms = 0.0
        if num_decodes == 0:
            # Nothing but prompts: the same sum without the questions that a mixed batch needs.
            for (split_from, base_ms, slope_ms, split_base_ms, split_slope_ms), cached in zip(
                map(lines.__getitem__, q_tokens), cached_tokens, strict=True
            ):
                if cached < split_from:
                    prefill_ms += base_ms + slope_ms * cached
                else:
                    prefill_ms += split_base_ms + split_slope_ms * cached
            return prefill_ms, 0.0
        context_tokens = sum(cached_tokens)
        if num_decodes != len(q_tokens):
            for chunk_tokens, cached in zip(q_tokens, cached_tokens, strict=True):
                if chunk_tokens != 1:
                    # As in prefill_attention_ms; a call for each request would double the cost.
                    split_from, base_ms, slope_ms, split_base_ms, split_slope_ms = lines[chunk_tokens]
                    if cached < split_from:
                        prefill_ms += base_ms + slope_ms * cached
                    else:
                        prefill_ms += split_base_ms + split_slope_ms * cached
                    context_tokens -= cached
        return prefill_ms, self.decode_attention_ms(num_decodes, context_tokens)

    def all_reduce_ms(self, num_tokens: int) -> float:
        """One all-reduce of the hidden states of num_tokens over the tensor-parallel group."""
        time_ms = self._all_reduce_ms.get(num_tokens)
        if time_ms is None:
            _check_at_least_one("num_tokens", num_tokens)
            size_bytes = num_tokens * self.model.embedding_dim * BYTES_PER_VALUE
            time_ms = self.network.all_reduce_ms(size_bytes, self.tensor_parallel_size)
            time_ms += self.all_reduce_overhead_ms
            self._all_reduce_ms[num_tokens] = time_ms
        return time_ms

    def send_recv_ms(self, num_tokens: int) -> float:
        """Transfer of the hidden states of num_tokens to the next pipeline stage.

        As in Vidur, all transfers of a replica cross nodes if the replica does not fit into one.
        """
        time_ms = self._send_recv_ms.get(num_tokens)
        if time_ms is None:
            _check_at_least_one("num_tokens", num_tokens)
            size_bytes = num_tokens * self.model.embedding_dim * BYTES_PER_VALUE
            num_devices = self.tensor_parallel_size * self.num_pipeline_stages
            same_node = num_devices <= self.network.num_devices_per_node
            time_ms = self.network.send_recv_ms(size_bytes, same_node=same_node)
            self._send_recv_ms[num_tokens] = time_ms
        return time_ms

    def stage_time_ms(self, q_tokens: Sequence[int], cached_tokens: Sequence[int], *, is_last_stage: bool) -> float:
        """Time of a batch on one pipeline stage, the sum that Vidur's `ExecutionTime.model_time` makes.

        `layers_per_stage * (block + prefill + decode + 2 * all_reduce)`, plus the transfer to the next stage
        unless this one is the last. Vidur leaves the KV-cache save out and counts one residual sum.
        """
        num_tokens = sum(q_tokens)
        prefill_ms, decode_ms = self.attention_ms(q_tokens, cached_tokens)
        layer_ms = self.layer_times(num_tokens).block_ms + prefill_ms + decode_ms
        layer_ms += 2.0 * self.all_reduce_ms(num_tokens)
        stage_ms = self.layers_per_stage * layer_ms
        return stage_ms if is_last_stage else stage_ms + self.send_recv_ms(num_tokens)

    def prefill_time_s(self, prompt_tokens: int, chunk_size: int) -> float:
        """Seconds to prefill a prompt alone, in chunks of chunk_size, through every pipeline stage.

        Constant time once a prompt of that many chunks has been seen.
        """
        _check_at_least_one("prompt_tokens", prompt_tokens)
        _check_at_least_one("chunk_size", chunk_size)
        num_full_chunks, last_tokens = divmod(prompt_tokens, chunk_size)
        full_ms = self._full_chunks_ms.setdefault(chunk_size, [0.0])
        while len(full_ms) <= num_full_chunks:
            cached_tokens = (len(full_ms) - 1) * chunk_size
            full_ms.append(full_ms[-1] + self._chunk_ms(chunk_size, cached_tokens))
        time_ms = full_ms[num_full_chunks]
        if last_tokens:
            time_ms += self._chunk_ms(last_tokens, num_full_chunks * chunk_size)
        return time_ms * 1e-3

    def _chunk_ms(self, chunk_tokens: int, cached_tokens: int) -> float:
        """One prefill chunk, alone, through all stages."""
        if chunk_tokens == 1:
            attention_ms = self.decode_attention_ms(1, cached_tokens)
        else:
            attention_ms = self.prefill_attention_ms(chunk_tokens, cached_tokens)
        layer_ms = self.layer_times(chunk_tokens).block_ms + attention_ms
        layer_ms += 2.0 * self.all_reduce_ms(chunk_tokens)
        time_ms = self.model.num_layers * layer_ms
        if self.num_pipeline_stages > 1:
            time_ms += (self.num_pipeline_stages - 1) * self.send_recv_ms(chunk_tokens)
        return time_ms


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _check_divides(name: str, value: int, of_name: str, of_value: int) -> None:
    if value < 1 or of_value % value:
        raise ValueError(f"{name} must be >= 1 and divide {of_name} ({of_value}), got {value}")
