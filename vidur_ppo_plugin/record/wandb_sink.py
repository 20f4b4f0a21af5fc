"""Live metrics into the W&B run that Vidur opened, without losing the metrics that Vidur itself logs at the end."""

import sys
from collections.abc import Mapping
from typing import Any

from vidur_ppo_plugin.record.metrics import GROUPS, STEP, wandb_name


def open_run() -> Any | None:
    """The W&B run of this process, or None; does not import wandb unless Vidur already has."""
    return getattr(sys.modules.get("wandb"), "run", None)


class WandbSink:
    """Logs rows to `run`, each plotted over `ppo/update`.

    At the end of a simulation Vidur calls `wandb.log(…, step=0)` about 480 times. W&B's own step has grown with our
    rows by then, and it drops rows of a past step. While this sink is open, a `step=0` is therefore replaced by
    `commit=False`: the values join the row in the making, which W&B writes when the run finishes. Close it after Vidur
    has written its output; a sink closed earlier loses Vidur's metrics.
    """

    def __init__(self, run: Any) -> None:
        import wandb

        self._wandb = wandb
        self._run = run
        self._run_log = run.log
        self._module_log = wandb.log
        run.define_metric(wandb_name(STEP))
        for group in GROUPS:
            run.define_metric(f"{group.prefix}/*", step_metric=wandb_name(STEP))
        # Vidur calls `wandb.log`; a run's own `log` is the same to whoever holds the run. Both live on the instance
        # and on the module, no class is touched.
        self._wrapped = _without_step_zero(self._run_log)
        run.log = self._wrapped
        if _belongs_to(self._module_log, run):
            wandb.log = self._wrapped

    def write(self, row: Mapping[str, float | None]) -> None:
        """Log one row; values that are missing or None are left out."""
        values = {wandb_name(name): float(value) for name, value in row.items() if value is not None}
        self._run_log(values)  # no step: W&B's own counter must not be moved by us

    def close(self) -> None:
        """Give `wandb.log` back; a second call does nothing. The run stays open: it is Vidur's."""
        if vars(self._run).get("log") is self._wrapped:
            del self._run.log
        # After `finish()` W&B has put its own placeholder there: that must stay.
        if self._wandb.log is self._wrapped:
            self._wandb.log = self._module_log


def _belongs_to(log: Any, run: Any) -> bool:
    return getattr(log, "__self__", None) is run


def _without_step_zero(log: Any) -> Any:
    def wrapped(data: dict[str, Any], step: int | None = None, commit: bool | None = None, **others: Any) -> None:
        if step == 0 and commit is None:
            step, commit = None, False
        log(data, step=step, commit=commit, **others)

    return wrapped
