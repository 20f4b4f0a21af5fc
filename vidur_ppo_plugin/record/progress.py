"""A live line on the terminal; nothing where there is none."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

_USUAL_COLUMNS = 80  # where a terminal does not tell
_CLEAR = "\r\x1b[K"  # to the start of the line, erase to its end


class Progress:
    """Shows decisions, simulated time, latency, entropy, speed and remaining time, a few times a second.

    Silent when `stream` (standard error unless given) is not a terminal, and for good once writing to it fails.
    """

    def __init__(
        self,
        total: int | None = None,
        stream: TextIO | None = None,
        interval_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._started_at_s = clock()
        self._next_at_s = self._started_at_s
        self._first_decisions: int | None = None
        self._is_on = _is_terminal(self._stream)
        self._has_line = False

    def update(
        self,
        decisions: int,
        simulated_s: float | None,
        latency_s: float | None = None,
        entropy: float | None = None,
        note: str = "",
    ) -> None:
        """Tell where the run is. Cheap enough to be called at every decision."""
        if not self._is_on:
            return
        now_s = self._clock()
        if self._first_decisions is None:  # a resumed learner does not start at 0
            self._first_decisions, self._started_at_s = decisions, now_s
        if now_s < self._next_at_s:
            return
        self._next_at_s = now_s + self._interval_s
        elapsed_s = now_s - self._started_at_s
        speed = (decisions - self._first_decisions) / elapsed_s if elapsed_s > 0 else 0.0
        parts = parts_of(decisions, self._total, simulated_s, latency_s, entropy, speed)
        if note:
            parts.insert(3, note)
        self._has_line = True
        self._write(_CLEAR + fit(parts, _columns(self._stream) - 1))  # a full line would wrap, and stay

    def close(self) -> None:
        """Clear the line; a second call does nothing."""
        if self._has_line:
            self._write(_CLEAR)
        self._is_on = self._has_line = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # closed, or the terminal is gone: a display must not end a run
            self._is_on = self._has_line = False


def parts_of(
    decisions: int,
    total: int | None,
    simulated_s: float | None,
    latency_s: float | None,
    entropy: float | None,
    speed: float,
) -> list[str]:
    """What the line says, the most wanted first; what is unknown is left out."""
    parts = [f"{decisions:,}/{total:,} decisions" if total else f"{decisions:,} decisions"]
    if total and speed > 0:
        parts.append(f"ETA {_clock_time(max(0, total - decisions) / speed)}")
    if speed > 0:
        parts.append(f"{speed:,.0f}/s")
    if simulated_s is not None:
        parts.append(f"sim {simulated_s:,.0f} s")
    if latency_s is not None:
        parts.append(f"latency {latency_s:.2f} s")
    if entropy is not None:
        parts.append(f"entropy {entropy:.2f}")
    return parts


def fit(parts: list[str], columns: int) -> str:
    """The parts in one line, without the last ones that have no room."""
    shown = len(parts)
    while shown > 1 and len(", ".join(parts[:shown])) > columns:
        shown -= 1
    return ", ".join(parts[:shown])[: max(1, columns)]


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    except (OSError, ValueError):
        return _USUAL_COLUMNS


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
