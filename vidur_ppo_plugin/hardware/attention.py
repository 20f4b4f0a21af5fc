"""Times of the attention kernels, reduced to straight lines in the number of cached tokens.

An SM holds a fixed number of thread blocks at once, so both kernels run in waves, as matrix products do.
What depends on the batch size, or on the length of a chunk, is worked out once; what is left for each batch
is `a + b * tokens`.
"""

from typing import NamedTuple

from .devices import DeviceSpec
from .gemm import BYTES_PER_VALUE

# Constants of the FlashInfer kernels that Vidur's profiles were measured with, seen as steps in
# a100_llama-3-8b_attention_sample.csv: at 324 and 648 (request, KV head) pairs = 3 a SM when decoding,
# and at 216 query tiles = 2 a SM in prefill.
_DECODE_BLOCKS_PER_SM = 3
_PREFILL_BLOCKS_PER_SM = 2
# Rows of a query tile; the queries that share a KV head are packed into the same tile.
_PREFILL_TILE_ROWS = 128
# Least time of a last, partly filled wave of decode blocks, in units of the time that one block takes if
# every SM reads one: a block alone on its SM cannot use the bandwidth that idle SMs leave. Calibrated on the
# same file.
_DECODE_TAIL_WAVES = 1.38
_INFINITY = float("inf")


class PrefillLine(NamedTuple):
    """Time of a prefill chunk: the lesser of two lines in the number of cached tokens.

    The second line is the kernel that splits the keys over idle SMs. It is the lesser one from
    `split_from_tokens` cached tokens on, where the lines cross (infinity if no SMs are idle).
    """

    split_from_tokens: float
    base_ms: float
    ms_per_cached_token: float
    split_base_ms: float
    split_ms_per_cached_token: float


class AttentionTimer:
    """Attention times of one tensor-parallel worker: `num_q_heads` and `num_kv_heads` are its own share."""

    def __init__(self, device: DeviceSpec, *, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_sms = device.num_sms
        self._num_kv_heads = num_kv_heads
        self._queries_per_kv_head = num_q_heads // num_kv_heads
        self.decode_launch_ms = device.decode_launch_us * 1e-3
        sm_bytes_per_ms = device.memory_bandwidth_gb_per_s * 1e6 * device.decode_memory_efficiency / device.num_sms
        # One SM reads the key and the value of one token and head.
        self._sm_ms_per_kv_token = 2 * BYTES_PER_VALUE * head_dim / sm_bytes_per_ms
        self._prefill_launch_ms = device.prefill_launch_us * 1e-3
        self._prefill_split_launch_ms = device.prefill_split_launch_us * 1e-3
        sm_flop_per_ms = device.tensor_tflops * 1e9 * device.prefill_tensor_efficiency / device.num_sms
        # An SM works on its tiles side by side: two products (QK and PV), 2 FLOPs for each value and key.
        self._wave_ms_per_key = _PREFILL_BLOCKS_PER_SM * 4.0 * _PREFILL_TILE_ROWS * head_dim / sm_flop_per_ms

    def decode_ms_per_token(self, num_requests: int) -> float:
        """Time for each token of the summed context of num_requests decodes.

        Contract::

            blocks = num_requests * kv_heads;  full = (blocks - 1) // (3 * sms)
            rest   = blocks - full * 3 * sms
            waves  = 3 * full + (max(rest / sms, 1.38) if blocks > sms else rest / sms)
            result = waves * sm_ms_per_kv_token / num_requests

        Up to one block for each SM the kernel splits contexts, so that all SMs read the same amount.
        """
        sms = self._num_sms
        blocks = num_requests * self._num_kv_heads
        resident = _DECODE_BLOCKS_PER_SM * sms
        full = (blocks - 1) // resident
        last_waves = (blocks - full * resident) / sms
        if blocks > sms:
            last_waves = max(last_waves, _DECODE_TAIL_WAVES)
        return (_DECODE_BLOCKS_PER_SM * full + last_waves) * self._sm_ms_per_kv_token / num_requests

    def prefill_line(self, chunk_tokens: int) -> PrefillLine:
        """The two lines of a chunk of chunk_tokens prompt tokens.

        Tiles start with the last rows of the chunk, which attend to most keys; so wave number j handles rows
        that see at most chunk * (1 - j * resident / tiles) of the chunk's own keys. Summed over the waves,
        this gives `own_keys`. Contract::

            tiles    = ceil(chunk * queries_per_kv_head / 128) * kv_heads;  resident = 2 * sms
            waves    = ceil(tiles / resident);  splits = resident // tiles
            own_keys = chunk * (waves - resident / tiles * waves * (waves - 1) / 2)
            line     = launch + own_keys * wave_ms + waves * wave_ms * cached
            split    = split_launch + chunk * (wave_ms / splits) + wave_ms / splits * cached   (if splits > 1)
            from     = max(0, (split_base - base) / (slope - split_slope))
        """
        resident = _PREFILL_BLOCKS_PER_SM * self._num_sms
        tiles = -(-chunk_tokens * self._queries_per_kv_head // _PREFILL_TILE_ROWS) * self._num_kv_heads
        waves = -(-tiles // resident)
        splits = resident // tiles
        own_keys = chunk_tokens * (waves - resident / tiles * waves * (waves - 1) / 2)
        base_ms = self._prefill_launch_ms + own_keys * self._wave_ms_per_key
        slope_ms = waves * self._wave_ms_per_key
        if splits < 2:
            return PrefillLine(_INFINITY, base_ms, slope_ms, _INFINITY, 0.0)
        split_slope_ms = self._wave_ms_per_key / splits
        split_base_ms = self._prefill_split_launch_ms + chunk_tokens * split_slope_ms
        split_from_tokens = max(0.0, (split_base_ms - base_ms) / (slope_ms - split_slope_ms))
        return PrefillLine(split_from_tokens, base_ms, slope_ms, split_base_ms, split_slope_ms)
