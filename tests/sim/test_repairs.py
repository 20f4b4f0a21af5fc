"""Every repair is still needed by the installed Vidur, and works.

A test named `test_upstream_still_…` that fails says that Vidur has mended itself: remove the repair it names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulation import KV_PRESSURE, arguments, simulate, vidur_main

# Run in a process where no plugin is loaded: stock Vidur.
STOCK_FACTS = """
import json
from vidur.config import ClusterConfig, MetricsConfig
from vidur.entities import Batch, Cluster, KVParallelBatch, Request
from vidur.scheduler.replica_scheduler.mnemosyne_fcfs_fixed_chunk_replica_scheduler import (
    MnemosyneFCFSFixedChunkReplicaScheduler as Default,
)
from vidur.types import ReplicaId
import vidur.simulator
import sys

facts = {"plugin": any(name.startswith("vidur_ppo_plugin.sim") for name in sys.modules)}

def advance(request, tokens):
    request.on_batch_schedule(1.0)
    request.on_batch_stage_schedule(1.0)
    request.on_batch_stage_end(2.0, 0, 1.0, 1.0, tokens)
    request.on_batch_end(2.0, tokens)

request = Request(0.0, 10, 5)
advance(request, 10)
advance(request, 1)
request.restart()
try:
    advance(request, request.num_prefill_tokens)
    facts["restart"] = "works"
except AssertionError:
    facts["restart"] = "crashes"

request = Request(0.0, 10, 5)
advance(request, 4)
request.restart()
facts["prompt_after_restart_in_prefill"] = request.num_prefill_tokens

requests = [Request(0.0, 10, 5) for _ in range(500)]
batch = KVParallelBatch(ReplicaId(0), {0: Batch(ReplicaId(0), requests, [1] * 500, [1] * 500)})
facts["batch_in_order"] = batch.requests == requests

class Time:
    total_time = model_time = 1.0

stage = batch.to_batch_stage(0, Time())
facts["stage_in_order"] = stage.requests == requests

clusters = [Cluster(ClusterConfig(num_replicas=2), MetricsConfig()) for _ in range(2)]
facts["second_ids"] = [replica_id.id for replica_id in clusters[1].replicas]

scheduler = Default.__new__(Default)
from collections import defaultdict
from types import SimpleNamespace
scheduler._cache_config = SimpleNamespace(num_blocks=100)
scheduler._kv_parallel_size = 1
scheduler._num_allocated_blocks = 0
scheduler._kvp_group_allocation_map = [defaultdict(int)]
scheduler._kvp_group_num_allocated_blocks = [0]
scheduler._req_kvp_group_block_counter = {}
scheduler._req_block_counter = defaultdict(int)
scheduler.allocate(7, 30, 0)
facts["kv_percent"] = scheduler.memory_usage_percent
print(json.dumps(facts))
"""


def facts(tmp_path_factory: pytest.TempPathFactory, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", STOCK_FACTS],
        cwd=tmp_path_factory.mktemp("facts"),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = facts(tmp_path_factory, VIDUR_PLUGINS="none")
    assert result["plugin"] is False
    return result


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = facts(tmp_path_factory, VIDUR_PLUGINS="vidur_ppo")
    assert result["plugin"] is True
    return result


def test_upstream_still_needs_repair_restart(stock: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert stock["restart"] == "crashes", "Vidur mended Request.restart: remove repair_restart"
    assert stock["prompt_after_restart_in_prefill"] == 4, "Vidur mended restarts in prefill: simplify repair_restart"
    assert repaired["restart"] == "works"
    assert repaired["prompt_after_restart_in_prefill"] == 10


def test_upstream_still_needs_repair_request_order(stock: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert not stock["batch_in_order"], "Vidur mended KVParallelBatch: remove its repair_request_order"
    assert not stock["stage_in_order"], "Vidur mended KVParallelBatchStage: remove its repair_request_order"
    assert repaired["batch_in_order"] and repaired["stage_in_order"]


def test_upstream_still_needs_repair_ids(stock: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert stock["second_ids"] == [2, 3], "Vidur mended the ids of a second simulation: remove repair_ids"
    assert repaired["second_ids"] == [0, 1]


def test_upstream_still_needs_repair_kv_count(stock: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert stock["kv_percent"] == 0, "Vidur mended the KV count of the mnemosyne family: remove repair_kv_count"
    assert repaired["kv_percent"] == 30


@pytest.mark.parametrize("replica_scheduler", ["sarathi", "vllm", "mnemosyne_fcfs_fixed_chunk"])
def test_kv_pressure_runs_to_its_end_under_stock_schedulers_too(tmp_path: Path, replica_scheduler: str) -> None:
    outcome = simulate(
        tmp_path,
        global_scheduler_config_type="round_robin",
        replica_scheduler_config_type=replica_scheduler,
        **KV_PRESSURE,
    )
    assert len(outcome.completed) == 100
    assert sum(request.num_restarts for request in outcome.requests) > 5


@pytest.mark.parametrize("replica_scheduler", ["sarathi", "mnemosyne_fcfs_fixed_chunk"])
def test_same_seed_same_bits_in_another_process_under_kv_pressure(tmp_path: Path, replica_scheduler: str) -> None:
    """Memory addresses and hash seeds differ between processes; results may not."""
    tables = []
    for run, hash_seed in enumerate(["1", "2"]):
        output_dir = tmp_path / str(run)
        command_line = arguments(
            output_dir,
            global_scheduler_config_type="least_tokens",
            replica_scheduler_config_type=replica_scheduler,
            **KV_PRESSURE,
        )
        # Shift the heap, so that objects lie at other addresses in the second process.
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONMALLOC": ["pymalloc", "malloc"][run]}
        done = vidur_main(command_line, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        (table,) = output_dir.glob("*/request_metrics.csv")
        tables.append(table.read_bytes())
    assert tables[0] == tables[1]
    assert b"\n" in tables[0].strip()


def test_a_second_simulation_in_one_process_equals_the_first(tmp_path: Path) -> None:
    runs = [
        simulate(tmp_path, global_scheduler_config_type=scheduler, **KV_PRESSURE).requests
        for scheduler in ("least_tokens", "round_robin", "least_tokens")
    ]
    assert runs[0] == runs[2]
    assert runs[0] != runs[1]
