"""The policy that comes with the package, and making one: by name, with its own flags, verified, small."""

import csv
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from simulation import arguments, simulate, vidur_main

from vidur_ppo_plugin import checkpoint, cli, pretrained, shipping
from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import parse_schedulers
from vidur_ppo_plugin.envs.settings import changed
from vidur_ppo_plugin.flags import BALANCED, PPOModularFlags
from vidur_ppo_plugin.learn.checkpoint_flags import adopt_flags, checkpoint_flags
from vidur_ppo_plugin.learn.policy_checkpoint import network_weights
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.pretrained import Pretrained, PretrainedError
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.snapshot import ROWS, ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.scenario import Scenario, load_scenario

PREFIX = "p_p_o_global_scheduler_modular_config_"
# Seconds of training, with a network, a prior and features that are not the defaults.
TRAINING: dict[str, Any] = {
    "seed": 3,
    "decisions": 512,
    "environments": 4,
    "clusters_in_step": 2,
    "episode_rollouts": 2,
    "mixture": [{"scenario": "mixed_long", "tail_preference": [0.0, 1.0]}],
    "policy": {
        "rollout_len": 32,
        "minibatch_size": 64,
        "lr": 0.01,
        "hidden_size": 32,
        "prior_weight": 2.0,
        "max_queue_requests_per_replica": 2,
    },
    "evaluation": {"every_decisions": 0, "seeds": 1, "num_requests": 60},
}


def make(directory: Path, *options: str) -> int:
    return cli.main(["pretrained", "make", str(directory / "config.yaml"), "--run", str(directory / "run"), *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration, its finished run, and the policy `small` made of it."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "config.yaml").write_text(yaml.safe_dump(TRAINING))
    assert make(directory, "--out", str(directory / "made"), "--name", "small", "--workers", "1") == 0
    return directory


@pytest.fixture
def small(trained: Path) -> Pretrained:
    return Pretrained("small", trained / "made")


def ppo(output: Path, flags: dict[str, Any], **more: Any) -> Any:
    own = {f"{PREFIX}{name}": value for name, value in flags.items()}
    return simulate(output, global_scheduler_config_type="ppo_modular", **own, **more)


def agree(policy: Pretrained) -> None:
    """The numpy file decides as the network of the checkpoint does."""
    loaded = checkpoint.load(policy.checkpoint)
    network = ActorCritic(NetworkShape(**loaded.metadata["network"]))
    network.load_state_dict(network_weights(loaded))
    actor, metadata = Actor.load(policy.policy)
    assert metadata["feature_hash"] == loaded.metadata["feature_hash"]
    rng, shape = np.random.default_rng(0), network.shape
    for num_replicas in (2, 16):
        replicas = rng.normal(size=(num_replicas, shape.num_replica_features)).astype(np.float32)
        request = rng.normal(size=shape.num_request_features).astype(np.float32)
        prior = rng.normal(size=num_replicas).astype(np.float32)
        with torch.no_grad():
            encoded = network.encode(torch.tensor(replicas)[None], torch.tensor(request)[None])
            expected = network.logits(encoded, torch.tensor(prior)[None])[0].numpy()
        np.testing.assert_allclose(actor.logits(replicas, request, prior), expected, rtol=1e-3, atol=1e-4)


# --- What comes with the package ---


def test_the_policy_of_the_package_is_whole_small_and_fits() -> None:
    policy = pretrained.find("pretrained")
    assert policy is not None
    metadata = policy.verify()
    assert policy.num_bytes < pretrained.MOST_BYTES
    loaded = checkpoint.load("pretrained")
    assert loaded.path == policy.checkpoint
    assert checkpoint_flags(loaded.metadata)["prior"] == metadata["prior"]  # raises if the features are others
    assert metadata["trained"]["decisions"] > 0 and metadata["trained"]["command"].startswith("vidur-ppo ")
    assert metadata["evaluated"]["changes"]
    agree(policy)


def test_the_policy_of_the_package_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrained", "list"]) == 0
    text = capsys.readouterr().out
    policy = Pretrained("pretrained")
    assert f"sha256 {policy.metadata['checkpoint_sha256'][:16]}" in text
    assert f"{policy.metadata['trained']['decisions']:,} decisions" in text and "e2e_mean" in text


def test_the_policy_of_the_package_routes_by_name(tmp_path: Path) -> None:
    command_line = arguments(
        tmp_path / "out",
        global_scheduler_config_type="ppo_modular",
        **{f"{PREFIX}load_checkpoint": "pretrained", f"{PREFIX}inference_only": True},
    )
    done = vidur_main(command_line)
    assert done.returncode == 0, done.stderr
    assert "loaded the policy" in done.stderr + done.stdout
    by_name, by_file = (
        ppo(tmp_path / "again", {"load_checkpoint": name, "inference_only": True}).requests
        for name in ("pretrained", str(Pretrained("pretrained").checkpoint))
    )
    assert by_name == by_file and len(by_name) == 100


def test_compare_knows_it_by_name() -> None:
    usual, tail = parse_schedulers(["ppo_modular:pretrained", "ppo_modular:pretrained@0.25"])
    assert (usual.label, tail.label) == ("ppo_modular:pretrained", "ppo_modular:pretrained@0.25")
    assert Path(usual.checkpoint) == Path(tail.checkpoint) == Pretrained("pretrained").checkpoint
    assert tail.options["tail_preference"] == 0.25


def changes_of_the_policy(scenario: Scenario, num_seeds: int) -> tuple[dict[str, float], float]:
    """Of mean latency and mean time to first token against least_tokens; and the last replica's share of requests."""
    schedulers = parse_schedulers(["policy=ppo_modular:pretrained", "least_tokens"])
    runs = [[run_cell(scenario, one, seed, engine="twin") for seed in range(60, 60 + num_seeds)] for one in schedulers]
    means = [
        {name: np.mean([run.metrics(scenario)[name] for run in of_one]) for name in ("e2e_mean", "ttft_mean")}
        for of_one in runs
    ]
    share = np.mean([run.requests["replica"] == scenario.num_replicas - 1 for run in runs[0]])
    return {name: float(means[0][name] / means[1][name]) - 1.0 for name in means[0]}, float(share)


def test_the_policy_of_the_package_wins_where_there_is_something_to_win() -> None:
    changes, _ = changes_of_the_policy(load_scenario("mixed_long").at(num_requests=4000), 3)
    assert changes["e2e_mean"] < -0.05 and changes["ttft_mean"] < -0.05


def test_the_policy_of_the_package_prefers_the_faster_of_two() -> None:
    """Short requests, a light load, two replicas of which one has half the speed."""
    scenario = changed(load_scenario("chat"), num_replicas=2, replica_speeds=(1.0, 0.5))
    changes, slow_share = changes_of_the_policy(scenario.at(load=0.3, num_requests=1500), 2)
    assert slow_share < 0.4
    assert changes["e2e_mean"] < 0.0


@pytest.mark.parametrize("tail_preference", [0.0, BALANCED, 1.0])
def test_the_policy_of_the_package_is_not_locked_in_by_history(tail_preference: float) -> None:
    """As recorded by the router: the slow backend has done most and is full, the fast one is idle.

    The policy that was shipped before went on with the slow one.
    """
    figures = {
        **{"outstanding_requests": (0, 11), "running_requests": (0, 11), "context_tokens": (0, 216)},
        **{"kv_blocks_used": (0, 37.6), "kv_blocks_total": (30208, 30208), "decoded_tokens": (0, 209)},
        **{"recent_latency_s": (0.644, 1.315), "completion_rate_per_s": (1.41, 6.996), "token_time_s": (0.011, 0.022)},
        **{"typical_prompt_tokens": (4.997, 1.998), "speed_factor": (1, 1)},
    }
    values = np.array([figures.get(row, (0, 0)) for row in ROWS], np.float64)
    policy = Policy.load(
        Pretrained("pretrained").policy,
        rng=random.Random(0),
        delay_model=DelayModel(1e-4, 1e-4, 1e-7),  # its prior does not ask it
        tail_preference=tail_preference,
    )
    seen = ClusterSnapshot(9.0, values, kv_block_size=16, expected_decode_tokens=59.4, waiting=np.zeros((8, 2)))
    assert policy(seen, RequestInfo(1, 9.0, since_last_arrival_s=0.1, arrival_rate_per_s=9.0)) == 0


# --- The flags of a checkpoint ---


def test_a_checkpoint_brings_its_flags(small: Pretrained, tmp_path: Path) -> None:
    outcome = ppo(tmp_path, {"load_checkpoint": str(small.checkpoint), "inference_only": True})
    assert len(outcome.completed) == 100
    told = {"hidden_size": 32, "prior_weight": 2.0, "max_queue_requests_per_replica": 2}
    again = ppo(tmp_path, {"load_checkpoint": str(small.checkpoint), "inference_only": True, **told})
    assert again.requests == outcome.requests


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden_size": 48}, r"hidden_size is 48, but the checkpoint .* was learned with 32"),
        ({"prior": "least_kv"}, r"prior is 'least_kv', but the checkpoint .* was learned with 'least_tokens'"),
        ({"token_scale": 100.0}, r"token_scale is 100.0, but the checkpoint .* was learned with 4096.0"),
    ],
)
def test_a_flag_that_contradicts_is_refused(small: Pretrained, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=message):
        adopt_flags(PPOModularFlags(load_checkpoint="here", **flags), checkpoint.verify(small.checkpoint))


def test_on_the_command_line_a_default_contradicts_too(small: Pretrained, tmp_path: Path) -> None:
    flags = {f"{PREFIX}load_checkpoint": str(small.checkpoint), f"{PREFIX}hidden_size": 64}
    done = vidur_main(arguments(tmp_path / "out", global_scheduler_config_type="ppo_modular", **flags))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--{PREFIX}hidden_size is 64, but the checkpoint {small.checkpoint} was learned with 32" in done.stderr
    assert not (tmp_path / "out").exists()


def test_learning_goes_on_from_a_policy_with_counters_at_zero(small: Pretrained, tmp_path: Path) -> None:
    flags = {"rollout_len": 20, "minibatch_size": 20, "lr": 1e-5, "guard_interval": 0}
    ppo(tmp_path, {"load_checkpoint": str(small.checkpoint), **flags})
    loaded = checkpoint.load(next(tmp_path.rglob("checkpoints")))
    assert loaded.metadata["num_decisions"] == 100 and loaded.metadata["num_updates"] == 5
    before, after = (network_weights(checkpoint.load(path)) for path in (small.checkpoint, loaded.path))
    for name, weight in before.items():
        assert torch.allclose(weight, after[name], atol=1e-2), name
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


# --- Making one ---


def test_what_is_made_is_whole_and_says_where_it_comes_from(small: Pretrained) -> None:
    metadata = small.verify()
    trained = metadata["trained"]
    assert (trained["decisions"], trained["seed"], trained["scenarios"]) == (512, 3, ["mixed_long"])
    assert trained["command"] == "vidur-ppo pretrained make config.yaml --into-package"
    assert set(metadata["evaluated"]["changes"]) == {"mixed_long"}
    assert metadata["network"]["hidden_size"] == 32 and metadata["prior_weight"] == 2.0
    assert str(small.directory) not in json.dumps(metadata)
    head = small.checkpoint.read_bytes()[:5000]
    assert str(small.directory).encode() not in head
    agree(small)


def test_making_it_again_gives_the_same_bytes(trained: Path, small: Pretrained, tmp_path: Path) -> None:
    assert make(trained, "--out", str(tmp_path), "--name", "small") == 0
    for path in (small.checkpoint, small.policy, small.metadata_file):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_policy_in_the_package_is_found_by_its_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrained, "DIRECTORY", tmp_path)
    assert cli.main(["pretrained", "list"]) == 1
    assert "no policies" in capsys.readouterr().out
    assert make(trained, "--into-package") == 0
    assert checkpoint.load("pretrained").path == tmp_path / "pretrained.ckpt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pretrained.ckpt", "pretrained.json", "pretrained.npz"]
    monkeypatch.chdir(trained)
    with pytest.raises(checkpoint.CheckpointError):  # a Path is no name
        checkpoint.load(Path("pretrained"))


def test_a_comparison_of_this_policy_goes_into_its_metadata(trained: Path, small: Pretrained, tmp_path: Path) -> None:
    def compare(out: str, file: Path) -> Path:
        schedulers = f"least_tokens,mine=ppo_modular:{file}@0.25"
        options = ["--scenarios", "mixed_long", "--reference", "least_tokens", "--quick", "--jobs", "1"]
        assert cli.main(["compare", "--schedulers", schedulers, *options, "--out", str(tmp_path / out)]) == 0
        return tmp_path / out

    results = compare("results", small.checkpoint)
    assert make(trained, "--out", str(tmp_path / "made"), "--name", "small", "--measured", str(results)) == 0
    measured = Pretrained("small", tmp_path / "made").verify()["measured"]
    assert "against least_tokens on 1 held-out seeds" in measured["what"]
    assert set(measured["changes"]) == {"mixed_long@0.25"}
    assert set(measured["changes"]["mixed_long@0.25"]) == {"e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99"}


WRONG: dict[str, tuple[list[str], str]] = {
    "nowhere": ([], "give either --out DIR or --into-package"),
    "both": (["--out", "x", "--into-package"], "give either --out DIR or --into-package"),
    "another configuration": (["--out", "x", "--seed", "4"], r"another configuration \(different: seed\)"),
    "another comparison": (["--out", "x", "--measured", "nowhere"], "nowhere/metadata.json: not the metadata"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_made_is_refused(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(trained, *options) == 2

    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.*"))


def test_a_policy_that_is_too_large_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipping, "MOST_BYTES", 1000)
    assert make(trained, "--out", str(tmp_path)) == 2
    assert "at most 1,000 are shipped" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _cut(policy: Pretrained) -> None:
    policy.policy.write_bytes(policy.policy.read_bytes()[:-1])


def _remove(policy: Pretrained) -> None:
    policy.checkpoint.unlink()


def _forget(policy: Pretrained) -> None:
    policy.metadata_file.write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"small.npz: is not what small.json describes"),
        (_remove, "small.ckpt: cannot"),
        (_forget, "small.json: cannot be read"),
    ],
)
def test_damage_is_noticed(
    small: Pretrained, tmp_path: Path, damage: Callable[[Pretrained], None], message: str
) -> None:
    shutil.copytree(small.directory, tmp_path / "copy")
    policy = Pretrained("small", tmp_path / "copy")
    policy.verify()
    damage(policy)
    with pytest.raises(PretrainedError, match=message):
        policy.verify()


# --- Learning on from one ---


def test_learning_that_ruins_the_policy_is_undone(small: Pretrained, tmp_path: Path) -> None:
    """Nothing but entropy counts: without the guard, requests end up anywhere."""
    flags = {"rollout_len": 20, "minibatch_size": 20, "guard_interval": 1, "lr": 0.03, "entropy_coef": 100.0}
    flags |= {"max_grad_norm": 100.0, "kl_coef": 0.0, "enable_adaptive_kl": False}
    busy = {
        "poisson_request_interval_generator_config_qps": 10.0,
        "synthetic_request_generator_config_num_requests": 300,
    }

    def learn(name: str, source: Path, **changes: Any) -> Path:
        own = {"load_checkpoint": str(source), "save_checkpoint": str(tmp_path / name), **flags, **changes}
        ppo(tmp_path / f"{name}_run", own, **busy)
        return tmp_path / name

    def latency_s(source: Path) -> float:
        own = {"load_checkpoint": str(source), "inference_only": True}
        return float(ppo(tmp_path / "use", own, **busy).e2e_s.mean)

    loaded_s = latency_s(small.checkpoint)
    guarded = learn("guarded", small.checkpoint)
    (table,) = (tmp_path / "guarded_run").rglob("ppo_metrics.csv")
    rows = list(csv.DictReader(table.open()))
    assert float(rows[-1]["guard_reverts"]) >= 1
    assert any(float(row["gain_over_loaded"]) < 0 for row in rows)
    assert latency_s(guarded) < 1.01 * loaded_s
    assert latency_s(learn("again", guarded)) < 1.01 * loaded_s  # a run that goes on is guarded too
    assert latency_s(learn("unguarded", small.checkpoint, guard_interval=0)) > 1.05 * loaded_s


def test_where_no_twin_covers_the_cluster_credit_guards(small: Pretrained, tmp_path: Path) -> None:
    flags = {"load_checkpoint": str(small.checkpoint), "rollout_len": 20, "minibatch_size": 20, "guard_interval": 2}
    ppo(tmp_path, {**flags, "lr": 0.3}, replica_scheduler_config_type="mnemosyne_edf")
    (table,) = tmp_path.rglob("ppo_metrics.csv")
    assert any(row["guard_change"] for row in csv.DictReader(table.open()))
