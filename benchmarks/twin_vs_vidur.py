"""The twin beside Vidur: the same requests on the same replicas, how far apart, how much faster.

    python benchmarks/twin_vs_vidur.py [--json] [--quick] [--requests N] [--stream N] [--cold]

For each replica scheduler, one Vidur run with random placements is replayed in the twin. `max_abs_diff_s` is the
largest difference of a completion or first token over all requests; `speedup` is the smallest ratio of requests per
second (Vidur's event loop alone against the twin with everything). Then the twin serves `--stream` requests to show
that its memory stays flat. `first_call_s` is the first run in this process; with `--cold`, without compiled code on
disk. `marginal_delay_*`: 4 replicas with 20 requests in flight each; the event machine's answer is the exact one.
`rollout_*`: 64 clusters of the chat scenario through the default policy, by one process and by two at once: in step,
with a batched forward pass in torch; `rollout_compiled_*`: in one compiled pass, as training does it.
"""

import argparse
import functools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _reporting import new_parser, parse_options, positive, report

SCHEDULERS = ("sarathi", "vllm", "orca", "mnemosyne_fcfs_fixed_chunk")
FLAGS: dict[str, Any] = {
    "execution_time_predictor_config_type": "roofline",
    "cluster_config_num_replicas": 4,
    "replica_config_device": "a100",
    "replica_config_network_device": "a100_dgx",
    "replica_config_tensor_parallel_size": 1,
    "replica_config_num_pipeline_stages": 1,
    "global_scheduler_config_type": "random",
    "length_generator_config_type": "uniform",
    "interval_generator_config_type": "poisson",
    "poisson_request_interval_generator_config_qps": 12.0,
    "metrics_config_store_plots": False,
    "metrics_config_enable_chrome_trace": False,
}
REPETITIONS = 5
# As in configs/scenarios/chat.yaml.
CHAT_LENGTHS = "lognormal(417, 1.086, 10, 4000) / lognormal(139, 0.973, 5, 2000)"
CHAT_QPS = 0.9 * 44.4
NUM_CLUSTERS = 64
# A horizon that nothing reaches, so that the event machine rolls to the end.
ROLL_S = 1e6


def vidur_run(directory: Path, scheduler: str, num_requests: int) -> tuple[Any, Any]:
    """Run Vidur; its config and the outcome."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    from vidur_ppo_plugin.sim import launch
    from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

    flags = {
        **FLAGS,
        "replica_scheduler_config_type": scheduler,
        "synthetic_request_generator_config_num_requests": num_requests,
        "metrics_config_output_dir": str(directory),
        "roofline_execution_time_predictor_config_cache_dir": str(directory / "cache"),
    }
    with launch._argv(["vidur.main", *to_arguments(flags, known_flags())]):
        config = SimulationConfig.create_from_cli_args()
    set_seeds(config.seed)
    return config, launch.run_simulator(Simulator(config), config)


def compare(cluster: Any, outcome: Any) -> dict[str, float]:
    """Replay a Vidur run in the twin."""
    from vidur_ppo_plugin.twin.twin import run
    from vidur_ppo_plugin.workload.requests import Requests

    def column(name: str) -> Any:
        return np.array([getattr(request, name) for request in outcome.requests])

    requests = Requests(column("arrived_at_s"), column("prompt_tokens"), column("decode_tokens"))
    times_s = []
    for _ in range(REPETITIONS + 1):
        start_s = time.perf_counter()
        result = run(cluster, requests, column("replica"))
        times_s.append(time.perf_counter() - start_s)
    differences = [np.abs(getattr(result, name) - column(name)) for name in ("completed_at_s", "first_token_at_s")]
    return {
        "max_abs_diff_s": float(np.max(differences)),
        "different_preemptions": int(np.sum(result.num_restarts != column("num_restarts"))),
        "vidur_requests_per_s": len(outcome.requests) / outcome.wall_s,
        "twin_requests_per_s": len(outcome.requests) / min(times_s[1:]),
        "first_call_s": times_s[0],
    }


def stream(cluster: Any, num_requests: int) -> dict[str, float]:
    """Serve many requests, forgetting what was completed; growth of memory after the first tenth."""
    from vidur_ppo_plugin.twin.twin import Twin

    rng, part = np.random.default_rng(0), num_requests // 10
    twin, memory_mb, start_s = Twin(cluster), [], time.perf_counter()
    for _ in range(10):
        twin.submit_all(
            rng.integers(0, twin.num_replicas, part),
            twin.now_s + np.cumsum(rng.exponential(1 / 12.0, part)),
            rng.integers(900, 3900, part),
            rng.integers(40, 190, part),
        )
        twin.completions()
        memory_mb.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    wall_s = time.perf_counter() - start_s
    return {"stream_requests_per_s": num_requests / wall_s, "memory_growth_mb": memory_mb[-1] - memory_mb[0]}


def marginal_delay_figures(cluster: Any, num_states: int) -> dict[str, float]:
    """Cost of the marginal delay as it is computed by default, and by the event machine; how far apart they are."""
    from vidur_ppo_plugin.twin.twin import Twin

    chat = chat_requests(100 * num_states + 100, seed=1)
    times_us: dict[float, list[float]] = {np.inf: [], ROLL_S: []}
    errors = []
    for first in range(0, 100 * num_states, 100):
        twin = Twin(cluster)
        for k in range(first, first + 80):
            twin.submit(k % 4, 0.01 * (k - first), chat.prompt_tokens[k], chat.decode_tokens[k])
        for k in range(first + 80, first + 90):
            increase = []
            for horizon_s, durations in times_us.items():
                start_s = time.perf_counter()
                increase.append(
                    twin.marginal_delay(0.8, chat.prompt_tokens[k], chat.decode_tokens[k], horizon_s=horizon_s)
                )
                durations.append(1e6 * (time.perf_counter() - start_s))
            errors.append(np.abs(increase[0] / increase[1] - 1.0).max())
    return {
        "marginal_delay_us": float(np.median(times_us[np.inf])),
        "marginal_delay_rolled_us": float(np.median(times_us[ROLL_S])),
        "marginal_delay_relative_error": float(np.max(errors)),
    }


def chat_requests(num_requests: int, seed: int) -> Any:
    """Requests of the chat scenario, at 0.9 of its capacity."""
    from vidur_ppo_plugin.workload.lengths import parse_lengths
    from vidur_ppo_plugin.workload.synthetic import draw_requests

    return draw_requests(parse_lengths(CHAT_LENGTHS), seed, num_requests, qps=CHAT_QPS)


def rollout(cluster: Any, num_requests: int) -> float:
    """Decisions per second of 64 clusters through the default policy, sampled; the best of three."""
    import torch

    from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
    from vidur_ppo_plugin.routing.features import FeatureTable
    from vidur_ppo_plugin.twin.vector import VectorTwin

    torch.set_num_threads(1)
    table = FeatureTable()
    shape = {name: getattr(table, name) for name in ("num_replica_features", "num_request_features")}
    network = ActorCritic(NetworkShape(**shape))
    requests = [chat_requests(num_requests, seed) for seed in range(NUM_CLUSTERS)]
    twin, rng, rates = VectorTwin(cluster, requests), np.random.default_rng(0), []
    for _ in range(3):
        twin.reset(requests)
        start_s = time.perf_counter()
        with torch.inference_mode():
            while not twin.is_done.all():
                seen = twin.observe()
                prior = (seen.token_load.min(axis=1, keepdims=True) - seen.token_load) / 512.0
                encoded = network.encode(torch.from_numpy(seen.replicas), torch.from_numpy(seen.request))
                logits = network.logits(encoded, torch.from_numpy(prior.astype(np.float32))).numpy()
                twin.act((logits + rng.gumbel(size=logits.shape)).argmax(axis=1))
        rates.append(NUM_CLUSTERS * num_requests / (time.perf_counter() - start_s))
    return max(rates)


def compiled_rollout(cluster: Any, num_requests: int) -> float:
    """The same in one compiled pass."""
    from vidur_ppo_plugin.policy.actor import Actor
    from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
    from vidur_ppo_plugin.routing.delay_model import DelayModel
    from vidur_ppo_plugin.routing.features import FeatureTable
    from vidur_ppo_plugin.routing.prior import Prior
    from vidur_ppo_plugin.twin.policy_twin import PolicyTwin

    table = FeatureTable()
    shape = {name: getattr(table, name) for name in ("num_replica_features", "num_request_features")}
    actor = Actor.from_network(ActorCritic(NetworkShape(**shape)))
    model = DelayModel.from_roofline(cluster.roofline, cluster.max_batch_tokens)
    requests = [chat_requests(num_requests, seed) for seed in range(NUM_CLUSTERS)]
    twin = PolicyTwin(cluster, requests, prior=Prior("least_tokens", weight=1.0, delay_model=model))
    rng, rates = np.random.default_rng(0), []
    for _ in range(3):
        twin.reset(requests)
        start_s = time.perf_counter()
        twin.play(actor, num_requests, temperature=1.0, uniforms=rng.random((NUM_CLUSTERS, num_requests, 2)))
        rates.append(NUM_CLUSTERS * num_requests / (time.perf_counter() - start_s))
    return max(rates)


def rollouts(cluster: Any, num_requests: int) -> dict[str, float]:
    """By one process, and by two at once."""
    figures = {}
    for kind, prefix in ((rollout, "rollout"), (compiled_rollout, "rollout_compiled")):
        for num_processes, name in ((1, "decisions_per_s"), (2, "two_processes_decisions_per_s")):
            with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures[f"{prefix}_{name}"] = sum(
                    pool.map(functools.partial(kind, num_requests=num_requests), [cluster] * num_processes)
                )
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        if options.cold:
            os.environ["NUMBA_CACHE_DIR"] = directory
        from vidur_ppo_plugin import _autoload

        _autoload.install()
        from vidur_ppo_plugin.sim.twin_config import twin_config

        results, clusters = {}, {}
        for scheduler in SCHEDULERS:
            config, outcome = vidur_run(Path(directory), scheduler, options.requests)
            clusters[scheduler] = twin_config(config)
            results[scheduler] = compare(clusters[scheduler], outcome)
        return {
            "max_abs_diff_s": max(result["max_abs_diff_s"] for result in results.values()),
            "speedup": min(r["twin_requests_per_s"] / r["vidur_requests_per_s"] for r in results.values()),
            "different_preemptions": sum(result["different_preemptions"] for result in results.values()),
            "first_call_s": results[SCHEDULERS[0]]["first_call_s"],
            **stream(clusters["sarathi"], options.stream),
            **marginal_delay_figures(clusters["sarathi"], options.states),
            **rollouts(clusters["sarathi"], options.rollout_requests),
            "schedulers": results,
        }


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    for scheduler, result in figures["schedulers"].items():
        rates = result["vidur_requests_per_s"], result["twin_requests_per_s"]
        yield f"{scheduler:<28} Vidur {rates[0]:7.0f} requests/s, twin {rates[1]:9.0f}: {rates[1] / rates[0]:5.0f}x"
    for name, value in figures.items():
        if name != "schedulers":
            yield f"{name:<28} {value:g}"


def main() -> int:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=positive, default=1000, help="requests of each Vidur run")
    parser.add_argument("--stream", type=positive, default=1_000_000, help="requests of the stream through the twin")
    parser.add_argument("--states", type=positive, default=39, help="states in which marginal delays are asked for")
    parser.add_argument("--rollout-requests", type=positive, default=500, help="requests of each cluster in a rollout")
    parser.add_argument("--cold", action="store_true", help="compile everything anew")
    options = parse_options(parser, quick={"requests": 60, "stream": 1000, "states": 1, "rollout_requests": 20})
    return report(options, lambda: measure(options), lines_of)


if __name__ == "__main__":
    sys.exit(main())
