"""`vidur-ppo export` and `vidur-ppo dashboard`: what they write and show, and what they refuse."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulation import simulate

from vidur_ppo_plugin import checkpoint, cli
from vidur_ppo_plugin.learn import export
from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.record import dashboard
from vidur_ppo_plugin.record.metrics import GROUPS, header, wandb_name
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable

PREFIX = "p_p_o_global_scheduler_modular_config_"


def train(directory: Path, **flags: Any) -> Path:
    """A short simulation that learns; returns the directory of its checkpoints."""
    saved = directory / "saved"
    own = {"rollout_len": 32, "lr": 0.01, "base_temperature": 1.5, "save_checkpoint": str(saved), **flags}
    prefixed = {f"{PREFIX}{name}": value for name, value in own.items()}
    simulate(directory, global_scheduler_config_type="ppo_modular", metrics_config_write_metrics=False, **prefixed)
    return saved


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), trend_window=16, prior_weight=2.0)


def network_of(path: Path) -> tuple[ActorCritic, checkpoint.Checkpoint]:
    loaded = checkpoint.load(path)
    network = ActorCritic(NetworkShape(**loaded.metadata["network"]))
    network.load_state_dict(loaded.state["agent"]["ppo"]["network"])
    return network, loaded


def observations(shape: NetworkShape) -> Iterator[tuple[Any, Any, Any]]:
    """Random inputs for several numbers of replicas (a flat network knows one only)."""
    rng = np.random.default_rng(0)
    for num_replicas in [shape.flat_replicas] if shape.flat_replicas else [1, 4, 9]:
        sizes = ((num_replicas, shape.num_replica_features), (shape.num_request_features,), (num_replicas,))
        replicas, request, prior = (rng.normal(size=size).astype(np.float32) for size in sizes)
        yield replicas, request, prior


def assert_same_logits(network: ActorCritic, actor: Actor) -> None:
    for replicas, request, prior in observations(network.shape):
        with torch.no_grad():
            encoded = network.encode(torch.from_numpy(replicas)[None], torch.from_numpy(request)[None])
            expected = network.logits(encoded, torch.from_numpy(prior)[None])[0].numpy()
        actual = actor.logits(replicas, request, prior)
        assert np.abs(expected - prior).max() > 1e-3  # it has learned: without that, any actor would be equal
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_exported_policy_decides_as_the_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.npz"
    assert cli.main(["export", str(trained), str(out)]) == 0
    network, loaded = network_of(trained)
    assert capsys.readouterr().out == (
        f"{out}: the policy after 3 updates, 100 decisions "
        f"(prior least_tokens, features {loaded.metadata['feature_hash']})\n"
    )
    actor, metadata = Actor.load(out)
    assert_same_logits(network, actor)
    assert (metadata["prior"], metadata["prior_weight"], metadata["num_updates"]) == ("least_tokens", 2.0, 3)
    assert metadata["temperature"] == loaded.state["agent"]["temperature"]["temperature"] > 1.0
    assert list(tmp_path.iterdir()) == [out]


def test_the_metadata_rebuilds_the_feature_table(trained: Path, tmp_path: Path) -> None:
    metadata = export.export_policy(trained, tmp_path / "policy.npz")
    features = metadata["features"]
    table = FeatureTable(
        num_waiting_slots=features["num_waiting_slots"],
        trend_window=features["trend_window"],
        scales=FeatureScales(**features["scales"]),
    )
    assert table.trend_window == 16
    assert table.hash == metadata["feature_hash"]
    assert [feature.name for feature in table.replica_features] == features["replica"]
    assert [feature.name for feature in table.request_features] == features["request"]


def test_the_exported_policy_runs_without_torch(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy.npz"
    export.export_policy(trained, out)
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['vidur'] = None\n"
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from vidur_ppo_plugin.policy.actor import Actor\n"
        "actor, metadata = Actor.load(Path(sys.argv[1]))\n"
        "sizes = (2, len(metadata['features']['replica'])), len(metadata['features']['request']), 2\n"
        "print(*actor.logits(*(np.ones(size, dtype=np.float32) for size in sizes)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    actor, _ = Actor.load(out)
    sizes = (2, actor.shape["num_replica_features"]), actor.shape["num_request_features"], 2
    inputs = [np.ones(size, dtype=np.float32) for size in sizes]
    np.testing.assert_allclose([float(text) for text in done.stdout.split()], actor.logits(*inputs), atol=1e-6)


def test_a_name_in_a_directory_and_an_existing_file(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy.npz"
    out.write_text("an older policy")
    assert cli.main(["export", str(trained / "best"), str(out)]) == 0
    assert Actor.load(out)[1]["num_updates"] == network_of(trained / "best")[1].metadata["num_updates"]


def test_a_flat_network_is_exported(tmp_path: Path) -> None:
    saved = train(tmp_path, enable_flat_network=True)
    export.export_policy(saved, tmp_path / "policy.npz")
    assert_same_logits(network_of(saved)[0], Actor.load(tmp_path / "policy.npz")[0])


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_attention_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = train(tmp_path, attention_heads=2), tmp_path / "policy.npz"
    error = refused(["export", str(saved), str(out)], capsys)
    assert "cannot be exported: attention_heads must be 0 for an actor without torch" in error
    assert not out.exists()


def test_missing_and_wrong_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "policy.npz")
    missing, text, other = tmp_path / "missing", tmp_path / "text.ckpt", tmp_path / "other"
    text.write_text("hello")
    checkpoint.save(other, checkpoint.LAST, {"step": 1}, metadata={"prior": "none"})
    assert f"{missing}: missing" in refused(["export", str(missing), out], capsys)
    assert f"{text}: not a checkpoint of ours" in refused(["export", str(text), out], capsys)
    error = refused(["export", str(other), out], capsys)
    assert "last-00000001.ckpt is no checkpoint of ppo_modular" in error and "network" in error
    assert not Path(out).exists()


def test_bad_destinations_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing.ckpt")
    assert f"{tmp_path} is a directory" in refused(["export", missing, str(tmp_path)], capsys)
    assert f"{missing} must end in .npz" in refused(["export", missing, missing], capsys)
    nowhere = tmp_path / "nowhere" / "policy.npz"
    assert f"there is no directory {nowhere.parent}" in refused(["export", missing, str(nowhere)], capsys)


def test_a_failed_write_leaves_the_old_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "policy.npz"
    out.write_text("an older policy")

    def half(self: Actor, path: Path, metadata: dict[str, Any]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Actor, "save", half)
    error = refused(["export", str(trained), str(out)], capsys)
    assert error == f"error: {out} was not written: No space left on device\n"
    assert out.read_text() == "an older policy"
    assert list(tmp_path.iterdir()) == [out]


# --- vidur-ppo dashboard ---


def test_without_save_the_view_is_described_offline() -> None:
    """In a new process, where importing wandb in any form would be an error."""
    code = (
        "import sys\n"
        "sys.modules['wandb'] = sys.modules['wandb_workspaces'] = None\n"
        "from vidur_ppo_plugin import cli\n"
        "sys.exit(cli.main(['dashboard', '--project', 'routing', '--entity', 'someone', '--replicas', '3']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "The view 'vidur-ppo' of someone/routing, 3 replicas, over ppo/update:"
    assert [line for line in lines if line in {group.title for group in GROUPS}] == [group.title for group in GROUPS]
    shown = done.stdout.replace(",", " ").split()
    for name in header(3):
        assert wandb_name(name) in [word.rstrip(":") for word in shown], name
    assert lines[-1].startswith("Nothing was saved")


def test_with_save_the_view_is_saved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    saved: list[tuple[str, str, int]] = []

    def save(entity: str, project: str, num_replicas: int) -> str:
        saved.append((entity, project, num_replicas))
        return "https://wandb.ai/view"

    monkeypatch.setattr(dashboard, "save", save)
    monkeypatch.setattr(dashboard, "default_entity", lambda: "me")
    assert cli.main(["dashboard", "--project", "routing", "--save"]) == 0
    assert cli.main(["dashboard", "--project", "routing", "--entity", "team", "--replicas", "8", "--save"]) == 0
    assert capsys.readouterr().out == "https://wandb.ai/view\n" * 2
    assert saved == [("me", "routing", 4), ("team", "routing", 8)]


def test_the_dashboard_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--replicas must be >= 1, got 0" in refused(["dashboard", "--project", "p", "--replicas", "0"], capsys)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dashboard"])
    assert stopped.value.code == 2
    assert "--project" in capsys.readouterr().err

    def fail() -> str:
        raise ValueError("W&B knows no default entity here: give --entity")

    monkeypatch.setattr(dashboard, "default_entity", fail)
    error = refused(["dashboard", "--project", "p", "--save"], capsys)
    assert error == "error: the view was not saved: W&B knows no default entity here: give --entity\n"
