"""Checkpoints survive: round trips, kills, damage, full disks; and what is wrong is refused with its reason."""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.checkpoint import CheckpointError


def test_every_admissible_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "none and flags": [None, True, False],
        "ints": (0, -1, 2**127),
        "floats": [0.1, -0.0, math.inf],
        "text": ["größer", b"\x00\xff"],
        "nested": {"a": {1: [(), {}, []]}},
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "tensors": [torch.arange(6, dtype=kind).reshape(2, 3) for kind in (torch.float64, torch.bfloat16, torch.int64)],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty tensor": torch.empty(0, 4),
        "arrays": [np.arange(6, dtype=kind).reshape(3, 2) for kind in ("float64", "float32", "int8", "uint64", ">i4")],
        "masks": [np.array([True, False]), torch.tensor([True, False])],
        "names": np.array(["a", "bcd"]),
        "shapes": [np.zeros((0, 3)), np.array(2.5)],
        "strided": np.arange(10)[::2],
        "scalars": [np.float32(0.1), np.float64(0.1), np.int64(7), np.bool_(True)],
    }  # fmt: skip
    path = checkpoint.save(tmp_path, "last", state, metadata={"counters": {"updates": 3}, "hash": "abc"})
    loaded = checkpoint.load(path)
    assert plain(loaded.state) == plain(state)
    assert loaded.path == path
    assert loaded.metadata["counters"] == {"updates": 3}
    assert set(loaded.metadata) == {"counters", "hash", "versions", "saved_at"}
    assert loaded.metadata["versions"]["torch"] == str(torch.__version__)
    loaded.state["arrays"][0][0, 0] = 1.0  # arrays can be written to


def plain(value: Any) -> Any:
    """A form in which equality means the same types and the same bits."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, value.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(item) for item in value]
    return type(value), repr(value)


def test_a_view_is_saved_without_what_it_views(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, "last", {"row": torch.zeros(1000, 1000)[0]}, metadata={})
    assert path.stat().st_size < 20_000


def test_a_network_and_its_optimiser_continue_bit_for_bit(tmp_path: Path) -> None:
    def learner() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator]:
        network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
        return network, torch.optim.Adam(network.parameters(), lr=0.01), torch.Generator().manual_seed(5)

    def step(network: torch.nn.Module, optimiser: torch.optim.Optimizer, noise: torch.Generator) -> None:
        optimiser.zero_grad()
        network(torch.randn(8, 4, generator=noise)).square().mean().backward()
        optimiser.step()

    first, second = learner(), learner()
    step(*first)
    state = {"network": first[0].state_dict(), "optimiser": first[1].state_dict()}
    state["random"] = first[2].get_state()
    loaded = checkpoint.load(checkpoint.save(tmp_path, "last", state, metadata={})).state
    second[0].load_state_dict(loaded["network"])
    second[1].load_state_dict(loaded["optimiser"])
    second[2].set_state(loaded["random"])
    step(*first)
    step(*second)
    assert plain(second[0].state_dict()) == plain(first[0].state_dict())


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_generations_are_kept(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint.save(tmp_path, "last", {"number": number}, metadata={})
    checkpoint.save(tmp_path, "final", {"number": 9}, metadata={})
    assert files(tmp_path) == ["final-00000001.ckpt", "last-00000003.ckpt", "last-00000004.ckpt"]
    assert checkpoint.load(tmp_path).state == {"number": 4}
    assert checkpoint.load(str(tmp_path / "final")).state == {"number": 9}
    assert checkpoint.load(tmp_path / "last-00000003.ckpt").state == {"number": 3}
    assert checkpoint.newest(tmp_path) == tmp_path / "last-00000004.ckpt"
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_best_is_the_best_so_far(tmp_path: Path) -> None:
    saved = [
        checkpoint.save_best(tmp_path, {"n": n}, metadata={}, metric=metric)
        for n, metric in enumerate([5.0, 6.0, 4.0, math.nan, 4.0, 3.0])
    ]
    assert [path is not None for path in saved] == [True, False, True, False, False, True]
    assert checkpoint.load(tmp_path / "best").state == {"n": 5}
    assert checkpoint.load(tmp_path / "best").metadata["best_metric"] == 3.0
    assert len(files(tmp_path)) == 1
    assert checkpoint.save_best(tmp_path, {"n": 6}, metadata={}, metric=8.0, lower_is_better=False) is not None


def test_an_unreadable_best_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "best-00000001.ckpt").write_bytes(b"")
    assert checkpoint.save_best(tmp_path, {"n": 2}, metadata={}, metric=2.0) is not None
    assert "its metric cannot be read" in caplog.text
    assert checkpoint.load(tmp_path / "best").state == {"n": 2}


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_names_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name has letters"):
        checkpoint.save(tmp_path, name, {}, metadata={})


def test_staging_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    host = os.uname().nodename
    dead = tmp_path / f".last-00000001.ckpt.tmp-{host}-{process.pid}"
    alive = tmp_path / f".last-00000001.ckpt.tmp-{host}-{os.getppid()}"
    elsewhere = tmp_path / ".last-00000001.ckpt.tmp-another-host-1"
    long_ago = tmp_path / ".last-00000002.ckpt.tmp-another-host-1"
    for path in (dead, alive, elsewhere, long_ago):
        path.write_bytes(b"half")
    os.utime(long_ago, (0, 0))
    checkpoint.save(tmp_path, "last", {}, metadata={})
    assert sorted(path for path in tmp_path.iterdir() if path.name.startswith(".")) == sorted([alive, elsewhere])


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"policy": {"actor.0.weight": torch.tensor([1.0, math.nan])}}, "the tensor policy.actor.0.weight has NaN"),
        ({"optimiser": {"state": {0: {"step": torch.tensor(math.inf)}}}}, "the tensor optimiser.state.0.step has NaN"),
        ({"scales": [np.array([-math.inf])]}, "the array scales.0 has NaN"),
        ({"mean": math.nan}, "mean is NaN"),
        ({"mean": np.float64("nan")}, "the array mean has NaN"),
        ({"a": (1, object())}, "a.1 is a object"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({"a": {"__numpy__": 3}}, "a has the key '__numpy__'"),
        ({"a": np.array([object()])}, "a is an array of object"),
        ({"a": torch.eye(2).to_sparse()}, "a is a tensor with the layout torch.sparse"),
    ],
)
def test_what_cannot_be_saved_is_named_and_changes_nothing(state: dict[str, Any], reason: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, "last", {"good": 1}, metadata={})
    with pytest.raises(CheckpointError, match=f"not saved: {reason}"):
        checkpoint.save(tmp_path, "last", state, metadata={})
    assert files(tmp_path) == ["last-00000001.ckpt"]
    assert checkpoint.load(tmp_path).state == {"good": 1}


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": math.nan}])
def test_metadata_must_be_json(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="metadata of a checkpoint must be JSON"):
        checkpoint.save(tmp_path, "last", {}, metadata=metadata)
    assert files(tmp_path) == []


KILLS = 12


def weights_of(number: int) -> torch.Tensor:
    return torch.arange(1_250_000, dtype=torch.float32) + number  # 5 MB


def save_for_ever(directory: Path, first: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    for number in range(first, first + 10_000):
        checkpoint.save(directory, "last", {"number": number, "weights": weights_of(number)}, metadata={})
        connection.send(number)


def is_writing(directory: Path) -> bool:
    return any(name.startswith(".") for name in os.listdir(directory))


def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # imports torch once, not once a kill
    context.set_forkserver_preload(["torch", "numpy"])
    moments = random.Random(0)
    kills = interrupted = number = 0
    while kills < KILLS or (interrupted == 0 and kills < 10 * KILLS):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(tmp_path, number + 1, sender))
        process.start()
        sender.close()
        acknowledged = receiver.recv()  # at least one save is complete
        time.sleep(moments.uniform(0.0, 0.1))
        while kills % 2 and not is_writing(tmp_path):  # every other one is aimed at the middle of a write
            time.sleep(0.0002)
        process.kill()
        process.join()
        kills += 1
        with contextlib.suppress(EOFError):
            while True:
                acknowledged = receiver.recv()
        receiver.close()
        loaded = checkpoint.load(tmp_path).state
        number = loaded["number"]
        assert number in (acknowledged, acknowledged + 1)  # the rename may precede the message
        assert torch.equal(loaded["weights"], weights_of(number))
        interrupted += is_writing(tmp_path)
    assert interrupted > 0  # or the test has tested nothing
    with pytest.raises(ProcessLookupError):  # the fork server reaps it; until then it counts as alive
        while process.pid:
            os.kill(process.pid, 0)
    checkpoint.save(tmp_path, "last", {}, metadata={})
    assert len(files(tmp_path)) == 2  # and left nothing behind


def test_a_full_disk_is_an_error_and_keeps_the_old_one(tmp_path: Path) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    checkpoint.save(tmp_path, "last", {"good": 1}, metadata={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="earlier ones are untouched") as caught:
            checkpoint.save(tmp_path, "last", {"large": torch.zeros(100_000)}, metadata={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "last-00000002.ckpt")
    assert files(tmp_path) == ["last-00000001.ckpt"]
    assert checkpoint.load(tmp_path).state == {"good": 1}


def test_a_forbidden_directory_is_an_error_and_keeps_the_old_one() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # pytest's own lies in one that only its owner may enter
        checkpoint.save(Path(name), "last", {"good": 1}, metadata={})
        os.chmod(name, 0o555)
        try:
            os.seteuid(65534 if user == 0 else user)  # root may write anywhere
            with pytest.raises(PermissionError, match="earlier ones are untouched"):
                checkpoint.save(Path(name), "last", {"good": 2}, metadata={})
        finally:
            os.seteuid(user)
            os.chmod(name, 0o755)
        assert checkpoint.load(name).state == {"good": 1}


def two_generations(directory: Path) -> tuple[Path, Path]:
    old = checkpoint.save(directory, "last", {"x": torch.arange(1000)}, metadata={})
    return old, checkpoint.save(directory, "last", {"x": torch.arange(1000) + 1}, metadata={})


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    return str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.02, 0.5, 0.9999])
def test_a_truncated_file_is_refused_and_the_previous_one_offered(share: float, tmp_path: Path) -> None:
    old, new = two_generations(tmp_path)
    content = new.read_bytes()
    new.write_bytes(content[: int(share * len(content))])
    message = refusal(tmp_path)
    assert str(new) in message and "truncated" in message
    assert f"use {old} instead" in message
    assert checkpoint.load(old).state["x"][0] == 0


def test_a_flipped_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    old, new = two_generations(tmp_path)
    content = new.read_bytes()
    places = sorted({*range(0, 120, 7), *range(120, len(content), 173), len(content) - 1})
    for place in places:
        new.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        assert f"use {old} instead" in refusal(new), place
    new.write_bytes(content + b"more")
    assert "longer than it was written" in refusal(new)
    new.write_bytes(content)
    checkpoint.load(new)


def test_the_reasons_of_damage(tmp_path: Path) -> None:
    _, new = two_generations(tmp_path)
    content = new.read_bytes()
    new.write_bytes(content[:-5] + b"\x00\x01\x02\x03\x04")
    assert "its state does not match its hash" in refusal(new)
    new.write_bytes(content.replace(b"saved_at", b"saved_on"))
    assert "its manifest does not match its hash" in refusal(new)
    new.write_bytes(content.replace(b"checkpoint 1 ", b"checkpoint 2 ", 1))
    assert "has format version 2, this package reads 1" in refusal(new)
    torch.save({"x": 1}, tmp_path / "model.pt")
    assert f"checkpoint {tmp_path / 'model.pt'}: not a checkpoint of ours" in refusal(tmp_path / "model.pt")


def test_missing_ones_are_named(tmp_path: Path) -> None:
    assert "missing (there is no such file, directory or name)" in refusal(tmp_path / "nothing")
    assert f"missing ({tmp_path} holds no 'last')" in refusal(tmp_path)
    best = checkpoint.save_best(tmp_path, {}, metadata={}, metric=1.0)
    assert f"use {best} instead" in refusal(tmp_path)


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "was-here"
    plain = tmp_path / "plain.ckpt"
    plain.write_bytes(pickle.dumps(Malicious(target)))
    assert "not a checkpoint of ours" in refusal(plain)

    forged = tmp_path / "last-00000001.ckpt"  # with all hashes right
    torch.save({"x": Malicious(target)}, tmp_path / "payload")
    payload = (tmp_path / "payload").read_bytes()
    manifest = {"payload_sha256": hashlib.sha256(payload).hexdigest(), "payload_bytes": len(payload), "metadata": {}}
    line = json.dumps(manifest).encode() + b"\n"
    forged.write_bytes(b"vidur-ppo-checkpoint 1 " + hashlib.sha256(line).hexdigest().encode() + b"\n" + line + payload)
    assert "its state is not plain data (it wants to run posix.mkdir)" in refusal(forged)
    assert not target.exists()


def test_differences_are_named_with_both_values() -> None:
    metadata = {"features": "abc", "shape": [1, 2], "extra": 1}
    checkpoint.check_compatible(metadata, {"features": "abc", "shape": (1, 2)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_compatible(metadata, {"features": "abd", "shape": (1, 3), "hidden": 64})
    message = str(caught.value)
    assert "features: the checkpoint has 'abc', this run needs 'abd'" in message
    assert "shape: the checkpoint has [1, 2], this run needs [1, 3]" in message
    assert "hidden: the checkpoint has nothing, this run needs 64" in message
