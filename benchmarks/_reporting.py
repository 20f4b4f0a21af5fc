"""What all benchmarks share: their arguments `--json` and `--quick`, and what they print.

Standard output holds the result and nothing else: one JSON object with `--json`, a table for people without. Whatever
is printed while a benchmark measures (Vidur's log, that of its child processes, progress) goes to standard error.
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `description` is the docstring of its file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_json(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest size, to see that it runs: its figures mean nothing, and limits are not judged",
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def parse_options(parser: argparse.ArgumentParser, quick: Mapping[str, Any]) -> argparse.Namespace:
    """The options of the command line; `quick` holds the defaults that count with `--quick`."""
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**quick)
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number of at least 1, as an argument's type."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return number


def report(
    options: argparse.Namespace,
    measure: Callable[[], Result],
    lines_of: Callable[[Result], Iterable[str]],
    missed_by: Callable[[Result], Sequence[str]] = lambda _: (),
) -> int:
    """Measure and print; 1 if `missed_by` names a limit that the result misses and the size is not the smallest."""
    with _stdout_as_stderr():
        result = measure()
    missed = missed_by(result)
    print(json.dumps(_plain(result), allow_nan=False) if options.json else "\n".join(lines_of(result)))
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(missed) and not getattr(options, "quick", False))


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Sends everything that is printed to standard error, also by child processes and compiled code."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _plain(value: Any) -> Any:
    """The value as JSON knows it: numpy's numbers as Python's, null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
