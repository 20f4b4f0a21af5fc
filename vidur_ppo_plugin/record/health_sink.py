"""Watches the rows of a run as they are recorded: a check that turns bad is a warning, and an alert in W&B."""

import logging
from collections.abc import Mapping
from typing import Any

from vidur_ppo_plugin.flags import PPOModularFlags

from .health import BAD, History, examine

logger = logging.getLogger(__name__)

# Updates that are looked at: a long run is judged by what it does now.
_MEMORY = 100


class HealthSink:
    """Examines the run after every row."""

    def __init__(self, flags: PPOModularFlags, wandb_run: Any | None = None) -> None:
        self._run = wandb_run
        self._history = History(flags, memory=_MEMORY)
        self._bad: set[str] = set()

    def write(self, row: Mapping[str, float | None]) -> None:
        """Remember a row, and say which checks have turned bad with it."""
        self._history.add(row)
        bad = {found.check: found for found in examine(self._history) if found.verdict == BAD}
        for name in sorted(bad.keys() - self._bad):
            text = f"{bad[name].figure}; turn: {bad[name].advice}"
            logger.warning("health: %s (%s)", name, text)
            if self._run is not None:
                self._run.alert(title=f"ppo_modular: {name}", text=text)
        self._bad = set(bad)

    def close(self) -> None:
        """Nothing is open."""
