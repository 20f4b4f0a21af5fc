"""The doctor for runs: every check finds what it is about, and nothing in a run that is as it should be."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging_tools import ROOT
from wandb_log import records

from vidur_ppo_plugin import cli
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.record import health
from vidur_ppo_plugin.record.csv_writer import MetricsCsv
from vidur_ppo_plugin.record.metrics import header

Row = dict[str, float | None]
NUM_UPDATES = 24


def row(update: int) -> Row:
    """An update of a run that is well."""
    rng = np.random.default_rng(update)
    latency_s = 4.0 - 0.02 * update + 0.1 * rng.standard_normal()
    return {
        "update": float(update),
        "reward_mean": -latency_s,
        "reward_std": 0.5 + 0.1 * rng.random(),
        "reward_min": -9.0 - rng.random(),
        "reward_max": -1.0 + 0.1 * rng.random(),
        "total_reward": 100.0 + update,
        "absolute_score": 2.0 + rng.random(),
        "delta_score": 0.1 * rng.standard_normal(),
        "entropy": 1.2 - 0.02 * update,
        "approx_kl": 0.005 + 0.005 * rng.random(),
        "clipfrac": 0.1,
        "explained_variance": 0.4,
        "temp_is_pulsing": float(update % 8 in (0, 1) and update >= 8),
        "gain_over_prior": 0.03,
        "latency_mean": latency_s,
        **{f"action_replica_{index}": share for index, share in enumerate((0.3, 0.2, 0.26, 0.24))},
    }


def history(change: Callable[[int], Row] | None = None, **flags: Any) -> health.History:
    """A run that is well, but for what `change` says of each update."""
    rows = [row(update) | (change(update) if change else {}) for update in range(1, NUM_UPDATES + 1)]
    given = {
        "enable_dynamic_temperature": True,
        "pulse_interval": 8,
        "reward_mode": "hybrid",
        "hybrid_credit": "window",
    }
    return of_rows(rows, **{**given, **flags})


def of_rows(rows: list[Row], **flags: Any) -> health.History:
    """A run with these updates."""
    found = health.History(PPOModularFlags(**flags))
    for one in rows:
        found.add(one)
    return found


def verdicts(of: health.History) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in health.examine(of)}


def test_a_run_that_is_well_has_nothing() -> None:
    assert set(verdicts(history()).values()) == {health.OK}


ILLS: dict[str, tuple[Callable[[int], Row], dict[str, Any], str]] = {
    "reward is dead": (lambda _: {"reward_std": 0.0}, {}, health.BAD),
    "reward is saturated": (lambda update: {"reward_max": 0.79 if update % 3 else 0.5}, {}, health.BAD),
    "reward rises with latency": (
        lambda update: {"reward_mean": float(row(update)["latency_mean"] or 0)},
        {},
        health.BAD,
    ),
    "policy is uniform": (lambda _: {"entropy": 0.999 * math.log(4)}, {}, health.BAD),
    "entropy is below its floor": (lambda _: {"entropy": 0.4}, {"entropy_min": 0.5}, health.LOOK),
    "policy has collapsed": (lambda _: {"action_replica_0": 0.75, "action_replica_1": 0.02}, {}, health.BAD),
    "policy never moves": (lambda _: {"approx_kl": 0.0}, {}, health.BAD),
    "updates are too large": (lambda _: {"approx_kl": 0.2}, {}, health.BAD),
    "gradients are cut off": (lambda _: {"clipfrac": 0.81}, {}, health.BAD),
    "critic is no better than a constant": (lambda _: {"explained_variance": -2.8}, {"gamma": 0.99}, health.BAD),
    "pulses never fire": (lambda _: {"temp_is_pulsing": 0.0}, {}, health.BAD),
    "worse than its prior": (lambda _: {"gain_over_prior": -0.1}, {}, health.BAD),
    "delta_score is constant": (lambda _: {"delta_score": 0.0}, {}, health.BAD),
    "scores are negative": (lambda _: {"absolute_score": -0.05, "total_reward": -0.094}, {}, health.LOOK),
}


@pytest.mark.parametrize("name", ILLS)
def test_every_check_finds_its_ill_and_no_other(name: str) -> None:
    change, flags, expected = ILLS[name]
    found = verdicts(history(change, **flags))
    assert found[name] == expected
    assert {check for check, verdict in found.items() if verdict != health.OK} == {name}
    (finding,) = (one for one in health.examine(history(change, **flags)) if one.check == name)
    assert finding.advice and finding.figure


def test_every_check_has_an_ill() -> None:
    assert set(ILLS) == {check.name for check in health.CHECKS}


def test_too_few_updates_and_missing_columns_are_unknown() -> None:
    few = of_rows([row(1)])
    assert set(verdicts(few).values()) == {health.UNKNOWN}
    bare = of_rows([{"update": float(update)} for update in range(8)])
    assert health.BAD not in verdicts(bare).values() and verdicts(bare)["policy is uniform"] == health.UNKNOWN


def test_only_the_latest_updates_are_kept() -> None:
    found = health.History(PPOModularFlags(), memory=3)
    for update in range(5):
        found.add({"update": float(update), **({"clipfrac": 0.5} if update == 1 else {})})
    assert len(found) == 3 and found.column("update").tolist() == [2.0, 3.0, 4.0]
    assert found.column("clipfrac").tolist() == []


def test_a_critic_that_is_not_used_may_explain_nothing() -> None:
    name = "critic is no better than a constant"
    found = verdicts(history(lambda _: {"explained_variance": -2.8}, hybrid_credit="placement"))
    assert found[name] == health.OK


def test_others_on_the_same_requests() -> None:
    findings = health.compare_with(4.1, {"random": 5.0, "round_robin": 4.0, "least_tokens": 4.0}, "least_tokens")
    assert [finding.verdict for finding in findings] == [health.OK, health.BAD, health.LOOK]
    (worse,) = health.compare_with(4.4, {"least_tokens": 4.0}, "least_tokens")
    assert worse.verdict == health.BAD and "+10.0%" in worse.figure


def write(path: Path, change: Callable[[int], Row] | None = None) -> None:
    sink = MetricsCsv(path, header(4))
    for update in range(1, NUM_UPDATES + 1):
        sink.write(row(update) | (change(update) if change else {}))
    sink.close()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    write(good)
    write(bad, lambda _: {"clipfrac": 0.81})
    assert cli.main(["health", str(good)]) == 0
    assert "healthy: 14 ok" in capsys.readouterr().out
    assert cli.main(["health", str(bad)]) == 1
    text = capsys.readouterr().out
    assert "bad     gradients are cut off" in text and "turn: lower `lr`" in text


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, broken, empty = tmp_path / "other.csv", tmp_path / "broken.csv", tmp_path / "empty.csv"
    other.write_text("a,b\n1,2\n")
    write(broken)
    broken.write_text(broken.read_text().replace("\n2,", "\nzwei,"))
    empty.write_text("")
    for path, reason in (
        (tmp_path / "none.csv", "cannot be read"),
        (other, "has a column 'a'"),
        (broken, "line 3: a value is no number"),
        (empty, "it is empty"),
    ):
        assert cli.main(["health", str(path)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error and reason in error and "Traceback" not in error
    flags = tmp_path / health.FLAGS_FILE
    flags.write_text("{")
    write(tmp_path / "good.csv")
    assert cli.main(["health", str(tmp_path / "good.csv")]) == 2
    assert str(flags) in capsys.readouterr().err


def test_flags_beside_the_metrics_count(tmp_path: Path) -> None:
    write(tmp_path / "ppo_metrics.csv", lambda _: {"entropy": 0.4})
    health.save_flags(PPOModularFlags(entropy_min=0.5), tmp_path)
    found = verdicts(health.read(tmp_path / "ppo_metrics.csv"))
    assert found["entropy is below its floor"] == health.LOOK
    # Flags of another version are no error.
    values = json.loads((tmp_path / health.FLAGS_FILE).read_text())
    (tmp_path / health.FLAGS_FILE).write_text(json.dumps({**values, "of_another_version": 1}))
    assert health.read(tmp_path / "ppo_metrics.csv").flags.entropy_min == 0.5


# In a process of its own: W&B keeps what other tests have set.
WATCHED = """
import sys, wandb
from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.record.health_sink import HealthSink

run = wandb.init(project="health", dir=sys.argv[1])
sink = HealthSink(PPOModularFlags(), run)
for update in range(1, 31):
    sink.write({"update": update, "clipfrac": 0.95 if update > 10 else 0.1})
run.finish()
"""


def test_a_check_that_turns_bad_is_said_once(tmp_path: Path) -> None:
    """A warning in the log, and an alert in a real run of W&B, offline."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", WATCHED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if "health:" in line] == [
        "health: gradients are cut off (clipfrac 0.31, limit 0.3; turn: lower `lr`, `epochs`; raise `minibatch_size`)"
    ]
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    alerts = [record.alert for record in records(file) if record.WhichOneof("record_type") == "alert"]
    assert [alert.title for alert in alerts] == ["ppo_modular: gradients are cut off"]
    assert "turn: lower `lr`" in alerts[0].text


def test_the_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    assert text == health.docs(), "run: python -m vidur_ppo_plugin.record.health > docs/health.md"


def test_it_needs_neither_torch_nor_vidur(tmp_path: Path) -> None:
    write(tmp_path / "ppo_metrics.csv")
    code = (
        "import sys; from vidur_ppo_plugin import cli; "
        f"status = cli.main(['health', {str(tmp_path / 'ppo_metrics.csv')!r}]); "
        "assert status == 0 and not {'torch', 'vidur'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
