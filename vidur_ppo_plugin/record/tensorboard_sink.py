"""Metrics for TensorBoard (optional)."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vidur_ppo_plugin.record.metrics import STEP, wandb_name

# Where the user switches it on: named in the error.
FLAG = "--p_p_o_global_scheduler_modular_config_enable_tensorboard"


class TensorboardSink:
    """Writes rows as scalars under the W&B names, at the step of their `update`."""

    def __init__(self, directory: Path) -> None:
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ImportError(
                f"{FLAG} needs tensorboard: pip install 'vidur-ppo-plugin[tensorboard]' ({error})"
            ) from error
        self._writer: Any | None = module.SummaryWriter(log_dir=str(directory))
        self._rows = 0

    def write(self, row: Mapping[str, float | None]) -> None:
        """Write one row; values that are missing or None are left out."""
        if self._writer is None:
            raise ValueError("the TensorBoard writer is closed")
        self._rows += 1
        update = row.get(STEP)
        step = self._rows if update is None else int(update)
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(wandb_name(name), float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
