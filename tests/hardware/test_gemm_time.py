"""Matrix products: the two limits of the roofline, and the steps in between."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import pytest

from vidur_ppo_plugin.hardware import DEVICES, GemmTimer

A100 = DEVICES["a100"]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_decode_product_takes_the_time_to_read_its_weights(name: str) -> None:
    device = replace(DEVICES[name], tensor_tflops=1e9, l2_to_memory_bandwidth_ratio=1e9)
    rate_gb_per_s = device.memory_bandwidth_gb_per_s * device.gemm_memory_efficiency
    weight_ms = 2 * 8192 * 28672 / (rate_gb_per_s * 1e6)
    assert GemmTimer(device).time_ms(1, 8192, 28672) == pytest.approx(
        weight_ms + device.gemm_launch_us * 1e-3, rel=1e-3
    )


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_real_decode_product_reaches_most_of_the_bandwidth(name: str) -> None:
    device = DEVICES[name]
    weight_bytes = 2 * 8192 * 57344
    reached_gb_per_s = weight_bytes / GemmTimer(device).time_ms(1, 8192, 57344) / 1e6
    assert 0.7 < reached_gb_per_s / device.memory_bandwidth_gb_per_s < 0.96


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_large_product_approaches_the_tensor_rate(name: str) -> None:
    device = DEVICES[name]
    flop = 2.0 * 65536 * 16384 * 16384
    rate_tflops = flop / GemmTimer(device).time_ms(65536, 16384, 16384) / 1e9
    limit_tflops = device.tensor_tflops * device.gemm_tensor_efficiency
    assert 0.95 * limit_tflops < rate_tflops < limit_tflops


def test_formula_of_one_full_wave() -> None:
    """108 tiles of 256 x 128 fill 108 SMs once: FLOPs over rate, added in squares to the memory time."""
    device = replace(A100, l2_to_memory_bandwidth_ratio=1e9)
    tokens, inputs, outputs = 256 * 12, 4096, 128 * 9
    flop_ms = 2.0 * tokens * inputs * outputs / (312e9 * device.gemm_tensor_efficiency)
    moved_bytes = 2 * (inputs * outputs + tokens * (inputs + outputs))
    memory_ms = moved_bytes / (2039e6 * device.gemm_memory_efficiency)
    expected_ms = device.gemm_launch_us * 1e-3 + sqrt(flop_ms**2 + memory_ms**2)
    assert GemmTimer(device).time_ms(tokens, inputs, outputs) == pytest.approx(expected_ms, rel=1e-12)


def test_time_is_flat_within_a_tile_and_steps_at_its_end() -> None:
    timer = GemmTimer(A100)
    within = timer.time_ms(128, 4096, 12288) / timer.time_ms(121, 4096, 12288)
    across = timer.time_ms(129, 4096, 12288) / timer.time_ms(128, 4096, 12288)
    assert within < 1.002
    assert across > 1.05


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 1536), (2560, 10240), (8192, 57344), (512, 4096)])
def test_time_never_falls_with_tokens(name: str, inputs: int, outputs: int) -> None:
    timer = GemmTimer(DEVICES[name])
    times = [timer.time_ms(tokens, inputs, outputs) for tokens in range(1, 2100, 3)]
    assert all(later > earlier for earlier, later in pairwise(times))
