"""What one call of the roofline predictor costs, for batches of 64 requests, as Vidur makes it.

    python benchmarks/predictor_cost.py [--json] [--quick] [--repeats 20]

Vidur asks for the time of a batch about 25 times a request, so the call must cost little: the limit is 15 us.
The best of several repetitions is reported, because other work on the machine only ever adds time.
"""

import argparse
import sys
import timeit
from collections.abc import Iterator
from typing import Any

from _reporting import new_parser, parse_options, positive, report

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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a call, by kind of batch."""
    predictor = build_predictor()
    call_us = {}
    for name, batch in build_batches().items():
        timer = timeit.Timer(lambda batch=batch: predictor.get_execution_time(batch, 0))
        call_us[name] = min(timer.repeat(options.repeats, options.calls)) / options.calls * 1e6
    return {"call_us": call_us, "worst_us": max(call_us.values()), "limit_us": LIMIT_US}


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    for name, value in {**result["call_us"], "limit": LIMIT_US}.items():
        yield f"{name:<50}{value:>8.2f} us"


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=20, help="repetitions, of which the best counts")
    parser.add_argument("--calls", type=positive, default=2000, help="calls of a repetition")
    options = parse_options(parser, quick={"repeats": 1, "calls": 50})
    return report(
        options,
        lambda: measure(options),
        lines_of,
        lambda result: ["worst_us"] if result["worst_us"] > LIMIT_US else [],
    )


if __name__ == "__main__":
    sys.exit(main())
