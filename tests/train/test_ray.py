"""Workers on a real Ray cluster of two nodes on this machine, one of which is lost in the middle."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_runs import SMALL, clusters_of, learned, small, train

# CI installs Ray and sets this: there, a test that would be skipped fails.
if os.environ.get("VIDUR_PPO_REQUIRE_RAY"):
    import ray
else:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vidur-ppo-plugin[ray]'")

from vidur_ppo_plugin.train.command import train_command
from vidur_ppo_plugin.train.config import TrainConfig
from vidur_ppo_plugin.train.ray_engine import RayEngine, connect
from vidur_ppo_plugin.train.schema import ConfigError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The head with two CPUs; tests may add nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    connect(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class KillingEngine(RayEngine):
    """Removes a node in the middle of the third iteration, while its worker is busy."""

    def __init__(self, config: TrainConfig, *, cluster: Any, node: Any, **options: Any) -> None:
        super().__init__(config, clusters_of(config), **options)
        self._cluster, self._node = cluster, node

    def run(self, jobs: Any, weights: Any) -> list[Any]:
        if getattr(jobs[0], "iteration", 0) == 2 and self._node is not None:
            sent = ray.put(weights)
            for actor, job in zip(self._actors, jobs, strict=True):
                actor.run.remote(job, sent)  # keeps them busy
            self._cluster.remove_node(self._node)
            self._node = None
        return super().run(jobs, weights)


def test_an_address_without_a_cluster_is_refused() -> None:
    """Before there is one: a process can be connected to one cluster only."""
    with pytest.raises(ConfigError, match="--address localhost:1: no Ray cluster can be reached there"):
        connect("localhost:1")


def test_a_lost_node_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    config = small(clusters_in_step=1)
    train(config, tmp_path / "here", num_jobs=3)
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    # Three CPUs for three workers: when the node is gone, there is no room for a third one.
    engine = KillingEngine(config, cluster=cluster, node=node, workers=3, place_timeout_s=3.0)
    try:
        ray.get([actor.__ray_ready__.remote() for actor in engine._actors])
        assert len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 2
        train(config, tmp_path / "on ray", engine=engine, num_jobs=3)
        assert engine.num_replaced == 1
    finally:
        engine.close()
    assert learned(tmp_path / "on ray") == learned(tmp_path / "here")


def test_a_dead_actor_is_replaced(cluster: Any, tmp_path: Path) -> None:
    config = small(decisions=256)
    train(config, tmp_path / "here", num_jobs=2)
    engine = RayEngine(config, clusters_of(config), workers=2)
    try:
        ray.kill(engine._actors[1])
        train(config, tmp_path / "on ray", engine=engine, num_jobs=2)
        assert engine.num_replaced == 1
    finally:
        engine.close()
    assert learned(tmp_path / "on ray") == learned(tmp_path / "here")


def test_a_sweep_trains_every_combination(cluster: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({**SMALL, "decisions": 128, "sweep": {"seed": [1, 2]}}))  # JSON is YAML
    assert train_command(config, out=tmp_path / "sweep", engine="ray") == 0
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert sorted(row["name"] for row in rows) == ["seed=1", "seed=2"]
    assert [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    train(small(decisions=128, seed=2), tmp_path / "alone")
    assert learned(tmp_path / "sweep" / "seed=2") == learned(tmp_path / "alone")
