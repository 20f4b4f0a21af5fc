"""TensorBoard files, read back with TensorBoard itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vidur_ppo_plugin.record.tensorboard_sink import TensorboardSink


def test_values_come_back_at_their_update(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorboardSink(tmp_path)
    for update in (3, 4, 5):
        sink.write({"update": update, "entropy": 1.0 / update, "bc_loss": None, "total_reward": -2.0})
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write({"update": 6})
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["ppo/entropy", "ppo/update", "ppo_reward/total_reward"]
    assert [event.step for event in events.Scalars("ppo/entropy")] == [3, 4, 5]
    assert [event.value for event in events.Scalars("ppo/entropy")] == pytest.approx([1 / 3, 1 / 4, 1 / 5])


def test_without_tensorboard_the_error_says_what_to_do(tmp_path: Path) -> None:
    """In an interpreter that has torch and not tensorboard: its folder is hidden from the import system."""
    code = (
        "import importlib.abc, pathlib, sys\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] == 'tensorboard': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from vidur_ppo_plugin.record.tensorboard_sink import TensorboardSink\n"
        "try: TensorboardSink(pathlib.Path(sys.argv[1]))\n"
        "except ImportError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "enable_tensorboard needs tensorboard" in output
    assert "pip install 'vidur-ppo-plugin[tensorboard]'" in output
