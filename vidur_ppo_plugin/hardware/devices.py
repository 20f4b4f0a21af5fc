"""GPUs: what the vendor promises, and which part of it the kernels of an LLM server reach.

Four numbers of each device come from its data sheet. The others say how close real kernels come to
them. They were calibrated against the measured profiles of Vidur (`benchmarks/roofline_accuracy.py`
reports what they achieve, `docs/roofline.md` how they were found). They belong to the device and
never to a model.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class DeviceSpec:
    """Constants of one GPU, for 16-bit operands.

    Data sheet:
        memory_bandwidth_gb_per_s: peak rate of the device memory.
        tensor_tflops: peak dense rate of the tensor cores (16-bit inputs, 32-bit sums).
        num_sms: number of streaming multiprocessors.

    Matrix products (`gemm.py`):
        gemm_memory_efficiency: part of the memory bandwidth that streaming weights reaches.
        gemm_tensor_efficiency: part of the tensor peak that a full wave of tiles reaches.
        l2_to_memory_bandwidth_ratio: bandwidth from the L2 cache to the SMs, in memory bandwidths.
        gemm_launch_us: fixed cost of one product (launch, pipeline fill, epilogue).

    Element-wise kernels (`elementwise.py`):
        elementwise_launch_us: fixed cost of one kernel.
        row_ns_per_value: one thread block handles a token's row; its time for one value moved.
        norm_memory_efficiency, row_memory_efficiency: part of the memory bandwidth that the norms, and
            that rope and the activation, reach.
        add_memory_efficiency: the same of the residual sum; above 1 where its operands are still in L2.

    Attention (`attention.py`):
        decode_launch_us, decode_memory_efficiency: fixed cost, and bandwidth of reading the KV cache.
        prefill_launch_us, prefill_tensor_efficiency: fixed cost, and part of the tensor peak reached.
        prefill_split_launch_us: fixed cost if keys are split over SMs and merged by a second kernel.
    """

    name: str
    memory_bandwidth_gb_per_s: float
    tensor_tflops: float
    num_sms: int
    gemm_memory_efficiency: float
    gemm_tensor_efficiency: float
    l2_to_memory_bandwidth_ratio: float
    gemm_launch_us: float
    elementwise_launch_us: float
    row_ns_per_value: float
    norm_memory_efficiency: float
    row_memory_efficiency: float
    add_memory_efficiency: float
    decode_launch_us: float
    decode_memory_efficiency: float
    prefill_launch_us: float
    prefill_split_launch_us: float
    prefill_tensor_efficiency: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not value > 0:
                raise ValueError(f"DeviceSpec.{field.name} must be > 0, got {value!r}")


_A100 = DeviceSpec(
    name="a100",
    memory_bandwidth_gb_per_s=2039.0,  # NVIDIA A100 80GB SXM data sheet
    tensor_tflops=312.0,  # same sheet: FP16 tensor core, dense
    num_sms=108,  # same sheet
    # Calibrated: `benchmarks/roofline_accuracy.py` on a100_llama-2-7b_linear and a100_llama-3-8b_linear.
    gemm_memory_efficiency=0.935,
    gemm_tensor_efficiency=0.764,
    l2_to_memory_bandwidth_ratio=3.55,
    gemm_launch_us=4.4,
    elementwise_launch_us=1.22,
    row_ns_per_value=0.37,
    norm_memory_efficiency=0.42,
    row_memory_efficiency=0.45,
    add_memory_efficiency=1.07,
    # Calibrated: the same benchmark on a100_llama-3-8b_attention_sample.
    decode_launch_us=17.8,
    decode_memory_efficiency=0.815,
    prefill_launch_us=6.3,
    prefill_split_launch_us=38.8,
    prefill_tensor_efficiency=0.59,
)

_H100 = DeviceSpec(
    name="h100",
    memory_bandwidth_gb_per_s=3350.0,  # NVIDIA H100 SXM data sheet
    tensor_tflops=989.4,  # same sheet: FP16 tensor core, dense (half of the sparse figure)
    num_sms=132,  # same sheet
    # Calibrated: `benchmarks/roofline_accuracy.py` on h100_llama-2-7b_linear.
    gemm_memory_efficiency=0.96,
    gemm_tensor_efficiency=0.796,
    l2_to_memory_bandwidth_ratio=4.77,
    gemm_launch_us=4.66,
    elementwise_launch_us=1.35,
    row_ns_per_value=0.23,
    norm_memory_efficiency=0.39,
    row_memory_efficiency=0.55,
    add_memory_efficiency=1.22,
    # No attention profile: fixed costs and the memory efficiency are the A100's.
    decode_launch_us=17.8,
    decode_memory_efficiency=0.815,
    prefill_launch_us=6.3,
    prefill_split_launch_us=38.8,
    # FlashAttention-2 kernels use 35 % of an H100 (Shah et al. 2024, FlashAttention-3, abstract).
    prefill_tensor_efficiency=0.35,
)

_A40 = DeviceSpec(
    name="a40",
    memory_bandwidth_gb_per_s=696.0,  # NVIDIA A40 data sheet
    tensor_tflops=149.7,  # same sheet: FP16 tensor core, dense
    num_sms=84,  # same sheet
    # Calibrated: `benchmarks/roofline_accuracy.py` on a40_llama-2-7b_linear.
    gemm_memory_efficiency=0.81,
    gemm_tensor_efficiency=0.789,
    l2_to_memory_bandwidth_ratio=5.18,
    gemm_launch_us=1.62,
    elementwise_launch_us=1.0,
    row_ns_per_value=0.24,
    norm_memory_efficiency=0.55,
    row_memory_efficiency=0.76,
    add_memory_efficiency=0.87,
    # No attention profile: the A100's, whose generation (Ampere) and kernels it shares.
    decode_launch_us=17.8,
    decode_memory_efficiency=0.815,
    prefill_launch_us=6.3,
    prefill_split_launch_us=38.8,
    prefill_tensor_efficiency=0.59,
)

_L40 = DeviceSpec(
    name="l40",
    memory_bandwidth_gb_per_s=864.0,  # NVIDIA L40 data sheet: GDDR6
    tensor_tflops=181.0,  # same sheet: FP16 tensor core, dense
    num_sms=142,  # same sheet: 18,176 CUDA cores, 128 an SM
    # No profile of this device: every efficiency and fixed cost is the A40's, its nearest relative.
    gemm_memory_efficiency=_A40.gemm_memory_efficiency,
    gemm_tensor_efficiency=_A40.gemm_tensor_efficiency,
    l2_to_memory_bandwidth_ratio=_A40.l2_to_memory_bandwidth_ratio,
    gemm_launch_us=_A40.gemm_launch_us,
    elementwise_launch_us=_A40.elementwise_launch_us,
    row_ns_per_value=_A40.row_ns_per_value,
    norm_memory_efficiency=_A40.norm_memory_efficiency,
    row_memory_efficiency=_A40.row_memory_efficiency,
    add_memory_efficiency=_A40.add_memory_efficiency,
    decode_launch_us=_A40.decode_launch_us,
    decode_memory_efficiency=_A40.decode_memory_efficiency,
    prefill_launch_us=_A40.prefill_launch_us,
    prefill_split_launch_us=_A40.prefill_split_launch_us,
    prefill_tensor_efficiency=_A40.prefill_tensor_efficiency,
)

DEVICES: dict[str, DeviceSpec] = {spec.name: spec for spec in (_A40, _A100, _H100, _L40)}
"""The devices Vidur knows, by its names."""
