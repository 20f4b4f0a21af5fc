"""What learning must never cost: the prior's quality, on the embedded default and on requests it has not seen."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation import simulate

from vidur_ppo_plugin.record.outcome import RunOutcome

PREFIX = "p_p_o_global_scheduler_modular_config_"
QUICKSTART = Path(__file__).parents[2] / "vidur_ppo_plugin" / "quickstart.yaml"


def quickstart(tmp_path: Path, scheduler: str) -> RunOutcome:
    flags = yaml.safe_load(QUICKSTART.read_text())
    flags |= {
        "global_scheduler_config_type": scheduler,
        "synthetic_request_generator_config_num_requests": 1500,
        "metrics_config_write_metrics": False,
    }
    return simulate(tmp_path, **flags)


def test_on_the_embedded_default_it_beats_random_round_robin_and_lor(tmp_path: Path) -> None:
    """The whole run counts, its untrained beginning included."""
    ours = quickstart(tmp_path, "ppo_modular")
    for scheduler in ("random", "round_robin", "lor"):
        theirs = quickstart(tmp_path, scheduler)
        assert [r.prompt_tokens for r in theirs.requests] == [r.prompt_tokens for r in ours.requests]
        assert ours.ttft_s.mean < 0.95 * theirs.ttft_s.mean, scheduler


WORKLOAD: dict[str, Any] = {
    "poisson_request_interval_generator_config_qps": 13.5,
    "uniform_request_length_generator_config_min_tokens": 512,
    "metrics_config_write_metrics": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 1,200 decisions near saturation, at the defaults."""
    directory = tmp_path_factory.mktemp("trained")
    flags = {f"{PREFIX}save_checkpoint": str(directory / "saved"), f"{PREFIX}checkpoint_interval": 0}
    simulate(
        directory,
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=1200,
        synthetic_request_generator_config_seed=1,
        **flags,
        **WORKLOAD,
    )
    return directory / "saved"


@pytest.mark.parametrize("seed", [101, 102])
def test_on_held_out_seeds_it_is_never_much_worse_than_its_prior(tmp_path: Path, trained: Path, seed: int) -> None:
    held_out = {
        "synthetic_request_generator_config_num_requests": 800,
        "synthetic_request_generator_config_seed": seed,
        **WORKLOAD,
    }
    greedy = simulate(
        tmp_path,
        global_scheduler_config_type="ppo_modular",
        **{f"{PREFIX}load_checkpoint": str(trained), f"{PREFIX}inference_only": True},
        **held_out,
    )
    prior = simulate(tmp_path, global_scheduler_config_type="least_tokens", **held_out)
    assert greedy.e2e_s.mean < 1.02 * prior.e2e_s.mean
    # And it is the trained policy that acted.
    assert [r.replica for r in greedy.requests] != [r.replica for r in prior.requests]
