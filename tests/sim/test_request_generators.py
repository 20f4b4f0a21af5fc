"""Our workloads inside Vidur: the requests are bit for bit those of `workload`, and bad flags are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from simulation import arguments, simulate, vidur_main

from vidur_ppo_plugin.record.outcome import RunOutcome
from vidur_ppo_plugin.workload.lengths import parse_lengths
from vidur_ppo_plugin.workload.requests import Requests
from vidur_ppo_plugin.workload.synthetic import draw_requests
from vidur_ppo_plugin.workload.trace import read_trace

COMPONENTS = "3: uniform(100, 900) / fixed(6); 1: lognormal(2000, 0.5, 1000, 4000) / uniform(2, 9)"
RENEWAL: dict[str, Any] = {
    "interval_generator_config_type": "renewal",
    "renewal_request_interval_generator_config_qps": 30.0,
    "renewal_request_interval_generator_config_cv": 2.0,
    "renewal_request_interval_generator_config_seed": 5,
}
MIXTURE: dict[str, Any] = {
    "length_generator_config_type": "mixture",
    "mixture_request_length_generator_config_components": COMPONENTS,
    "mixture_request_length_generator_config_max_tokens": 4096,
    "mixture_request_length_generator_config_seed": 5,
    **RENEWAL,
}
LOGNORMAL: dict[str, Any] = {
    "length_generator_config_type": "lognormal",
    "lognormal_request_length_generator_config_prompt_median": 300.0,
    "lognormal_request_length_generator_config_output_median": 8.0,
    "lognormal_request_length_generator_config_output_max": 20,
    "lognormal_request_length_generator_config_seed": 5,
    **RENEWAL,
}


def same(outcome: RunOutcome, requests: Requests) -> None:
    """Equal to the last bit."""
    assert [r.arrived_at_s for r in outcome.requests] == requests.arrived_at_s.tolist()
    assert [r.prompt_tokens for r in outcome.requests] == requests.prompt_tokens.tolist()
    assert [r.decode_tokens for r in outcome.requests] == requests.decode_tokens.tolist()


def test_a_mixture_is_the_same_in_vidur(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, **MIXTURE)
    same(outcome, draw_requests(parse_lengths(COMPONENTS, max_tokens=4096), 5, 100, qps=30.0, cv=2.0))


def test_lognormal_is_the_same_in_vidur_whatever_the_other_seeds(tmp_path: Path) -> None:
    outcome = simulate(tmp_path, **LOGNORMAL, seed=17, synthetic_request_generator_config_seed=18)
    lengths = parse_lengths("lognormal(300, 1.09, 10, 4000) / lognormal(8, 0.97, 5, 20)", max_tokens=32768)
    same(outcome, draw_requests(lengths, 5, 100, qps=30.0, cv=2.0))


def test_a_trace_is_replayed_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{second / 7},{100 + second},{1 + second % 5}\n" for second in range(50))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    prefix = "replay_request_generator_config_"
    window = {"first_request": 10, "num_requests": 30, "time_scale_factor": 0.3, "max_tokens": 140}
    flags = {f"{prefix}{name}": value for name, value in window.items()}
    outcome = simulate(tmp_path, request_generator_config_type="replay", **{f"{prefix}trace_file": str(path)}, **flags)
    same(outcome, read_trace(path).window(10, 30, time_scale=0.3, max_tokens=140))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            MIXTURE | {"mixture_request_length_generator_config_components": "fixed(1)"},
            "_components='fixed(1)': a class",
        ),
        (MIXTURE | {"renewal_request_interval_generator_config_cv": 0.0}, "_cv must be > 0 and <= 100, got 0.0"),
        (LOGNORMAL | {"lognormal_request_length_generator_config_prompt_min": 9000}, "_prompt_min must be at most"),
        (LOGNORMAL | {"lognormal_request_length_generator_config_max_tokens": 1}, "_max_tokens must be >= 2"),
        ({"request_generator_config_type": "replay"}, "_trace_file must name a CSV file"),
    ],
    ids=["components", "cv", "bounds", "max_tokens", "trace"],
)
def test_bad_flags_end_the_command(flags: dict[str, Any], problem: str, tmp_path: Path) -> None:
    done = vidur_main(arguments(tmp_path / "output", **flags), cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr
    assert not (tmp_path / "output").exists()
