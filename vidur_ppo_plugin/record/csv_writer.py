"""The metrics of a run as a CSV file: one row an update, on the disk as soon as it is written."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class MetricsCsv:
    """Appends rows to a CSV file whose header is `names`.

    A file that is already there is continued if it has the same header. One with fewer columns, of an earlier version,
    gets those that it lacks, empty. Others are refused: metrics of an earlier run are never overwritten. A last line
    without its end, left by a power failure, is cut off first.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        duplicates = sorted({name for name in names if list(names).count(name) > 1})
        if duplicates or not names:
            raise ValueError(f"{path}: a header needs names, each once, got {duplicates or 'none'}")
        self._names = list(names)
        self._known = frozenset(names)
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._add_columns()
        # Unbuffered: one write() call is one system call, so no other point of failure lies inside a row.
        self._file: io.FileIO | None = io.FileIO(self._path, "a+")
        try:
            self._start(self._file)
        except BaseException:
            self.close()
            raise

    def write(self, row: Mapping[str, float | None]) -> None:
        """Append one row; what is missing or None is left empty, an unknown name is an error."""
        unknown = sorted(set(row) - self._known)
        if unknown:
            raise ValueError(f"{self._path}: no column for {', '.join(unknown)}")
        if self._file is None:
            raise ValueError(f"{self._path} is closed")
        self._append(self._file, ",".join(_text(row.get(name)) for name in self._names))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_columns(self) -> None:
        """Give a file of an earlier version the columns that it lacks; it is there whole, before or after."""
        if not self._path.is_file():
            return
        text = self._path.read_text(encoding="utf-8", errors="replace")
        rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
        old = rows[0] if rows else []
        if not old or set(old) == self._known or not set(old) < self._known:
            return
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(dict(zip(old, row, strict=True)) for row in rows[1:])
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)

    def _start(self, file: io.FileIO) -> None:
        file.seek(0)
        content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            file.truncate(len(complete))
        header = ",".join(self._names)
        if not complete:
            self._append(file, header)
        elif complete.split(b"\n", 1)[0].decode(errors="replace").rstrip("\r") != header:
            raise ValueError(f"{self._path} has other columns: it belongs to another run, give another directory")

    def _append(self, file: io.FileIO, line: str) -> None:
        data = (line + "\n").encode()
        before = os.fstat(file.fileno()).st_size
        written = file.write(data)
        if written != len(data):  # the disk is full: half a row would be read as a whole one
            file.truncate(before)
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes of a row fitted, it was left out")


def _text(value: float | None) -> str:
    # repr is the shortest text that reads back as the same float; it writes nan, inf and -inf.
    if value is None:
        return ""
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)
