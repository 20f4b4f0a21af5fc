"""The progress line on a real (pseudo-)terminal."""

import fcntl
import io
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest

from vidur_ppo_plugin.record.progress import Progress, fit, parts_of


@dataclass
class Terminal:
    """A pseudo-terminal: what a program writes to `stream` is read by whoever sits in front of it."""

    stream: TextIO
    front: int

    def shown(self) -> str:
        """Everything written since the last call."""
        text = b""
        while select.select([self.front], [], [], 0.05)[0]:
            text += os.read(self.front, 65536)
        return text.decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    front, back = pty.openpty()
    with os.fdopen(back, "w") as stream:
        yield Terminal(stream, front)
    os.close(front)


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_line_shows_where_the_run_is(terminal: Terminal) -> None:
    clock = Clock()
    progress = Progress(total=1000, stream=terminal.stream, clock=clock)
    progress.update(0, 0.0)
    terminal.shown()
    clock.now_s += 2.0
    progress.update(250, 12.34, latency_s=3.456, entropy=1.2)
    shown = terminal.shown()
    assert shown.startswith("\r\x1b[K")
    assert "\n" not in shown
    assert shown[4:] == "250/1,000 decisions, ETA 0:06, 125/s, sim 12 s, latency 3.46 s, entropy 1.20"
    progress.close()
    assert terminal.shown() == "\r\x1b[K"
    progress.close()
    progress.update(300, 13.0)
    assert terminal.shown() == ""


def test_the_line_changes_at_most_five_times_a_second(terminal: Terminal) -> None:
    clock = Clock()
    progress = Progress(stream=terminal.stream, clock=clock)
    for decisions in range(1000):  # ten seconds, a hundred decisions each
        clock.now_s += 0.01
        progress.update(decisions, 0.0)
    assert 45 <= terminal.shown().count("\r") <= 51


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (100, "123,456 decisions, sim 789 s, latency 1.00 s, entropy 1.00"),
        (55, "123,456 decisions, sim 789 s, latency 1.00 s"),
        (10, "123,456 d"),
    ],
)
def test_the_line_fits_the_terminal(columns: int, line: str, terminal: Terminal) -> None:
    fcntl.ioctl(terminal.front, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    progress = Progress(stream=terminal.stream)
    progress.update(123456, 789.0, 1.0, 1.0)
    assert terminal.shown() == "\r\x1b[K" + line


def test_a_file_and_a_pipe_stay_empty() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.update(1, 1.0)
    progress.close()
    assert stream.getvalue() == ""


def test_a_closed_stream_is_no_error(terminal: Terminal) -> None:
    clock = Clock()
    stream = open(os.dup(terminal.stream.fileno()), "w")  # noqa: SIM115
    progress = Progress(stream=stream, clock=clock)
    progress.update(1, 1.0)
    stream.close()
    for _ in range(2):
        clock.now_s += 1.0
        progress.update(2, 2.0)
    progress.close()
    Progress(stream=stream).update(1, 1.0)  # closed from the start


def test_a_terminal_that_went_away_is_no_error() -> None:
    front, back = pty.openpty()
    stream = os.fdopen(back, "w")
    progress = Progress(stream=stream)
    os.close(front)
    progress.update(1, 1.0)
    progress.close()
    with pytest.raises(OSError):  # what our line would have met
        stream.write("x")
        stream.flush()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((5, None, 1.0, None, None, 0.0), "5 decisions, sim 1 s"),
        ((5, None, 1.0, None, None, 2.4), "5 decisions, 2/s, sim 1 s"),
        ((10, 100, 1.0, None, None, 1.0), "10/100 decisions, ETA 1:30, 1/s, sim 1 s"),
        ((0, 7300, 1.0, None, None, 1.0), "0/7,300 decisions, ETA 2:01:40, 1/s, sim 1 s"),
        ((20, 10, 1.0, None, None, 1.0), "20/10 decisions, ETA 0:00, 1/s, sim 1 s"),
    ],
)
def test_what_is_unknown_is_left_out(arguments: tuple[int, int | None, float, None, None, float], line: str) -> None:
    assert fit(parts_of(*arguments), 80) == line
