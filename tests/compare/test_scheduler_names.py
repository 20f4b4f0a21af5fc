"""Schedulers by name: what is accepted, what is suggested, and what a checkpoint brings along."""

from pathlib import Path
from typing import Any

import pytest
from simulation import simulate

from vidur_ppo_plugin.compare.schedulers import KINDS, SchedulerError, SchedulerSpec, check_fits, parse_schedulers

PREFIX = "p_p_o_global_scheduler_modular_config_"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short run with a network, features and a prior that are not the defaults."""
    directory = tmp_path_factory.mktemp("learned")
    options: dict[str, Any] = {
        "save_checkpoint": str(directory / "policy"),
        "hidden_size": 32,
        "prior": "shortest_delay",
        "prior_weight": 2.0,
        "max_queue_requests_per_replica": 2,
        "rollout_len": 20,
    }
    simulate(
        directory,
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=60,
        **{f"{PREFIX}{name}": value for name, value in options.items()},
    )
    return directory / "policy"


def test_names_are_accepted() -> None:
    specs = parse_schedulers(list(KINDS))
    assert [spec.label for spec in specs] == list(KINDS)
    assert [spec.label for spec in specs if not spec.is_deployable] == ["oracle"]
    assert [spec.label for spec in specs if spec.is_learning] == ["ppo_modular"]


def test_flags_for_vidur() -> None:
    assert SchedulerSpec("lor", "lor").vidur_flags(7) == {"global_scheduler_config_type": "lor"}
    split = SchedulerSpec("size_split", "size_split").with_options(threshold_tokens=9)
    assert split.vidur_flags(7, report_delay_s=0.5) == {
        "global_scheduler_config_type": "size_split",
        "size_split_global_scheduler_config_seed": 7,
        "size_split_global_scheduler_config_threshold_tokens": 9,
        "size_split_global_scheduler_config_report_delay_s": 0.5,
    }
    with pytest.raises(SchedulerError, match="has no flags report_delay_s"):
        SchedulerSpec("lor", "lor").vidur_flags(7, report_delay_s=0.5)


def test_a_checkpoint_brings_its_flags(checkpoints: Path) -> None:
    (spec,) = parse_schedulers([f"mine=ppo_modular:{checkpoints}"])
    assert (spec.label, spec.kind, spec.is_learning) == ("mine", "ppo_modular", False)
    assert Path(spec.checkpoint).is_file()
    wanted = {"hidden_size": 32, "prior": "shortest_delay", "prior_weight": 2.0, "max_queue_requests_per_replica": 2}
    assert wanted.items() <= spec.options.items()
    flags = spec.vidur_flags(7)
    assert flags[f"{PREFIX}inference_only"] is True
    assert flags[f"{PREFIX}load_checkpoint"] == spec.checkpoint
    check_fits(spec, "chat", 16)  # one checkpoint works for any number of replicas


def test_a_checkpoint_can_be_asked_for_another_tail(checkpoints: Path) -> None:
    usual, tail = parse_schedulers([f"ppo_modular:{checkpoints}", f"ppo_modular:{checkpoints}@0.25"])
    assert usual.checkpoint == tail.checkpoint and usual.label != tail.label
    assert "tail_preference" not in usual.options and tail.options["tail_preference"] == 0.25
    assert tail.vidur_flags(7)[f"{PREFIX}tail_preference"] == 0.25


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["least_token"], r"unknown scheduler 'least_token' \(did you mean 'least_tokens'\?\); there are random"),
        (["lor:somewhere"], "only ppo_modular takes a checkpoint"),
        (["ppo_modular:"], "expected ppo_modular:CHECKPOINT"),
        (["ppo_modular:/no/such/policy"], r"ppo_modular:/no/such/policy: .*missing"),
        (["ppo_modular:somewhere@1.5"], r"expected ppo_modular:CHECKPOINT@TAIL .* from 0 to 1, got '1.5'"),
        (["ppo_modular:somewhere@tail"], r"with a tail_preference from 0 to 1, got 'tail'"),
        (["lor", "lor"], "have the same label 'lor': give one of them another, LABEL=lor"),
        (["a/b=lor", "a:b=random"], "have the same label"),  # the same as names of files
    ],
)
def test_bad_schedulers_are_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(SchedulerError, match=problem):
        parse_schedulers(texts)


def test_a_damaged_checkpoint_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    (spec,) = parse_schedulers([f"ppo_modular:{checkpoints}"])
    damaged = tmp_path / "damaged.ckpt"
    content = bytearray(Path(spec.checkpoint).read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(SchedulerError, match=r"damaged.ckpt"):
        parse_schedulers([f"ppo_modular:{damaged}"])
