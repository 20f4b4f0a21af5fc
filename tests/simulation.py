"""Real, small simulations for the tests: the flags they share, and running them in this process or in another."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.sim.flags import known_flags, to_arguments

# Four replicas of Llama-3-8B on A100s, prompts of about 1,000 to 4,000 tokens, offline.
BASE: dict[str, Any] = {
    "execution_time_predictor_config_type": "roofline",
    "cluster_config_num_replicas": 4,
    "replica_config_device": "a100",
    "replica_config_network_device": "a100_dgx",
    "replica_config_tensor_parallel_size": 1,
    "replica_config_num_pipeline_stages": 1,
    "replica_scheduler_config_type": "sarathi",
    "synthetic_request_generator_config_num_requests": 100,
    "length_generator_config_type": "uniform",
    "interval_generator_config_type": "poisson",
    "poisson_request_interval_generator_config_qps": 12.0,
    "metrics_config_store_plots": False,
    "metrics_config_enable_chrome_trace": False,
}

# Memory for about five requests a replica, and long outputs: preemptions are certain.
KV_PRESSURE: dict[str, Any] = {
    "cache_config_num_blocks": 1000,
    "uniform_request_length_generator_config_prefill_to_decode_ratio": 3.0,
    "poisson_request_interval_generator_config_qps": 10.0,
}


def arguments(output_dir: Path, **flags: Any) -> list[str]:
    """The command line of a simulation: BASE with `flags` on top."""
    _autoload.install()
    merged = {**BASE, "metrics_config_output_dir": str(output_dir), **flags}
    merged.setdefault("roofline_execution_time_predictor_config_cache_dir", str(output_dir / "cache"))
    return to_arguments(merged, known_flags())


def simulate(output_dir: Path, **flags: Any) -> RunOutcome:
    """Run in this process."""
    from vidur_ppo_plugin.sim.launch import run

    return run(arguments(output_dir, **flags))


def vidur_main(command_line: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `python -m vidur.main` in a new process."""
    command = [sys.executable, "-m", "vidur.main", *command_line]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
