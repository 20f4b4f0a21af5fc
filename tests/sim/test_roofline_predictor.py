"""The predictor understands every replica scheduler's batches, and adds up as Vidur does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulation import simulate

from vidur_ppo_plugin import _autoload

_autoload.install()

from vidur.config import BaseModelConfig, CacheConfig, ReplicaConfig  # noqa: E402
from vidur.config.device_sku_config import BaseDeviceSKUConfig  # noqa: E402
from vidur.config.node_sku_config import BaseNodeSKUConfig  # noqa: E402
from vidur.config.utils import get_all_subclasses  # noqa: E402
from vidur.entities import Batch, KVParallelBatch, Request  # noqa: E402
from vidur.execution_time_predictor import BaseExecutionTimePredictor  # noqa: E402
from vidur.types import ReplicaId  # noqa: E402

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS  # noqa: E402
from vidur_ppo_plugin.sim.config_types import RooflineExecutionTimePredictorConfig  # noqa: E402
from vidur_ppo_plugin.sim.roofline_predictor import RooflineExecutionTimePredictor  # noqa: E402

MODELS = sorted(
    subclass.get_name() for subclass in get_all_subclasses(BaseModelConfig) if hasattr(subclass, "num_layers")
)
DEVICE_NAMES = sorted(str(subclass.get_type()) for subclass in get_all_subclasses(BaseDeviceSKUConfig))
NODE_NAMES = sorted(str(subclass.get_type()) for subclass in get_all_subclasses(BaseNodeSKUConfig))


@pytest.fixture
def build(tmp_path: Path) -> Any:
    def predictor(speeds: list[float] | None = None, **replica: Any) -> RooflineExecutionTimePredictor:
        defaults = {
            "tensor_parallel_size": 1,
            "num_pipeline_stages": 1,
            "device": "a100",
            "network_device": "a100_dgx",
        }
        return RooflineExecutionTimePredictor(
            RooflineExecutionTimePredictorConfig(
                replica_speed_factors=speeds or [1.0], cache_dir=str(tmp_path / "cache")
            ),
            ReplicaConfig(**{**defaults, **replica}),
            CacheConfig(),
        )

    return predictor


def requests(count: int) -> list[Request]:
    return [Request(0.0, 2000, 100) for _ in range(count)]


def plain_batch(q_tokens: list[int], kv_tokens: list[int], replica: int = 0) -> Batch:
    return Batch(ReplicaId(replica), requests(len(q_tokens)), q_tokens, kv_tokens)


def test_vidurs_registry_and_abstract_class_know_it(build: Any) -> None:
    assert isinstance(build(), BaseExecutionTimePredictor)


def test_devices_and_networks_are_vidurs() -> None:
    assert set(DEVICES) == set(DEVICE_NAMES)
    assert set(NETWORKS) == set(NODE_NAMES)


@pytest.mark.parametrize("network", NODE_NAMES)
def test_devices_per_node_are_vidurs(network: str) -> None:
    node = BaseNodeSKUConfig.create_from_type_string(network)
    assert NETWORKS[network].num_devices_per_node == node.num_devices_per_node


@pytest.mark.parametrize("device", DEVICE_NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_device(build: Any, model: str, device: str) -> None:
    """One token more or one worker more never turns the world upside down."""
    times = []
    for tensor_parallel_size, stages in ((1, 1), (4, 1), (4, 4)):
        predictor = build(
            model_name=model, device=device, tensor_parallel_size=tensor_parallel_size, num_pipeline_stages=stages
        )
        decode = predictor.get_execution_time(plain_batch([1] * 8, [1000] * 8), 0).total_time
        prefill = predictor.get_execution_time(plain_batch([2048], [2048]), 0).total_time
        assert 0 < decode < prefill < 10
        times.append(prefill)
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize(("tensor_parallel_size", "stages"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_total_is_the_rooflines_stage_time(build: Any, tensor_parallel_size: int, stages: int) -> None:
    predictor = build(tensor_parallel_size=tensor_parallel_size, num_pipeline_stages=stages)
    batch = plain_batch([1, 1, 300, 1], [500, 700, 900, 1])
    cached = [499, 699, 600, 0]
    for stage in range(stages):
        expected_ms = predictor.roofline.stage_time_ms([1, 1, 300, 1], cached, is_last_stage=stage == stages - 1)
        assert predictor.get_execution_time(batch, stage).total_time == pytest.approx(expected_ms * 1e-3, rel=1e-12)


def test_all_decode_batches_take_the_same_path(build: Any) -> None:
    """A pure decode batch is timed from the sums that Vidur keeps; it must equal the general case."""
    predictor = build()
    expected_ms = predictor.roofline.stage_time_ms([1, 1, 1], [9, 99, 999], is_last_stage=True)
    total = predictor.get_execution_time(plain_batch([1, 1, 1], [10, 100, 1000]), 0).total_time
    assert total == pytest.approx(expected_ms * 1e-3, rel=1e-12)


def test_mnemosyne_counts_only_what_was_cached_before(build: Any) -> None:
    predictor = build()
    replica = ReplicaId(0)
    for q_tokens, cached in (([1, 1, 300], [499, 699, 600]), ([1, 1], [499, 699])):
        size = len(q_tokens)
        sub_batch = Batch(replica, requests(size), q_tokens, cached, [1] * size, [0] * size, 0)
        theirs = predictor.get_execution_time(KVParallelBatch(replica, {0: sub_batch}), 0).total_time
        others = plain_batch(q_tokens, [q + c for q, c in zip(q_tokens, cached, strict=True)])
        assert theirs == predictor.get_execution_time(others, 0).total_time


def test_orca_leaves_new_requests_out_of_kv_tokens(build: Any) -> None:
    predictor = build()
    orca = plain_batch([1, 1, 700, 900], [500, 600])
    others = plain_batch([1, 1, 700, 900], [500, 600, 700, 900])
    assert predictor.get_execution_time(orca, 0).total_time == predictor.get_execution_time(others, 0).total_time
    assert predictor.get_execution_time(orca, 0).attention_prefill_execution_time > 0


def test_a_kv_parallel_batch_takes_as_long_as_its_slowest_group(build: Any) -> None:
    predictor = build()
    replica = ReplicaId(0)
    members = requests(2)
    groups = {
        0: Batch(replica, members, [256, 1], [8192, 8192], [2, 2], [1, 1], 0),
        1: Batch(replica, members, [256, 1], [100, 100], [2, 2], [1, 1], 1),
    }
    whole = predictor.get_execution_time(KVParallelBatch(replica, groups), 0).total_time
    alone = [predictor.get_execution_time(group, 0).total_time for group in groups.values()]
    assert whole == alone[0] > alone[1]


def test_a_slow_replica_takes_longer_by_its_factor(build: Any) -> None:
    predictor = build(speeds=[1.0, 0.5, 4.0], tensor_parallel_size=2, num_pipeline_stages=2)
    q_tokens, kv_tokens = [1, 200], [50, 400]
    times = [
        predictor.get_execution_time(plain_batch(q_tokens, kv_tokens, replica), 0).total_time for replica in range(6)
    ]
    assert times[1] == pytest.approx(2 * times[0])
    assert times[2] == pytest.approx(times[0] / 4)
    assert times[3:] == times[:3]


def test_batches_of_no_replica_are_timed(build: Any) -> None:
    """The deadline schedulers pass 0 for the replica and None for the request."""
    predictor = build()
    batch = Batch(0, [None], [512], [1024], [1], [1], 0)
    assert predictor.get_execution_time(batch, 0).total_time > 0


def test_vidurs_nccl_flags_count(build: Any) -> None:
    def time_of(predictor: Any) -> float:
        return float(predictor.get_execution_time(plain_batch([1], [10]), 0).total_time)

    predictor = build(tensor_parallel_size=2)
    config = RooflineExecutionTimePredictorConfig(nccl_cpu_launch_overhead_ms=1.02, cache_dir=predictor._cache_dir)
    slower = RooflineExecutionTimePredictor(config, predictor._replica_config, SimpleNamespace(block_size=16))
    # One millisecond more for each of two all-reduces of each of 32 layers.
    assert time_of(slower) - time_of(predictor) == pytest.approx(0.064)


def test_the_description_names_everything_a_time_depends_on(build: Any) -> None:
    hashes = {
        build().get_hash(),
        build(speeds=[0.5]).get_hash(),
        build(device="h100").get_hash(),
        build(network_device="h100_dgx").get_hash(),
        build(tensor_parallel_size=2).get_hash(),
        build(num_pipeline_stages=2).get_hash(),
        build(model_name="meta-llama/Llama-2-7b-hf").get_hash(),
    }
    assert len(hashes) == 7
    assert build().get_hash() == build().get_hash()


def test_programs_that_build_configs_themselves_are_checked_too(tmp_path: Path) -> None:
    """Under a stock scheduler, without a command line."""
    from vidur.config import ClusterConfig, MetricsConfig, SimulationConfig
    from vidur.simulator import Simulator

    config = SimulationConfig(
        cluster_config=ClusterConfig(num_replicas=3),
        execution_time_predictor_config=RooflineExecutionTimePredictorConfig(
            replica_speed_factors=[1.0, 0.5], cache_dir=str(tmp_path / "cache")
        ),
        metrics_config=MetricsConfig(output_dir=str(tmp_path)),
    )
    with pytest.raises(ValueError, match=r"replica_speed_factors must have one value per replica \(3\)"):
        Simulator(config)


def test_a_fleet_of_half_speed_takes_twice_as_long(tmp_path: Path) -> None:
    flags = {
        "global_scheduler_config_type": "round_robin",
        "synthetic_request_generator_config_num_requests": 8,
        "poisson_request_interval_generator_config_qps": 0.01,  # one request at a time
    }
    nominal = simulate(tmp_path, **flags)
    slow = simulate(tmp_path, roofline_execution_time_predictor_config_replica_speed_factors=[0.5], **flags)
    for fast_request, slow_request in zip(nominal.requests, slow.requests, strict=True):
        assert fast_request.completed_at_s is not None and slow_request.completed_at_s is not None
        fast_s = fast_request.completed_at_s - fast_request.arrived_at_s
        assert slow_request.completed_at_s - slow_request.arrived_at_s == pytest.approx(2 * fast_s)
