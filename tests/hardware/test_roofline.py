"""Roofline: limits, monotonicity, sums and validation."""

from dataclasses import replace
from itertools import pairwise

import pytest

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, LayerTimes, ModelShape, Roofline

LLAMA_3_8B = ModelShape("llama-3-8b", 32, 32, 8, 4096, 14336)
LLAMA_2_7B = ModelShape("llama-2-7b", 32, 32, 32, 4096, 11008)
PHI_2 = ModelShape("phi-2", 32, 32, 32, 2560, 10240, use_gated_mlp=False, post_attn_norm=False)
MODELS = (LLAMA_3_8B, LLAMA_2_7B, PHI_2)
A100, DGX = DEVICES["a100"], NETWORKS["a100_dgx"]

Q_TOKENS = [1, 300, 1, 64, 1]
CACHED_TOKENS = [700, 0, 20, 512, 4000]


def roofline(model: ModelShape = LLAMA_3_8B, tp: int = 1, stages: int = 1) -> Roofline:
    return Roofline(model, A100, DGX, tensor_parallel_size=tp, num_pipeline_stages=stages)


@pytest.mark.parametrize("network", sorted(NETWORKS))
@pytest.mark.parametrize("device", sorted(DEVICES))
def test_every_device_and_network_gives_positive_finite_times(device: str, network: str) -> None:
    for model in MODELS:
        line = Roofline(model, DEVICES[device], NETWORKS[network], tensor_parallel_size=4, num_pipeline_stages=2)
        time_ms = line.stage_time_ms(Q_TOKENS, CACHED_TOKENS, is_last_stage=False)
        assert 0.5 < time_ms < 1000.0


def test_known_devices() -> None:
    assert set(DEVICES) == {"a40", "a100", "h100", "l40"}
    with pytest.raises(ValueError, match=r"DeviceSpec\.tensor_tflops must be > 0, got -1"):
        replace(A100, tensor_tflops=-1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_layer_operations_never_fall_with_tokens(model: ModelShape, tp: int) -> None:
    line = roofline(model, tp)
    times = [line.layer_times(tokens) for tokens in range(1, 1500, 7)]
    for earlier, later in pairwise(times):
        assert all(b >= a for a, b in zip(earlier, later, strict=True))
    assert times[-1].block_ms > 2 * times[0].block_ms


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 64, 200, 1024, 4096])
def test_more_workers_never_make_a_layer_slower(model: ModelShape, tokens: int) -> None:
    blocks_ms = [roofline(model, tp).layer_times(tokens).block_ms for tp in (1, 2, 4, 8)]
    assert blocks_ms == sorted(blocks_ms, reverse=True)
    assert blocks_ms[3] < 0.6 * blocks_ms[0]


def test_work_of_a_worker_is_its_share() -> None:
    """At 4,096 tokens the MLP is bound by FLOPs: a quarter of it takes about a quarter of the time."""
    whole, quarter = (roofline(tp=tp).layer_times(4096) for tp in (1, 4))
    assert quarter.mlp_up_proj_ms == pytest.approx(whole.mlp_up_proj_ms / 4, rel=0.1)
    assert quarter.attn_norm_ms == whole.attn_norm_ms


def test_models_without_second_norm_or_gate() -> None:
    times = roofline(PHI_2).layer_times(2048)
    gated = roofline(replace(PHI_2, use_gated_mlp=True, post_attn_norm=True)).layer_times(2048)
    assert times.mlp_norm_ms == 0.0
    assert gated.mlp_norm_ms == gated.attn_norm_ms > 0.0
    assert gated.mlp_up_proj_ms == pytest.approx(2 * times.mlp_up_proj_ms, rel=0.1)
    assert gated.mlp_down_proj_ms == times.mlp_down_proj_ms


def test_decode_attention_reads_the_kv_cache_at_memory_speed() -> None:
    """648 pairs of request and KV head are two full waves: no tail."""
    context_tokens = 81 * 8000
    rate_gb_per_s = A100.memory_bandwidth_gb_per_s * A100.decode_memory_efficiency
    read_ms = context_tokens * 8 * 128 * 2 * 2 / (rate_gb_per_s * 1e6)
    expected_ms = A100.decode_launch_us * 1e-3 + read_ms
    assert roofline().decode_attention_ms(81, context_tokens) == pytest.approx(expected_ms, rel=1e-12)


def test_decode_attention_is_a_line_in_the_context() -> None:
    line = roofline(tp=2)
    for requests in (1, 7, 40, 200):
        first, second, third = (line.decode_attention_ms(requests, context) for context in (0, 5000, 10000))
        assert first < second < third
        assert third - second == pytest.approx(second - first, rel=1e-9)
    assert line.decode_attention_ms(0, 0) == 0.0


def test_a_partly_filled_decode_wave_costs_extra() -> None:
    """40 requests x 8 KV heads fit in one wave of 3 x 108 blocks; 41 do not."""
    line = roofline()
    assert line.decode_attention_ms(41, 41 * 8000) > 1.3 * line.decode_attention_ms(40, 40 * 8000)


def test_prefill_attention_approaches_the_tensor_rate() -> None:
    """A long chunk after a long context: 4 FLOPs for each query, key and head value."""
    chunk, cached = 27 * 128, 10**6
    flop = 4.0 * 32 * 128 * chunk * (cached + chunk / 2)
    rate_tflops = flop / roofline().prefill_attention_ms(chunk, cached) / 1e9
    # 864 tiles fill four waves of 216 exactly.
    assert rate_tflops == pytest.approx(312 * A100.prefill_tensor_efficiency, rel=0.01)


@pytest.mark.parametrize("tp", [1, 4])
def test_prefill_attention_grows_with_chunk_and_context(tp: int) -> None:
    line = roofline(tp=tp)
    by_chunk = [line.prefill_attention_ms(chunk, 2000) for chunk in range(2, 4097, 6)]
    by_context = [line.prefill_attention_ms(320, cached) for cached in range(0, 16000, 100)]
    assert by_chunk == sorted(by_chunk)
    assert by_context == sorted(by_context)
    assert by_context[-1] > 3 * by_context[0]


def test_splitting_keys_pays_for_short_chunks_after_long_contexts_only() -> None:
    line = roofline()
    split_from, base, slope, split_base, split_slope = line.prefill_line(64)
    assert base + slope * split_from == pytest.approx(split_base + split_slope * split_from)
    assert 0 < split_from < 8000
    assert line.prefill_attention_ms(64, 0) == base < split_base
    assert line.prefill_attention_ms(64, 8000) == split_base + split_slope * 8000 < base + slope * 8000


def test_attention_of_a_batch_is_the_sum_of_its_parts() -> None:
    line = roofline(tp=2)
    prefill_ms, decode_ms = line.attention_ms(Q_TOKENS, CACHED_TOKENS)
    assert prefill_ms == line.prefill_attention_ms(300, 0) + line.prefill_attention_ms(64, 512)
    assert decode_ms == line.decode_attention_ms(3, 4720)
    assert line.attention_ms([1, 1], [10, 20]) == (0.0, line.decode_attention_ms(2, 30))
    assert line.attention_ms((64,), (0,)) == (line.prefill_attention_ms(64, 0), 0.0)


def test_communication() -> None:
    assert roofline(tp=1).all_reduce_ms(100) == 0.0
    assert roofline(tp=4).all_reduce_ms(100) == DGX.all_reduce_ms(100 * 4096 * 2, 4)
    assert roofline(tp=2, stages=4).send_recv_ms(100) == DGX.send_recv_ms(100 * 4096 * 2, same_node=True)
    # 4 x 4 devices are two nodes.
    assert roofline(tp=4, stages=4).send_recv_ms(100) == DGX.send_recv_ms(100 * 4096 * 2, same_node=False)


def test_block_leaves_out_the_cache_save_and_nothing_else() -> None:
    times = LayerTimes(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
    assert times.block_ms == 1023.0 - 8.0


@pytest.mark.parametrize(("tp", "stages"), [(1, 1), (4, 2)])
def test_stage_time_is_the_sum_that_vidur_makes(tp: int, stages: int) -> None:
    line = roofline(tp=tp, stages=stages)
    tokens = sum(Q_TOKENS)
    times = line.layer_times(tokens)
    operations_ms = sum(times) - times.attn_kv_cache_save_ms
    attention_ms = sum(line.attention_ms(Q_TOKENS, CACHED_TOKENS))
    expected_ms = 32 / stages * (operations_ms + attention_ms + 2 * line.all_reduce_ms(tokens))
    last_ms = line.stage_time_ms(Q_TOKENS, CACHED_TOKENS, is_last_stage=True)
    first_ms = line.stage_time_ms(Q_TOKENS, CACHED_TOKENS, is_last_stage=False)
    assert last_ms == pytest.approx(expected_ms, rel=1e-12)
    assert first_ms - last_ms == pytest.approx(line.send_recv_ms(tokens), rel=1e-6)


@pytest.mark.parametrize(("prompt", "chunk"), [(1, 512), (500, 512), (512, 512), (1500, 512), (1025, 512)])
def test_prefill_time_is_the_sum_of_its_chunks(prompt: int, chunk: int) -> None:
    line = roofline(tp=2, stages=2)
    expected_ms = 0.0
    for start in range(0, prompt, chunk):
        tokens = [min(chunk, prompt - start)]
        expected_ms += line.stage_time_ms(tokens, [start], is_last_stage=False)
        expected_ms += line.stage_time_ms(tokens, [start], is_last_stage=True)
    assert line.prefill_time_s(prompt, chunk) == pytest.approx(expected_ms * 1e-3, rel=1e-12)
    assert line.prefill_time_s(prompt, chunk) == line.prefill_time_s(prompt, chunk)


@pytest.mark.parametrize(
    ("tp", "stages", "message"),
    [
        (3, 1, r"tensor_parallel_size must be >= 1 and divide num_q_heads \(32\), got 3"),
        (0, 1, r"tensor_parallel_size must be >= 1 .*got 0"),
        (1, 5, r"num_pipeline_stages must be >= 1 and divide num_layers \(32\), got 5"),
        (1, -1, r"num_pipeline_stages must be >= 1 .*got -1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tp: int, stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roofline(tp=tp, stages=stages)


def test_an_uneven_split_of_the_mlp_takes_as_long_as_its_largest_share() -> None:
    """Vidur allows it (InternLM-20B with five workers)."""
    uneven = roofline(replace(LLAMA_3_8B, mlp_hidden_dim=14335), tp=2)
    assert uneven.layer_times(64) == roofline(replace(LLAMA_3_8B, mlp_hidden_dim=14336), tp=2).layer_times(64)


def test_the_overhead_of_an_all_reduce_counts_only_where_there_is_one() -> None:
    with_overhead = {
        tp: Roofline(LLAMA_3_8B, A100, DGX, tensor_parallel_size=tp, all_reduce_overhead_ms=0.5) for tp in (1, 2)
    }
    assert with_overhead[1].all_reduce_ms(64) == 0.0
    assert with_overhead[2].all_reduce_ms(64) == roofline(tp=2).all_reduce_ms(64) + 0.5


def test_counts_below_one_are_refused() -> None:
    line = roofline()
    with pytest.raises(ValueError, match=r"num_tokens must be >= 1, got 0"):
        line.layer_times(0)
    with pytest.raises(ValueError, match=r"chunk_tokens must be >= 1, got 0"):
        line.attention_ms([0], [5])
    with pytest.raises(ValueError, match=r"num_requests must be >= 1, got -2"):
        line.decode_attention_ms(-2, 5)
    with pytest.raises(ValueError, match=r"prompt_tokens must be >= 1, got 0"):
        line.prefill_time_s(0, 512)
    with pytest.raises(ValueError, match=r"chunk_size must be >= 1, got 0"):
        line.prefill_time_s(10, 0)
    with pytest.raises(ValueError, match="shorter"):
        line.attention_ms([64, 64], [0])
