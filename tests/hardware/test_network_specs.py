"""Networks: the alpha-beta formulas and which link decides."""

from dataclasses import replace

import pytest

from vidur_ppo_plugin.hardware import NETWORKS

# vidur/config/node_sku_config.py, version 0.0.26
DEVICES_PER_NODE = {
    "a40_pairwise_nvlink": 8,
    "a100_pairwise_nvlink": 4,
    "h100_pairwise_nvlink": 4,
    "a100_dgx": 8,
    "h100_dgx": 8,
    "l40_pcie": 8,
}
MB = 1e6


def test_node_types_and_sizes_are_those_of_vidur() -> None:
    assert {name: spec.num_devices_per_node for name, spec in NETWORKS.items()} == DEVICES_PER_NODE


def test_all_reduce_formula() -> None:
    spec = NETWORKS["a100_dgx"]
    latency_ms = (spec.all_reduce_latency_us + 4 * spec.all_reduce_latency_us_per_worker) * 1e-3
    expected_ms = latency_ms + 2 * 3 / 4 * 100 * MB / (spec.node_all_reduce_gb_per_s * MB)
    assert spec.all_reduce_ms(100 * MB, 4) == pytest.approx(expected_ms, rel=1e-12)


def test_all_reduce_of_one_worker_is_free_and_small_messages_hit_the_floor() -> None:
    spec = NETWORKS["h100_dgx"]
    assert spec.all_reduce_ms(100 * MB, 1) == 0.0
    assert spec.all_reduce_ms(1, 2) == spec.all_reduce_ms(1000, 2) == spec.all_reduce_floor_us * 1e-3


@pytest.mark.parametrize("name", ["a40_pairwise_nvlink", "a100_pairwise_nvlink", "h100_pairwise_nvlink"])
def test_beyond_a_pair_the_slower_pcie_decides(name: str) -> None:
    spec = NETWORKS[name]
    # Bytes over a link grow by 1.5 from two workers to four; the link gets slower on top of that.
    assert spec.all_reduce_ms(100 * MB, 4) > 1.5 * spec.all_reduce_ms(100 * MB, 2)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_leaving_the_node_costs_more(name: str) -> None:
    spec = NETWORKS[name]
    inside, outside = spec.num_devices_per_node, 2 * spec.num_devices_per_node
    assert spec.all_reduce_ms(10 * MB, outside) > spec.all_reduce_ms(10 * MB, inside)
    assert spec.send_recv_ms(10 * MB, same_node=False) > spec.send_recv_ms(10 * MB, same_node=True)


def test_validation() -> None:
    with pytest.raises(ValueError, match=r"num_workers must be >= 1, got 0"):
        NETWORKS["a100_dgx"].all_reduce_ms(1, 0)
    with pytest.raises(ValueError, match=r"NetworkSpec\.send_recv_gb_per_s must be > 0, got 0"):
        replace(NETWORKS["a100_dgx"], send_recv_gb_per_s=0)
