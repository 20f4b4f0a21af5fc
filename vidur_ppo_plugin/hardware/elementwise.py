"""Times of the kernels that do little arithmetic: norms, rotary embedding, activation, residual sum."""

from .devices import DeviceSpec
from .gemm import BYTES_PER_VALUE


class ElementwiseTimer:
    """Times of element-wise kernels on one device.

    The norms, rope and the activation run one thread block a token. Few tokens leave most of the device idle,
    and the time is that of one block; many tokens are limited by the memory. Contract::

        row kernel = launch_ms + max(values * row_ms, tokens * values * ms_per_value)
        add        = launch_ms + tokens * values * ms_per_value

    `values` counts what one token's row reads and writes.
    """

    def __init__(self, device: DeviceSpec) -> None:
        ms_per_value = BYTES_PER_VALUE / (device.memory_bandwidth_gb_per_s * 1e6)
        self.launch_ms = device.elementwise_launch_us * 1e-3
        self.row_ms = device.row_ns_per_value * 1e-6
        self.norm_ms_per_value = ms_per_value / device.norm_memory_efficiency
        self.row_ms_per_value = ms_per_value / device.row_memory_efficiency
        self.add_ms_per_value = ms_per_value / device.add_memory_efficiency

    def norm_ms(self, tokens: int, embedding_dim: int) -> float:
        """Layer or RMS norm: reads and writes the hidden state."""
        values = 2 * embedding_dim
        return self.launch_ms + max(values * self.row_ms, tokens * values * self.norm_ms_per_value)

    def row_kernel_ms(self, tokens: int, values: int) -> float:
        """A kernel with one thread block a token, which moves `values` values (rope, activation, KV save)."""
        return self.launch_ms + max(values * self.row_ms, tokens * values * self.row_ms_per_value)

    def add_ms(self, tokens: int, embedding_dim: int) -> float:
        """Residual sum: reads two hidden states and writes one."""
        return self.launch_ms + tokens * (3 * embedding_dim) * self.add_ms_per_value
