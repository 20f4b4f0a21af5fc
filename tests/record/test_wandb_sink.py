"""Real W&B, offline: our live rows and Vidur's own metrics end up in one file, which is read back here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb_log import history, records

ROOT = Path(__file__).parents[2]

# Vidur's own code logs at the end, as it does after a simulation: distributions, plots and tables, all with step=0.
SCRIPT = """
import sys, numpy as np, wandb
from pathlib import Path
from vidur.metrics.cdf_sketch import CDFSketch
from vidur.metrics.data_series import DataSeries
from vidur_ppo_plugin.record.recorder import Recorder
from vidur_ppo_plugin.record.wandb_sink import open_run

def vidur_logs_at_the_end():
    sketch = CDFSketch("request_e2e_time", True, False)
    for value in range(1, 100):
        sketch.put(value / 10)
    sketch.plot_cdf(sys.argv[1], "request_e2e_time", "Time (sec)")
    series = DataSeries("Request Id", "request_wait", None, True, False)
    for index in range(20):
        series.put(index, index / 7)
    series.plot_cdf(sys.argv[1], "request_wait", "Time (sec)")

def run(kind):
    wandb.init(project="test", group="group", name=kind)
    original = wandb.log
    row = lambda update: {"update": update, "entropy": 1 / update, "bc_loss": None, "latency_p99": float("nan")}
    if kind == "ours":
        with Recorder(list(row(1)), Path(sys.argv[1]) / "m.csv", wandb_run=open_run()) as recorder:
            for update in range(1, 6):
                recorder.record(row(update))
            vidur_logs_at_the_end()
            wandb.log({"other": 1}, step=50)  # any other step is none of our business
        recorder.close()
        assert wandb.log == original and wandb.run.log == original and "log" not in vars(wandb.run)
    elif kind == "finished first":
        recorder = Recorder(list(row(1)), Path(sys.argv[1]) / "n.csv", wandb_run=open_run())
        recorder.record(row(1))
    elif kind == "naive":
        for update in range(1, 6):
            wandb.log({"ppo/update": update})
        vidur_logs_at_the_end()
    else:
        vidur_logs_at_the_end()
    directory = wandb.run.dir
    wandb.finish()
    if kind == "finished first":
        placeholder = wandb.log
        recorder.close()
        assert wandb.log is placeholder
    print(kind, directory, sep="\\t")

for kind in ("vidur alone", "naive", "ours", "finished first"):
    run(kind)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    directory = tmp_path_factory.mktemp("wandb")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
        "WANDB_SILENT": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)], env=environment, cwd=directory, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if "\t" in line:
            kind, path = line.split("\t")
            (file,) = Path(path).parent.glob("*.wandb")
            found[kind] = records(file)
    return found


def keys_of_vidur(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value for row in rows for key, value in row.items() if not key.startswith(("_", "ppo")) and key != "other"
    }


def test_our_rows_are_all_there(runs: dict[str, list[Any]]) -> None:
    rows = [row for row in history(runs["ours"]) if "ppo/update" in row and "ppo/entropy" in row]
    assert [row["ppo/update"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["ppo/entropy"] for row in rows] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert not any("ppo/bc_loss" in row for row in rows)


def test_vidurs_metrics_are_all_there(runs: dict[str, list[Any]]) -> None:
    alone, ours = keys_of_vidur(history(runs["vidur alone"])), keys_of_vidur(history(runs["ours"]))
    assert len(alone) >= 10
    assert set(ours) == set(alone)
    numbers = {key: value for key, value in alone.items() if isinstance(value, float)}
    assert len(numbers) >= 8
    assert {key: ours[key] for key in numbers} == numbers


def test_without_the_sink_they_are_lost(runs: dict[str, list[Any]]) -> None:
    """The reason for the sink: should W&B or Vidur change, this says that it may go."""
    rows = history(runs["naive"])
    assert [row["ppo/update"] for row in rows] == [1, 2, 3, 4, 5]
    assert keys_of_vidur(rows) == {}


def test_another_step_passes_through(runs: dict[str, list[Any]]) -> None:
    (row,) = [row for row in history(runs["ours"]) if "other" in row]
    assert row["_step"] == 50


def test_our_metrics_are_plotted_over_the_update(runs: dict[str, list[Any]]) -> None:
    defined = [record.metric for record in runs["ours"] if record.WhichOneof("record_type") == "metric"]
    over = {metric.glob_name: metric.step_metric for metric in defined if metric.glob_name}
    assert over["ppo/*"] == over["ppo_reward/*"] == over["ppo_actions/*"] == "ppo/update"
    assert "ppo/update" in {metric.name for metric in defined}
