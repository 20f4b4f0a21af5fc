"""What one call of the roofline predictor costs, for batches of 64 requests, as Vidur makes it.

    python benchmarks/predictor_cost.py [--json]

Vidur asks for the time of a batch about 25 times a request, so the call must cost little: the limit is 15 us.
The best of several repetitions is reported, because other work on the machine only ever adds time.
"""

import argparse
import json
import sys
import timeit
from typing import Any

from vidur_ppo_plugin import _autoload

LIMIT_US = 15.0
BATCH_SIZE = 64


def build_predictor() -> Any:
    """The predictor of Llama-3-8B on two A100s (tensor parallel, so that all-reduces count too)."""
    _autoload.install()
    from vidur.config import CacheConfig, ReplicaConfig

    from vidur_ppo_plugin.sim.config_types import RooflineExecutionTimePredictorConfig
    from vidur_ppo_plugin.sim.roofline_predictor import RooflineExecutionTimePredictor

    replica_config = ReplicaConfig(
        tensor_parallel_size=2, num_pipeline_stages=1, device="a100", network_device="a100_dgx"
    )
    predictor_config = RooflineExecutionTimePredictorConfig(replica_speed_factors=[1.0, 0.5])
    return RooflineExecutionTimePredictor(predictor_config, replica_config, CacheConfig())


def build_batches() -> dict[str, Any]:
    """Batches of 64 requests as the replica schedulers make them."""
    from vidur.entities import Batch, KVParallelBatch, Request
    from vidur.types import ReplicaId

    requests = [Request(0.0, 1000 + 17 * i, 200) for i in range(BATCH_SIZE)]
    kv_tokens = [1000 + 17 * i for i in range(BATCH_SIZE)]
    decodes = [1] * BATCH_SIZE
    chunked = [1] * (BATCH_SIZE - 1) + [449]
    prefills = [16 + i for i in range(BATCH_SIZE)]
    replica, slow_replica = ReplicaId(0), ReplicaId(1)

    def mnemosyne(q_tokens: list[int]) -> Any:
        groups = [1] * BATCH_SIZE
        return KVParallelBatch(replica, {0: Batch(replica, requests, q_tokens, kv_tokens, groups, [0] * BATCH_SIZE, 0)})

    return {
        "64 decodes": Batch(replica, requests, decodes, kv_tokens),
        "63 decodes + 1 chunk": Batch(replica, requests, chunked, kv_tokens),
        "63 decodes + 1 chunk, slow replica": Batch(slow_replica, requests, chunked, kv_tokens),
        "63 decodes + 1 chunk, default replica scheduler": mnemosyne(chunked),
        "64 prefills": Batch(replica, requests, prefills, kv_tokens),
    }


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of 2,000 calls each")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be >= 1, got {options.repeats}")
    predictor = build_predictor()
    call_us = {}
    for name, batch in build_batches().items():
        timer = timeit.Timer(lambda batch=batch: predictor.get_execution_time(batch, 0))
        call_us[name] = min(timer.repeat(options.repeats, 2000)) / 2000 * 1e6
    worst_us = max(call_us.values())
    if options.json:
        print(json.dumps({"call_us": call_us, "worst_us": worst_us, "limit_us": LIMIT_US}))
    else:
        for name, value in call_us.items():
            print(f"{name:<50}{value:>8.2f} us")
        print(f"{'limit':<50}{LIMIT_US:>8.2f} us")
    return 0 if worst_us <= LIMIT_US else 1


if __name__ == "__main__":
    sys.exit(main())
