"""Time of a matrix product: tiles handed to the SMs in waves, above a floor of memory traffic.

A library kernel cuts the output (tokens x outputs) into tiles and gives each SM one tile at a time. So the
time rises in steps: 96 tiles and 108 tiles take the same time on 108 SMs, 109 tiles take twice as long.
Splitting the inner dimension makes more, shorter tiles, at the price of partial sums that have to be merged.
The library picks the fastest combination; so does this model.
"""

from math import sqrt

from .devices import DeviceSpec

BYTES_PER_VALUE = 2
"""Weights, activations and the KV cache are 16-bit."""

# Tile sizes (tokens, outputs) that cuBLAS and CUTLASS offer for 16-bit products. Four of them describe the
# profiles as well as nine do.
_TILES = ((64, 64), (128, 64), (128, 128), (256, 128))
# Cuts of the inner dimension. Finer cuts change no error by 0.1 %.
_SPLITS = (1, 2, 4)
# Partial sums of a split product are 32-bit, written once and read once.
_PARTIAL_SUM_BYTES = 8


class GemmTimer:
    """Times of 16-bit matrix products on one device.

    Contract (a compiled twin repeats it in this order)::

        tiles = ceil(tokens / tile_tokens) * ceil(outputs / tile_outputs)
        tile  = max(tile_tokens * tile_outputs * flop_ms, (tile_tokens + tile_outputs) * l2_ms)
        wave  = ceil(tiles * split / num_sms) * tile * inputs / split
                [+ split * tokens * outputs * partial_ms if split > 1]
        time  = launch_ms + sqrt(memory * memory + least_wave * least_wave)

    where memory is the time to move weights, inputs and outputs once. The root of squares, not the larger of
    the two: near the ridge neither the memory nor the tensor cores are kept busy all the time.
    """

    def __init__(self, device: DeviceSpec) -> None:
        bandwidth_bytes_per_ms = device.memory_bandwidth_gb_per_s * 1e6
        self.num_sms = device.num_sms
        self.launch_ms = device.gemm_launch_us * 1e-3
        self.ms_per_byte = 1.0 / (bandwidth_bytes_per_ms * device.gemm_memory_efficiency)
        sm_flop_per_ms = device.tensor_tflops * 1e9 * device.gemm_tensor_efficiency / device.num_sms
        self.flop_ms = 2.0 / sm_flop_per_ms
        sm_l2_bytes_per_ms = bandwidth_bytes_per_ms * device.l2_to_memory_bandwidth_ratio / device.num_sms
        self.l2_ms = BYTES_PER_VALUE / sm_l2_bytes_per_ms
        self.partial_ms = _PARTIAL_SUM_BYTES / bandwidth_bytes_per_ms

    def time_ms(self, tokens: int, inputs: int, outputs: int) -> float:
        """Time of (tokens x inputs) times (inputs x outputs)."""
        moved_bytes = BYTES_PER_VALUE * (inputs * outputs + tokens * (inputs + outputs))
        memory_ms = moved_bytes * self.ms_per_byte
        wave_ms = self._least_wave_ms(tokens, inputs, outputs)
        return self.launch_ms + sqrt(memory_ms * memory_ms + wave_ms * wave_ms)

    def _least_wave_ms(self, tokens: int, inputs: int, outputs: int) -> float:
        """Time of the tiles alone, of the fastest tile size and split."""
        least_ms = float("inf")
        for tile_tokens, tile_outputs in _TILES:
            tiles = -(-tokens // tile_tokens) * -(-outputs // tile_outputs)
            tile_ms = max(tile_tokens * tile_outputs * self.flop_ms, (tile_tokens + tile_outputs) * self.l2_ms)
            for split in _SPLITS:
                wave_ms = -(-tiles * split // self.num_sms) * tile_ms * inputs / split
                if split > 1:
                    wave_ms += split * tokens * outputs * self.partial_ms
                if wave_ms < least_ms:
                    least_ms = wave_ms
        return least_ms
