"""Networks between GPUs: latency and bandwidth of all-reduce and send/receive, for Vidur's node types.

A transfer takes its latency plus bytes over bandwidth. The slowest link that a collective crosses decides.
"""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class NetworkSpec:
    """Constants of the links inside a node and between nodes.

    Bandwidths of all-reduce are bus bandwidths: an all-reduce of S bytes over n workers moves
    2 (n - 1) / n * S bytes over each worker's link, and these bytes are divided by the bus bandwidth.

        all_reduce_latency_us, all_reduce_latency_us_per_worker: fixed cost of an all-reduce inside a node.
        all_reduce_floor_us: least time of an all-reduce; messages below a few MB all take about as long.
        pair_all_reduce_gb_per_s: bus bandwidth of two workers (NVLink bridge where cards come in pairs).
        node_all_reduce_gb_per_s: bus bandwidth of three or more workers of one node.
        send_recv_latency_us, send_recv_gb_per_s: one transfer between two devices of a node.
        inter_node_*: the same across nodes.
    """

    name: str
    num_devices_per_node: int
    all_reduce_latency_us: float
    all_reduce_latency_us_per_worker: float
    all_reduce_floor_us: float
    pair_all_reduce_gb_per_s: float
    node_all_reduce_gb_per_s: float
    send_recv_latency_us: float
    send_recv_gb_per_s: float
    inter_node_all_reduce_latency_us: float
    inter_node_all_reduce_latency_us_per_worker: float
    inter_node_all_reduce_gb_per_s: float
    inter_node_send_recv_latency_us: float
    inter_node_send_recv_gb_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not value > 0:
                raise ValueError(f"NetworkSpec.{field.name} must be > 0, got {value!r}")

    def all_reduce_ms(self, size_bytes: float, num_workers: int) -> float:
        """Time of an all-reduce of size_bytes over num_workers devices; nothing for a single one."""
        if num_workers < 1:
            raise ValueError(f"num_workers must be >= 1, got {num_workers}")
        if num_workers == 1:
            return 0.0
        latency_us, per_worker_us = self.all_reduce_latency_us, self.all_reduce_latency_us_per_worker
        if num_workers > self.num_devices_per_node:
            gb_per_s = self.inter_node_all_reduce_gb_per_s
            latency_us = self.inter_node_all_reduce_latency_us
            per_worker_us = self.inter_node_all_reduce_latency_us_per_worker
        elif num_workers == 2:
            gb_per_s = self.pair_all_reduce_gb_per_s
        else:
            gb_per_s = self.node_all_reduce_gb_per_s
        moved_bytes = 2.0 * (num_workers - 1) / num_workers * size_bytes
        time_ms = (latency_us + per_worker_us * num_workers) * 1e-3 + moved_bytes / (gb_per_s * 1e6)
        return max(self.all_reduce_floor_us * 1e-3, time_ms)

    def send_recv_ms(self, size_bytes: float, *, same_node: bool) -> float:
        """Time to move size_bytes from one device to another."""
        if same_node:
            return self.send_recv_latency_us * 1e-3 + size_bytes / (self.send_recv_gb_per_s * 1e6)
        return self.inter_node_send_recv_latency_us * 1e-3 + size_bytes / (self.inter_node_send_recv_gb_per_s * 1e6)


# One direction of a link, from data sheets. NVLink bridges: A40 112.5 GB/s, A100 and H100 PCIe 600 GB/s, both
# directions together. PCIe x16: generation 4 (A40, A100, L40) 32 GB/s, generation 5 (H100) 64 GB/s.
_A40_BRIDGE_GB_PER_S = 56.25
_A100_BRIDGE_GB_PER_S = 300.0
_H100_BRIDGE_GB_PER_S = 300.0
_PCIE4_GB_PER_S = 32.0
_PCIE5_GB_PER_S = 64.0
# Part of a link that NCCL reaches, for the nodes without a profile. The two DGX profiles reach 0.58 and 0.79
# of NVLink.
_LINK_EFFICIENCY = 0.7

_A100_DGX = NetworkSpec(
    name="a100_dgx",
    num_devices_per_node=8,
    # Calibrated: `benchmarks/roofline_accuracy.py` on a100_dgx_all_reduce (all workers in one node).
    all_reduce_latency_us=41.5,
    all_reduce_latency_us_per_worker=1.97,
    all_reduce_floor_us=45.0,
    pair_all_reduce_gb_per_s=175.0,
    node_all_reduce_gb_per_s=175.0,
    # Calibrated on a100_dgx_send_recv, two devices of a node; NVLink 3 offers 300 GB/s in one direction.
    send_recv_latency_us=14.3,
    send_recv_gb_per_s=300.0,
    # Calibrated on the rows with 16 workers, 8 in each node.
    inter_node_all_reduce_latency_us=68.0,
    inter_node_all_reduce_latency_us_per_worker=10.5,
    inter_node_all_reduce_gb_per_s=17.2,
    # Calibrated on a100_dgx_send_recv, one device in each node.
    inter_node_send_recv_latency_us=27.6,
    inter_node_send_recv_gb_per_s=7.75,
)

_H100_DGX = NetworkSpec(
    name="h100_dgx",
    num_devices_per_node=8,
    # Calibrated: `benchmarks/roofline_accuracy.py` on h100_dgx_all_reduce (all workers in one node).
    all_reduce_latency_us=20.0,
    all_reduce_latency_us_per_worker=1.36,
    all_reduce_floor_us=38.0,
    pair_all_reduce_gb_per_s=355.0,
    node_all_reduce_gb_per_s=355.0,
    # Calibrated on h100_dgx_send_recv, two devices of a node.
    send_recv_latency_us=7.5,
    send_recv_gb_per_s=361.0,
    # No profile of all-reduce across nodes: the A100's, scaled by the ratio of the two send/receive profiles.
    inter_node_all_reduce_latency_us=68.0 * 16.6 / 27.6,
    inter_node_all_reduce_latency_us_per_worker=10.5 * 16.6 / 27.6,
    inter_node_all_reduce_gb_per_s=17.2 * 36.3 / 7.75,
    # Calibrated on h100_dgx_send_recv, one device in each node.
    inter_node_send_recv_latency_us=16.6,
    inter_node_send_recv_gb_per_s=36.3,
)


def _without_switch(
    base: NetworkSpec, name: str, num_devices_per_node: int, *, bridge_gb_per_s: float, pcie_gb_per_s: float
) -> NetworkSpec:
    """A node of `base`'s generation whose cards have bridges between pairs, and PCIe otherwise.

    Latencies and the network between nodes are those of `base`. Neighbouring pipeline stages need not be a
    bridged pair, so transfers between them go over PCIe. So does what leaves the node.
    """
    reached_gb_per_s = pcie_gb_per_s * _LINK_EFFICIENCY
    return replace(
        base,
        name=name,
        num_devices_per_node=num_devices_per_node,
        pair_all_reduce_gb_per_s=bridge_gb_per_s * _LINK_EFFICIENCY,
        node_all_reduce_gb_per_s=reached_gb_per_s,
        send_recv_gb_per_s=reached_gb_per_s,
        inter_node_all_reduce_gb_per_s=min(reached_gb_per_s, base.inter_node_all_reduce_gb_per_s),
        inter_node_send_recv_gb_per_s=min(reached_gb_per_s, base.inter_node_send_recv_gb_per_s),
    )


NETWORKS: dict[str, NetworkSpec] = {
    spec.name: spec
    for spec in (
        _without_switch(
            _A100_DGX,
            "a40_pairwise_nvlink",
            8,
            bridge_gb_per_s=_A40_BRIDGE_GB_PER_S,
            pcie_gb_per_s=_PCIE4_GB_PER_S,
        ),
        _without_switch(
            _A100_DGX,
            "a100_pairwise_nvlink",
            4,
            bridge_gb_per_s=_A100_BRIDGE_GB_PER_S,
            pcie_gb_per_s=_PCIE4_GB_PER_S,
        ),
        _without_switch(
            _H100_DGX,
            "h100_pairwise_nvlink",
            4,
            bridge_gb_per_s=_H100_BRIDGE_GB_PER_S,
            pcie_gb_per_s=_PCIE5_GB_PER_S,
        ),
        _A100_DGX,
        _H100_DGX,
        # No bridges at all: PCIe also within a pair.
        _without_switch(_A100_DGX, "l40_pcie", 8, bridge_gb_per_s=_PCIE4_GB_PER_S, pcie_gb_per_s=_PCIE4_GB_PER_S),
    )
}
"""The node types Vidur knows, by its names."""
