"""Writes the record of decisions in a thread of its own: a slow disk never holds up a request."""

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from vidur_ppo_plugin.record.decision_log import LoggedDecision, decision_line, header_line

from .instruments import Instruments
from .settings import SettingsError

logger = logging.getLogger(__name__)

# Decisions that may wait for the disk; further ones are dropped and counted.
_MOST_WAITING = 10_000


class RecordWriter:
    """Appends decisions to a new file."""

    def __init__(self, path: Path, instruments: Instruments, **facts: Any) -> None:
        """SettingsError if the file is there already or cannot be made; `facts` go into its header."""
        try:
            self._file = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise SettingsError(f"--record {path}: the file is there already; name another") from None
        except OSError as error:
            raise SettingsError(f"--record {path}: cannot be written: {error.strerror}") from error
        self._file.write(header_line(**facts))
        self._file.flush()
        self._dropped = instruments.record_dropped
        self._queue: queue.Queue[LoggedDecision | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name="record", daemon=True)
        self._thread.start()

    def add(self, decision: LoggedDecision) -> None:
        """Queue a decision for writing."""
        try:
            self._queue.put_nowait(decision)
        except queue.Full:
            self._dropped.inc()

    def close(self) -> None:
        """Write what is still queued, and close the file."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _write(self) -> None:
        has_failed = False
        while (decision := self._queue.get()) is not None:
            try:
                self._file.write(decision_line(decision))
                if self._queue.empty():
                    self._file.flush()
                has_failed = False
            except (OSError, ValueError) as error:
                self._dropped.inc()
                if not has_failed:
                    logger.error("the record was not written: %s", error)
                has_failed = True
        self._file.close()
