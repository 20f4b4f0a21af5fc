"""One row reaches every sink; the optional ones are imported only when asked for."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.record.recorder import Recorder


def test_rows_reach_the_csv_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Recorder(header(2), tmp_path / "ppo_metrics.csv", tensorboard_dir=tmp_path / "tb") as recorder:
        recorder.record({"update": 1, "entropy": 0.5})
    recorder.close()
    assert len((tmp_path / "ppo_metrics.csv").read_text().splitlines()) == 2
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))


def test_an_unknown_name_reaches_no_sink(tmp_path: Path) -> None:
    with (
        Recorder(["update"], tmp_path / "m.csv") as recorder,
        pytest.raises(ValueError, match="no column for nonsense"),
    ):
        recorder.record({"update": 1, "nonsense": 2})
    assert (tmp_path / "m.csv").read_text() == "update\n"


class Broken:
    """A sink whose end fails."""

    def write(self, row: Mapping[str, float | None]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Fails."""
        raise OSError("cannot close")


def test_every_sink_is_closed_even_if_one_fails(tmp_path: Path) -> None:
    recorder = Recorder(["update"], tmp_path / "m.csv")
    csv_sink = recorder._sinks[0]
    recorder._sinks.append(Broken())
    with pytest.raises(OSError, match="cannot close"):
        recorder.close()
    with pytest.raises(ValueError, match="is closed"):
        csv_sink.write({"update": 1})
    recorder.close()


def test_a_csv_alone_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from vidur_ppo_plugin.record import dashboard, progress\n"
        "from vidur_ppo_plugin.record.recorder import Recorder\n"
        "from vidur_ppo_plugin.record.wandb_sink import open_run\n"
        "with Recorder(['update'], pathlib.Path(sys.argv[1]), wandb_run=open_run()) as r: r.record({'update': 1})\n"
        "print(sorted({'torch', 'wandb', 'tensorboard', 'vidur', 'numpy', 'wandb_workspaces'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.csv")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == "[]"
